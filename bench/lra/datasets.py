"""The examples of each task: generated and cached, or read from files.

ListOps and Pathfinder are generated once per seed and kept in tokens/lra. Text, Image and Retrieval come from the
Hugging Face hub or from a folder with the same files.
"""

import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from bench.common.results import ROOT
from bench.lra import listops, pathfinder
from bench.lra.tasks import Task
from data.config import DataConfig
from data.hub import download
from errors import UserError, described, problem_of

CACHE = ROOT / "tokens" / "lra"
SEED = 1
"""Seed of the generated examples."""
CHUNK = 1_000
"""Examples that one thread generates from a seed of its own."""
SPLITS = ("train", "val", "test")
LABELS = {b"0": 0, b"1": 1, b"0.0": 0, b"1.0": 1}
"""Labels in the files of Retrieval."""


class Examples(NamedTuple):
    """N examples of a task. With pairs, there are 2 N sequences: 2 i and 2 i + 1 are a pair."""

    tokens: np.ndarray
    """(N, T) uint8 or uint16, where T is the task's padded_length. Token 0 is padding."""
    lengths: np.ndarray
    """(N,) int32: the real tokens of each sequence."""
    labels: np.ndarray
    """(N,) int64."""


def first_of(examples: Examples, count: int) -> Examples:
    """Return the first `count` examples, or all if there are fewer."""
    sequences = count * (len(examples.tokens) // len(examples.labels))
    return Examples(examples.tokens[:sequences], examples.lengths[:sequences], examples.labels[:count])


@dataclass(frozen=True)
class Source:
    """A dataset on the hub and the files of each split."""

    hub_id: str
    revision: str
    pattern: str
    files: dict[str, str]
    columns: tuple[str, ...] = ()
    """Columns of the input and of the label in parquet files."""


SOURCES = {
    "text": Source(
        "stanfordnlp/imdb",
        "e6281661ce1c48d982bc483cf8a173c1bbeb5d31",
        "plain_text/t*.parquet",
        {"train": "train-*.parquet", "val": "test-*.parquet", "test": "test-*.parquet"},
        ("text", "label"),
    ),
    "image": Source(
        "uoft-cs/cifar10",
        "0b2714987fa478483af9968de7c934580d0bb9a2",
        "plain_text/t*.parquet",
        {"train": "train-*.parquet", "val": "train-*.parquet", "test": "test-*.parquet"},
        ("img", "label"),
    ),
    "retrieval": Source(
        "OpenNLPLab/lra",
        "6cb133c44f406da743661488df9e977b87d98775",
        "data/aan/new_aan_pairs.*.tsv",
        {split: f"new_aan_pairs.{name}.tsv" for split, name in zip(SPLITS, ("train", "eval", "test"), strict=True)},
    ),
}


def load(task: Task, split: str, *, source: str | None = None) -> Examples:
    """Return the examples of a split (train, val or test).

    `source` is a folder with the files of Text, Image or Retrieval. By default they come from the hub and its cache.

    Raises:
        UserError: the files are missing or broken, or the task needs no source.
    """
    if task.name not in SOURCES and source is not None:
        raise UserError(f"source={source} is not used by task={task.name}, which is generated; leave source out")
    if task.name not in SOURCES:
        return _cached(task, split)
    if task.pairs:
        return _read_pairs(task, _files_of(task, split, source))
    inputs, labels = _read_parquet(task, _files_of(task, split, source))
    if task.name == "text":
        return _pack([text.encode() for text in inputs], labels, task)
    held_out = len(labels) // 10  # Long Range Arena validates on the last tenth of the training images
    part = {"train": slice(0, len(labels) - held_out), "val": slice(len(labels) - held_out, None), "test": slice(None)}
    return _pack([_grey(image) for image in inputs[part[split]]], labels[part[split]], task)


def _cached(task: Task, split: str) -> Examples:
    """Return generated examples from the cache. A file belongs to one version of the generator."""
    generator = listops if task.name == "listops" else pathfinder
    version = hashlib.sha256(Path(generator.__file__).read_bytes()).hexdigest()[:8]
    path = CACHE / f"{task.name}-{split}-{task.examples[split]}-seed{SEED}-{version}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        with scratch.open("wb") as file:
            np.savez(file, **_generate(task, split)._asdict())
        scratch.replace(path)
    with np.load(path) as arrays:
        return Examples(**arrays)


def _generate(task: Task, split: str) -> Examples:
    """Return new examples. They do not depend on the number of threads."""
    count = task.examples[split]

    def chunk(first: int) -> Examples:
        rng = np.random.default_rng((SEED, SPLITS.index(split), first))
        size = min(CHUNK, count - first)
        if task.name == "listops":
            return Examples(*listops.generate(size, task.padded_length, rng))
        drawing = pathfinder.generate(size, task.image_size, rng)
        pixels = drawing.images.reshape(size, -1) + np.uint8(1)
        return Examples(pixels, np.full(size, task.context_length, np.int32), drawing.labels)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return Examples(*map(np.concatenate, zip(*threads.map(chunk, range(0, count, CHUNK)), strict=True)))


def _files_of(task: Task, split: str, source: str | None) -> list[Path]:
    """Return the files of a split, from the folder `source` or from the hub."""
    hub, pattern = SOURCES[task.name], SOURCES[task.name].files[split]
    remedy = f"download {hub.pattern} of {hub.hub_id} from the Hugging Face hub, and set source to their folder"
    if source is not None:
        files = sorted(Path(source).expanduser().rglob(pattern))
        if not files:
            raise UserError(f"source={source} has no {pattern} for task={task.name}; {remedy}")
        return files
    names = {"hub_id": hub.hub_id, "hub_revision": hub.revision, "hub_files": hub.pattern}
    patterns = {"train_files": hub.files["train"], "val_files": hub.files["test"]}
    try:
        files = download(DataConfig(name="text", dir="", tokenizer="byte", **names, **patterns), print)
    except UserError as error:
        raise UserError(f"task={task.name} has no data ({problem_of(error)}); {remedy}") from error
    return [path for path in files if path.match(pattern)]


def _read_parquet(task: Task, files: list[Path]) -> tuple[list, np.ndarray]:
    """Return the inputs and the labels of all rows."""
    columns = list(SOURCES[task.name].columns)
    try:
        table = pa.concat_tables(pq.read_table(path, columns=columns).select(columns) for path in files)
    except (pa.ArrowException, OSError, KeyError) as error:
        names = " and ".join(columns)
        raise UserError(f"{files[0].parent} is not readable ({described(error)}); give files with {names}") from error
    return table[columns[0]].to_pylist(), table[columns[1]].to_numpy().astype(np.int64)


def _grey(image: dict) -> bytes:
    """Return the grey levels of an encoded image, row by row."""
    return Image.open(io.BytesIO(image["bytes"])).convert("L").tobytes()


def _read_pairs(task: Task, files: list[Path]) -> Examples:
    """Return the pairs of documents in tab-separated lines: a label, two identifiers, and two texts."""
    documents, labels = [], []
    for label, texts in _lines(files):
        labels.append(label)
        documents += [text[: task.context_length] for text in texts]
    return _pack(documents, np.array(labels, np.int64), task)


def _lines(files: list[Path]) -> Iterator[tuple[int, list[bytes]]]:
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                label, *rest = line.rstrip(b"\r\n").split(b"\t")
                if len(rest) != 4 or label not in LABELS:
                    raise UserError(f"{path} line {number} is not a label and four texts; download the file again")
                yield LABELS[label], rest[2:]


def _pack(documents: list[bytes], labels: np.ndarray, task: Task) -> Examples:
    """Return examples of bytes. Token b + 1 is the byte b. Documents are cut at the task's context length.

    An empty document becomes a zero byte, because the mean over a sequence needs a token.
    """
    tokens = np.zeros((len(documents), task.padded_length), np.uint16)
    lengths = np.empty(len(documents), np.int32)
    for row, document in enumerate(documents):
        cut = np.frombuffer(document[: task.context_length] or b"\0", np.uint8)
        tokens[row, : len(cut)] = cut
        tokens[row, : len(cut)] += 1
        lengths[row] = len(cut)
    return Examples(tokens, lengths, labels)
