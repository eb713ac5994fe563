import os
from pathlib import Path

import pytest

from data.config import DataConfig
from data.prepare import prepare
from data.readers import find_files
from data.tokens import open_tokens
from errors import UserError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def found(source, root):
    said = []
    names = [str(file.relative_to(root)) for file in find_files(str(source), said.append)]
    return names, said


def write(path, content=b'{"text": "a"}\n'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def folder(tmp_path):
    """Make a corpus of three files among everything that a folder may hold."""
    root = tmp_path / "corpus"
    for name in (
        "a.jsonl",
        "deep/er/b.jsonl",
        "._a.jsonl",
        ".ipynb_checkpoints/a-checkpoint.jsonl",
        "notes.md",
        "t.csv",
    ):
        write(root / name)
    write(tmp_path / "elsewhere" / "c.jsonl")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "loop").symlink_to(root)
    (root / "z.jsonl").symlink_to(root / "a.jsonl")
    os.link(root / "a.jsonl", root / "deep" / "hard.jsonl")
    os.mkfifo(root / "pipe.jsonl")
    return root


def test_each_real_file_is_read_once_and_what_is_skipped_is_named(folder):
    names, (line,) = found(folder, folder)
    assert names == ["a.jsonl", "deep/er/b.jsonl", "linked/c.jsonl"]
    assert "3 files; skipped 2 hidden (._a.jsonl, .ipynb_checkpoints), " in line
    assert "3 the same again (hard.jsonl, loop, z.jsonl)" in line
    assert "3 of another type (notes.md, pipe.jsonl, t.csv)" in line


@pytest.mark.parametrize("pattern", ["*", "**", "**/*", "**/*.jsonl"])
def test_a_glob_finds_the_same_files(folder, pattern):
    names, _ = found(folder / pattern, folder)
    assert sorted(os.path.basename(name) for name in names) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_one_file_and_a_hidden_source_are_read(folder):
    assert found(folder / "._a.jsonl", folder) == (["._a.jsonl"], [])
    names, _ = found(folder / ".ipynb_checkpoints", folder)
    assert names == [".ipynb_checkpoints/a-checkpoint.jsonl"]


def test_a_source_of_other_files_names_them(tmp_path):
    write(tmp_path / "notes.md")
    with pytest.raises(
        UserError, match=r"no file that ends in .*skipped 1 of another type \(notes\.md\)\); set another"
    ):
        found(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["b.jsonl", "b.txt", "b.parquet", "b.jsonl.gz"])
def test_a_git_lfs_pointer_is_not_text(tmp_path, name):
    write(tmp_path / "in" / "a.jsonl")
    write(tmp_path / "in" / name, POINTER)
    with pytest.raises(UserError, match=r"b\..* is a Git LFS pointer, not the file itself; run `git lfs pull`"):
        prepare(DataConfig("text", str(tmp_path / "out"), "byte", source=str(tmp_path / "in")), log=lambda line: None)


def test_a_link_to_nothing_is_refused(tmp_path):
    write(tmp_path / "in" / "a.jsonl")
    Path(tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match=r"b\.jsonl cannot be read .*No such file"):
        prepare(DataConfig("text", str(tmp_path / "out"), "byte", source=str(tmp_path / "in")), log=lambda line: None)


def test_the_documents_of_a_hidden_copy_are_not_doubled(folder, tmp_path):
    config = DataConfig("text", str(tmp_path / "out"), "byte", source=str(folder), val_fraction=0.4)
    said = []
    prepare(config, log=said.append)
    tokens = open_tokens(config)
    assert len(tokens.train) + len(tokens.val) == 3 * 2
    assert "3 files; skipped" in said[0]
