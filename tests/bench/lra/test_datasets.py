"""Examples of all tasks, from the generators and from tiny files."""

import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bench.lra import datasets, listops, pathfinder
from bench.lra.datasets import load
from bench.lra.tasks import TABLE_3, TASKS
from data import hub
from errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "CACHE", tmp_path / "cache")


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_generated_examples_come_from_the_cache_and_do_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr(datasets, "CHUNK", 20)
    monkeypatch.setattr(datasets.os, "cpu_count", lambda: 1)
    task = replace(TASKS["listops"], examples={"train": 50, "test": 50})
    first = datasets._generate(task, "train")
    monkeypatch.setattr(datasets.os, "cpu_count", lambda: 3)
    loaded = load(task, "train")
    assert same(first, loaded) and loaded.tokens.shape == (50, 2_048)
    every = np.concatenate([loaded.tokens, load(task, "test").tokens])
    assert len(np.unique(every, axis=0)) == 100
    monkeypatch.setattr(listops, "generate", None)
    assert same(loaded, load(task, "train"))


def test_pixels_of_pathfinder_are_tokens():
    examples = load(replace(TASKS["pathfinder"], examples={"val": 20}), "val")
    drawing = pathfinder.generate(20, 32, np.random.default_rng((1, 1, 0)))
    assert (examples.tokens.reshape(20, 32, 32) == drawing.images + 1).all()
    assert (examples.lengths == 1_024).all() and (examples.labels == drawing.labels).all()


@pytest.mark.parametrize("name", TABLE_3)
def test_tokens_fit_the_embedding(name):
    task = TASKS[name]
    most = {"listops": listops.END, "pathfinder": 2}.get(name, 256)
    assert most < task.vocab_size and task.context_length <= task.padded_length < 2 * task.context_length


def write_rows(path, **columns):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_text_is_bytes(tmp_path):
    write_rows(tmp_path / "imdb" / "train-00000-of-00001.parquet", text=["a"], label=[0])
    write_rows(tmp_path / "imdb" / "test-00000-of-00001.parquet", text=["né\0", "", "x" * 5_000], label=[1, 0, 1])
    test = load(TASKS["text"], "test", source=str(tmp_path / "imdb"))
    assert same(test, load(TASKS["text"], "val", source=str(tmp_path / "imdb")))
    assert test.tokens.shape == (3, 4_096) and test.labels.tolist() == [1, 0, 1]
    assert test.lengths.tolist() == [4, 1, 4_000]
    assert test.tokens[0, :6].tolist() == [ord("n") + 1, 0xC3 + 1, 0xA9 + 1, 1, 0, 0]
    assert (test.tokens[2] == np.where(np.arange(4_096) < 4_000, ord("x") + 1, 0)).all()
    assert load(TASKS["text"], "train", source=str(tmp_path / "imdb")).lengths.tolist() == [1]


def test_images_are_grey_and_the_last_tenth_of_the_training_images_is_held_out(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    images = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": None})
    for name in "train", "test":
        write_rows(tmp_path / "cifar" / f"{name}-00000-of-00001.parquet", img=images, label=list(range(20)))
    train, val, test = (load(TASKS["image"], split, source=str(tmp_path / "cifar")) for split in datasets.SPLITS)
    assert [len(part.labels) for part in (train, val, test)] == [18, 2, 20] and val.labels.tolist() == [18, 19]
    grey = pixels.reshape(20, 1_024, 3) @ [0.299, 0.587, 0.114]
    assert np.abs(test.tokens - 1 - grey).max() < 1 and same(val, (part[18:] for part in test))


def test_retrieval_is_pairs_of_documents(tmp_path):
    lines = b"1.0\tid\tid\tb'one'\tb'" + b"y" * 5_000 + b"'\n0.0\tid\tid\tthree\tfour\n"
    (tmp_path / "new_aan_pairs.eval.tsv").write_bytes(lines)
    val = load(TASKS["retrieval"], "val", source=str(tmp_path))
    assert val.labels.tolist() == [1, 0] and val.lengths.tolist() == [6, 4_000, 5, 4]
    assert bytes((val.tokens[3, :4] - 1).astype(np.uint8)) == b"four" and not val.tokens[3, 4:].any()
    (tmp_path / "new_aan_pairs.test.tsv").write_bytes(lines + b"1.0\tid\n")
    with pytest.raises(UserError, match=r"new_aan_pairs\.test\.tsv line 3 is not a label and four texts; download"):
        load(TASKS["retrieval"], "test", source=str(tmp_path))


@pytest.mark.parametrize("name", datasets.SOURCES)
def test_missing_files_are_named_in_one_sentence(name, tmp_path, monkeypatch):
    what = datasets.SOURCES[name].hub_id
    with pytest.raises(UserError, match=f"source={tmp_path} has no .* for task={name}; download .* of {what} from"):
        load(TASKS[name], "train", source=str(tmp_path))

    def unreachable(*args, **options):
        raise hub.LocalEntryNotFoundError("no snapshot") if options.get("local_files_only") else ConnectionError("off")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    monkeypatch.setattr(hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(UserError, match=f"task={name} has no data .*; download .* of {what} from .* set source to"):
        load(TASKS[name], "train")


def test_a_source_of_a_generated_task_is_refused():
    with pytest.raises(UserError, match="source=x is not used by task=listops, which is generated; leave source out"):
        load(TASKS["listops"], "train", source="x")


def test_files_without_the_columns_are_refused(tmp_path):
    write_rows(tmp_path / "in" / "train-00000-of-00001.parquet", words=["a"], label=[0])
    with pytest.raises(UserError, match=r"in is not readable .*; give files with text and label"):
        load(TASKS["text"], "train", source=str(tmp_path / "in"))
