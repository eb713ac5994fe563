import hashlib
import json
import os
from functools import partial

import numpy as np
import pytest
from filelock import FileLock

from data.config import DataConfig
from data.inspect import inspect
from data.prepare import prepare
from data.token_files import TokenWriter, publish
from data.tokens import open_tokens
from errors import UserError

DOCUMENTS = [("train", [1, 2, 3]), ("val", [4]), ("train", []), ("train", [5, 6])]
SETTINGS = {"name": "text"}


def config_of(folder, **settings):
    return DataConfig(**{"name": "tokens", "dir": str(folder), "tokenizer": "byte"} | settings)


def write(writer, documents):
    for split, ids in documents:
        writer.write(split, np.array([*ids, 256], dtype="<u2").tobytes(), 1)


def write_all(folder, documents=DOCUMENTS):
    with TokenWriter(folder, SETTINGS) as writer:
        write(writer, documents)
        return writer.finish("byte")


@pytest.fixture
def corpus(tmp_path):
    write_all(tmp_path / "corpus")
    return tmp_path / "corpus"


def test_written_files_are_opened(corpus):
    tokens = open_tokens(config_of(corpus))
    assert tokens.train.tolist() == [1, 2, 3, 256, 256, 5, 6, 256]
    assert tokens.val.tolist() == [4, 256]
    assert (tokens.train.dtype, tokens.tokenizer, tokens.vocab_size, tokens.dir) == (np.uint16, "byte", 257, corpus)
    assert not tokens.train.flags.writeable


def test_meta_counts_and_checks_the_files(corpus):
    meta = json.loads((corpus / "meta.json").read_text())
    assert meta["counts"] == {"train": {"tokens": 8, "documents": 3}, "val": {"tokens": 2, "documents": 1}}
    for name, digest in meta["sha256"].items():
        assert hashlib.sha256((corpus / name).read_bytes()).hexdigest() == digest
    assert open_tokens(config_of(corpus)).sha256 == meta["sha256"]["train.bin"]
    for checksums in ({}, {"sha256": None}, {"sha256": {}}):
        (corpus / "meta.json").write_text(json.dumps({key: meta[key] for key in meta if key != "sha256"} | checksums))
        assert open_tokens(config_of(corpus)).sha256 is None


def test_nanogpt_files_work_as_they_are(tmp_path):
    for split in ("train", "val"):
        np.array([50256, 7, 50000], dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    tokens = open_tokens(config_of(tmp_path, tokenizer="gpt2"))
    assert tokens.train.tolist() == tokens.val.tolist() == [50256, 7, 50000]
    assert tokens.vocab_size == 50257 and tokens.sha256 is None


def test_nanogpts_tokens_of_characters_are_refused(corpus):
    """They trained as if they were GPT-2's."""
    (corpus / "meta.pkl").write_bytes(b"never unpickled")
    open_tokens(config_of(corpus))  # our meta.json says what they are
    (corpus / "meta.json").unlink()
    with pytest.raises(UserError, match=r"tokens of single characters \(meta\.pkl\).*data\.prepare.*tokenizer=byte"):
        open_tokens(config_of(corpus, tokenizer="gpt2"))


LLM_C = np.array([20240520, 1, 600, *[0] * 253], dtype="<i4").tobytes()
TOKENS = np.arange(1, 601)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            LLM_C + TOKENS.astype("<u2").tobytes(),
            r"has llm\.c's header of 1,024 bytes; cut it off with `tail -c \+1025`",
        ),
        (np.array([20240801, 7]).astype("<i4").tobytes() + LLM_C, r"holds llm\.c's tokens of Llama 3; prepare"),
        (b"\x93NUMPY\x01\x00" + bytes(200), r"is a file of NumPy's"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n\n", "is a Git LFS pointer"),
        (TOKENS.astype("<u4").tobytes(), "holds tokens of 32 or 64 bits"),
        (TOKENS.astype("<i8").tobytes(), "holds tokens of 32 or 64 bits"),
    ],
    ids=["llm.c", "llama", "numpy", "lfs", "uint32", "int64"],
)
def test_a_foreign_format_is_refused_by_its_first_bytes(tmp_path, split, content, problem):
    for name in ("train", "val"):
        TOKENS.astype("<u2").tofile(tmp_path / f"{name}.bin")
    open_tokens(config_of(tmp_path, tokenizer="gpt2"))
    (tmp_path / f"{split}.bin").write_bytes(content)
    with pytest.raises(UserError, match=rf"{split}\.bin {problem}"):
        open_tokens(config_of(tmp_path, tokenizer="gpt2"))


def test_llm_c_tokens_are_read_after_the_remedy(tmp_path):
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes((LLM_C + TOKENS.astype("<u2").tobytes())[1024:])
    assert open_tokens(config_of(tmp_path, tokenizer="gpt2")).train.tolist() == TOKENS.tolist()


def test_a_missing_file_names_the_preparation(tmp_path):
    with pytest.raises(UserError) as refusal:
        open_tokens(config_of(tmp_path, name="text"))
    command = f"python -m data.prepare data=text data.dir={tmp_path} data.source=... data.tokenizer=byte"
    assert f"train.bin does not exist; run `{command}`" in str(refusal.value)
    with pytest.raises(UserError, match=r"train\.bin does not exist; set data\.dir"):
        open_tokens(config_of(tmp_path))


@pytest.mark.parametrize("name", ["wikitext-2", "tokens"])
def test_an_unfinished_preparation_is_continued_not_deleted(tmp_path, name):
    config = DataConfig(name=name, dir=str(tmp_path / "there"), tokenizer="gpt2")
    (tmp_path / "there" / "unfinished").mkdir(parents=True)
    with pytest.raises(UserError, match="its preparation is unfinished, so run the same .* again") as refusal:
        open_tokens(config)
    assert "delete" not in str(refusal.value)


def test_only_existing_files_are_to_be_deleted(tmp_path):
    config = DataConfig(name="wikitext-2", dir=str(tmp_path / "there"), tokenizer="gpt2")
    with pytest.raises(UserError, match=r"does not exist; run `python -m data\.prepare data=wikitext-2 data\.dir="):
        open_tokens(config)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "val.bin").write_bytes(b"ab")
    with pytest.raises(UserError, match=r"does not exist; delete the files in .* and run `python -m data\.prepare"):
        open_tokens(config)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, r"train\.bin is empty"),
        (7, r"train\.bin ends in half a token at byte 6"),
        (8, r"train\.bin holds 8 bytes, but its meta\.json promises 16"),
    ],
    ids=["empty", "half a token", "shorter than promised"],
)
def test_a_truncated_file_is_refused(corpus, size, message):
    with open(corpus / "train.bin", "r+b") as file:
        file.truncate(size)
    with pytest.raises(UserError, match=message):
        open_tokens(config_of(corpus))


def test_another_tokenizer_is_refused(corpus):
    with pytest.raises(UserError, match=r"data\.tokenizer=gpt2 does not match .*meta\.json, whose tokens are byte's"):
        open_tokens(config_of(corpus, tokenizer="gpt2"))


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_the_folder_of_another_corpus_is_refused(corpus, tokenizer):
    """data=wikitext-2 once trained on the tokens of any corpus that data.dir held."""
    with pytest.raises(UserError) as refusal:
        open_tokens(config_of(corpus, name="wikitext-2", tokenizer=tokenizer))
    problem = f"data=wikitext-2 does not match {corpus}/meta.json, whose tokens were made with data=text"
    assert str(refusal.value) == f"{problem}; set data=text or another data.dir"


@pytest.mark.parametrize(
    "source", [SETTINGS, {"name": "wikitext-2"}, {}, None], ids=["text", "other", "none", "no meta"]
)
def test_data_tokens_and_folders_of_unknown_corpora_are_opened(corpus, source):
    path = corpus / "meta.json"
    meta = json.loads(path.read_text()) | {"source": source}
    path.unlink() if source is None else path.write_text(json.dumps(meta))
    assert open_tokens(config_of(corpus)).train.size == 8
    if not source:
        assert open_tokens(config_of(corpus, name="wikitext-2")).train.size == 8


@pytest.mark.parametrize("name", ["stdlib", "tokens"])
@pytest.mark.parametrize(
    ("settings", "problem", "command"),
    [
        ({"source": "one.txt"}, "data.source=one.txt is", "data.source=one.txt data.dir=FOLDER`"),
        (
            {"text_column": "body", "source": "a.jsonl"},
            "data.source=a.jsonl is",
            "data.source=a.jsonl data.text_column=body data.dir=FOLDER`, or set data.source=null",
        ),
        (
            {"text_column": "body"},
            "data.text_column=body is",
            "data.source=TEXT data.text_column=body data.dir=FOLDER`, ",
        ),
        ({"document_start": "^x"}, """'data.document_start="^x"' is""", "data.source=TEXT 'data.document_start="),
        (
            {"train_files": "a"},
            "data.train_files=a is",
            "data.source=TEXT data.train_files=a data.dir=FOLDER`, or leave",
        ),
        (
            {"val_files": "b"},
            "data.val_files=b is",
            "data.source=TEXT data.val_files=b data.dir=FOLDER`, or leave it out",
        ),
    ],
)
def test_settings_of_a_text_are_refused_by_corpora_without_one(corpus, name, settings, problem, command):
    """The default, data=stdlib, once trained on the standard library although data.source named a text."""
    before = {path.name: path.read_bytes() for path in corpus.iterdir()}
    with pytest.raises(UserError) as refusal:
        open_tokens(config_of(corpus, name=name, **settings))
    start = f"{problem} not used by data={name}; prepare it with `python -m data.prepare data=text "
    assert str(refusal.value).startswith(start + command)
    assert {path.name: path.read_bytes() for path in corpus.iterdir()} == before


def test_tokens_of_another_source_are_refused(tmp_path, monkeypatch):
    """data.source=b.jsonl once trained on tokens that were made from a.jsonl."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "some text of this file"}\n' * 9)
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    config = partial(config_of, "o", name="text")
    prepare(config(source="a.jsonl"), log=lambda line: None)
    for same in (
        None,
        "a.jsonl",
        "./a.jsonl",
        "../" + tmp_path.name + "/a.jsonl",
        str(tmp_path / "a.jsonl"),
        "link.jsonl",
    ):
        assert open_tokens(config(source=same)).train.size
    with pytest.raises(UserError) as refusal:
        open_tokens(config(source="b.jsonl"))
    problem = "data.source=b.jsonl, but o was made from a.jsonl"
    assert str(refusal.value) == f"{problem}; prepare it in another data.dir, or leave data.source out"
    (tmp_path / "a.jsonl").unlink()  # the text may be gone
    assert open_tokens(config(source=str(tmp_path / "a.jsonl"))).train.size
    assert open_tokens(config_of("o")).train.size
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    config = partial(config_of, "../o", name="text")
    assert open_tokens(config(source=str(tmp_path / "a.jsonl"))).train.size
    with pytest.raises(UserError, match="made from a.jsonl"):
        open_tokens(config(source=str(tmp_path / "b.jsonl")))


def test_tokens_that_other_settings_made_are_refused(tmp_path, monkeypatch):
    """data.val_fraction=0.5 once trained on tokens of another split without a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "some text of this file"}\n' * 9)
    config = partial(config_of, "o", name="text")
    prepare(config(source="a.jsonl", val_fraction=0.2), log=lambda line: None)
    assert open_tokens(config(val_fraction=0.2)).val.size == open_tokens(config()).val.size
    problem = "data.dir=o was prepared with data.val_fraction=0.2, not data.val_fraction=0.5"
    remedy = "leave the setting out, or prepare the text in another data.dir"
    with pytest.raises(UserError) as refusal:
        open_tokens(config(val_fraction=0.5))
    assert str(refusal.value) == f"{problem}; {remedy}"
    with pytest.raises(UserError, match=r"prepared with data\.text_column=text, not data\.text_column=body;"):
        open_tokens(config(text_column="body"))


def test_the_split_is_refused_by_tokens_and_not_by_the_standard_library(corpus):
    with pytest.raises(UserError, match=r"data\.val_fraction=0\.5 is not used by data=tokens; prepare it with"):
        open_tokens(config_of(corpus, name="tokens", val_fraction=0.5))
    with pytest.raises(UserError, match="holds another corpus than the standard library"):
        open_tokens(config_of(corpus, name="stdlib", val_fraction=0.5))


@pytest.mark.parametrize(
    "source", [{"name": "wikitext-2", "source": None}, {"name": "wikitext-2"}], ids=["hub", "none"]
)
def test_a_source_is_refused_for_tokens_of_the_hub(corpus, source):
    path = corpus / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"source": source}))
    assert open_tokens(config_of(corpus, name="wikitext-2")).train.size == 8
    config = config_of(corpus, name="wikitext-2", source="copy")
    if "source" not in source:  # unknown
        assert open_tokens(config).train.size == 8
        return
    with pytest.raises(UserError, match=r"data\.source=copy, but .* was made from the files of the .* hub; leave data"):
        open_tokens(config)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tokenizer": "byte", "source": {}, "counts": {"train": 3}}'])
def test_a_foreign_meta_is_refused(corpus, text):
    (corpus / "meta.json").write_text(text)
    with pytest.raises(UserError, match=r"meta\.json does not describe token files"):
        open_tokens(config_of(corpus))


@pytest.mark.parametrize("checksums", ["0123", ["0123"], 123, {"train.bin": "0123"}, {"train.bin": 1, "val.bin": 2}])
def test_foreign_checksums_are_refused(corpus, checksums):
    """data.inspect once ended with a traceback."""
    meta = json.loads((corpus / "meta.json").read_text())
    (corpus / "meta.json").write_text(json.dumps(meta | {"sha256": checksums}))
    for act in (open_tokens, inspect):
        with pytest.raises(UserError, match=r"meta\.json does not describe token files; delete it"):
            act(config_of(corpus))


def test_a_file_is_not_a_folder_of_tokens(corpus):
    file = corpus / "train.bin"
    acts = [(open_tokens, config_of(file)), (open_tokens, config_of(file, name="stdlib"))]
    acts += [
        (prepare, config_of(file, name="text", source=str(corpus))),
        (prepare, config_of(file, name="openwebtext")),
    ]
    (corpus / "a.txt").write_text("text")
    for act, config in acts:
        with pytest.raises(UserError, match=rf"data\.dir={file} is a file; give the folder"):
            act(config)


def test_a_split_without_documents_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="the corpus holds no text"):
        write_all(tmp_path, [])
    with pytest.raises(UserError, match=r"none of the 2 documents is for val\.bin; set data\.val_files or data\."):
        write_all(tmp_path, DOCUMENTS[:1] * 2)
    assert not list(tmp_path.iterdir())


def test_a_writer_goes_on_where_it_was_last_saved(tmp_path):
    with TokenWriter(tmp_path, SETTINGS) as writer:
        write(writer, DOCUMENTS[:2])
        writer.position = [0, 2]
        writer.save()
        write(writer, [("train", [9, 9])])  # lost with the process
    with TokenWriter(tmp_path, SETTINGS) as writer:
        assert writer.position == [0, 2]
        write(writer, DOCUMENTS[2:])
        writer.finish("byte")
    tokens = open_tokens(config_of(tmp_path))
    assert (tokens.train.tolist(), tokens.val.tolist()) == ([1, 2, 3, 256, 256, 5, 6, 256], [4, 256])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_unfinished_files_of_other_settings_are_refused_and_kept(tmp_path):
    with TokenWriter(tmp_path, SETTINGS) as writer:
        writer.position = [0, 0]
        writer.save()
    with pytest.raises(UserError, match="was begun with data=text, not data=other; finish that preparation"):
        TokenWriter(tmp_path, {"name": "other"})
    with TokenWriter(tmp_path, SETTINGS) as writer:
        assert writer.position == [0, 0]


def test_two_processes_do_not_write_the_same_files(tmp_path):
    with (
        TokenWriter(tmp_path, SETTINGS),
        pytest.raises(UserError, match="unfinished is in use by another process; wait"),
    ):
        TokenWriter(tmp_path, SETTINGS)


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_kill_between_the_moves_of_finished_files_does_no_harm(corpus, moved):
    """The files are moved one after another, so a killed process may leave some in the scratch folder."""
    before = {file.name: file.read_bytes() for file in corpus.iterdir()}
    (corpus / "unfinished").mkdir()
    for name in ("train.bin", "val.bin", "meta.json")[moved:]:
        (corpus / name).rename(corpus / "unfinished" / name)
    publish(corpus)
    assert {file.name: file.read_bytes() for file in corpus.iterdir()} == before


def test_only_one_process_moves_finished_files(corpus):
    """Two at a time once lost meta.json: one deleted the scratch folder in which the other still had the file."""
    (corpus / "unfinished").mkdir()
    (corpus / "meta.json").rename(corpus / "unfinished" / "meta.json")
    with FileLock(corpus / "unfinished" / "lock"), pytest.raises(UserError, match="unfinished is in use by another"):
        publish(corpus)
    publish(corpus)
    assert (corpus / "meta.json").exists() and not (corpus / "unfinished").exists()


def test_a_writer_keeps_its_lock_until_its_files_are_moved(tmp_path, monkeypatch):
    """A second process that starts in between is refused, and loses nothing."""
    refused, move = [], os.replace

    def move_beside_another_process(source, target):
        if target.parent == tmp_path:
            with pytest.raises(UserError, match="unfinished is in use by another process"):
                publish(tmp_path)
            refused.append(target.name)
        move(source, target)

    monkeypatch.setattr(os, "replace", move_beside_another_process)
    write_all(tmp_path)
    assert refused == ["train.bin", "val.bin", "meta.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_files_of_the_user_in_a_folder_unfinished_are_kept(tmp_path):
    """A preparation into the folder of a book once deleted its drafts."""
    draft = tmp_path / "unfinished" / "chapter2.txt"
    draft.parent.mkdir()
    draft.touch()
    write_all(tmp_path)
    assert list(draft.parent.iterdir()) == [draft]
    with pytest.raises(UserError, match="holds no text"):
        write_all(tmp_path, [])
    assert list(draft.parent.iterdir()) == [draft]


def test_files_of_unknown_origin_are_not_overwritten(corpus):
    (corpus / "meta.json").unlink()
    with pytest.raises(UserError, match=r"holds token files without a meta\.json"):
        write_all(corpus)


def test_a_damaged_description_does_not_replace_a_good_one(corpus):
    good = (corpus / "meta.json").read_text()
    (corpus / "unfinished").mkdir()
    (corpus / "unfinished" / "meta.json").write_text("{")
    with pytest.raises(UserError, match="unfinished/meta.json does not describe token files; delete it"):
        publish(corpus)
    assert (corpus / "meta.json").read_text() == good


def test_the_command_of_the_remedy_works_in_a_folder_whose_name_has_a_space(tmp_path):
    folder = tmp_path / "my tokens"
    with pytest.raises(UserError) as refusal:
        open_tokens(config_of(folder, name="wikitext-2", tokenizer="gpt2"))
    assert f"""run `python -m data.prepare data=wikitext-2 'data.dir="{folder}"'`""" in str(refusal.value)


@pytest.mark.parametrize("name", ["text", "wikitext-2"])
def test_the_command_of_the_remedy_has_the_source_and_the_tokenizer_of_the_run(tmp_path, name):
    """Without the tokenizer, it made tokens that the next start refused."""
    with pytest.raises(UserError) as refusal:
        open_tokens(config_of(tmp_path, name=name, source="my/*.txt"))
    words = f"data={name} data.dir={tmp_path} 'data.source=\"my/*.txt\"' data.tokenizer=byte"
    assert f"run `python -m data.prepare {words}`" in str(refusal.value)
