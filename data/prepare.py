"""Tokenize text files into token files: documents are streamed, so memory does not grow with the corpus."""

import glob
import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data.config import DataConfig
from data.tokenizers import Tokenizer, get_tokenizer
from data.tokens import has_files, read_meta, split_of, write_tokens
from errors import UserError

BATCH_CHARACTERS = 2**22
BATCH_DOCUMENTS = 1024
PARQUET_ROWS = 128
LOG_INTERVAL_S = 10.0


class Row(NamedTuple):
    """A row of a file: its number (from 1), its text if any, and the share of the file that is read by now."""

    number: int
    text: str | None
    share: float


class Document(NamedTuple):
    """A row of the corpus: its file and number, its text if any, and the input bytes read by now."""

    name: str
    text: str | None
    bytes_read: int


@dataclass
class Tally:
    """What has been done so far."""

    documents: int = 0
    skipped: int = 0
    tokens: int = 0
    bytes_read: int = 0

    def __str__(self) -> str:
        skipped = f" ({self.skipped:,} empty ones skipped)" if self.skipped else ""
        return f"{self.documents:,} documents{skipped}, {self.tokens:,} tokens"


def prepare(config: DataConfig, *, log: Callable[[str], None] = print) -> None:
    """Tokenize `config.source` into `config.dir`, unless that was done before with the same settings.

    Documents that are null or empty are skipped. Raises UserError where no file matches, where a file cannot be read
    or lacks the text (naming file and row), and where `config.dir` holds token files made with other settings.
    """
    if config.name != "text":
        raise UserError(f"data={config.name} needs no preparation: set data=text and data.source to prepare text.")
    files = input_files(config.source)
    folder = Path(config.dir).expanduser()
    settings = {
        "name": "text",
        "source": config.source,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "text_column": config.text_column,
        "val_fraction": config.val_fraction,
        "split_seed": config.split_seed,
    }
    if _is_prepared(folder, config.tokenizer, settings):
        log(f"{folder} is prepared already, with the same settings.")
        return
    tokenizer = get_tokenizer(config.tokenizer)
    documents = read_documents(files, config.text_column)
    tally = Tally()
    with _progress(settings["bytes"], log) as report:
        meta = write_tokens(folder, _encode(documents, tokenizer, config, tally, report), tokenizer, settings)
    shares = ", ".join(f"{count['tokens']:,} in {split}.bin" for split, count in meta["counts"].items())
    log(f"{folder}: {tally}: {shares}.")


def _is_prepared(folder: Path, tokenizer: str, settings: dict) -> bool:
    meta = read_meta(folder)
    if meta is None:
        return False
    before, now = meta["source"] | {"tokenizer": meta["tokenizer"]}, settings | {"tokenizer": tokenizer}
    differing = [key for key in now if before.get(key) != now[key]]
    if differing:
        was, wanted = (", ".join(f"{key}={side.get(key)}" for key in differing) for side in (before, now))
        raise UserError(f"{folder} was prepared with {was}, not {wanted}: choose another data.dir or delete it.")
    return has_files(folder)


def _encode(
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    config: DataConfig,
    tally: Tally,
    report: Callable[[Tally], None],
) -> Iterator[tuple[str, list[int]]]:
    """Split and token ids of every document that has text, in order."""
    for batch in _batches(documents):
        kept = [document for document in batch if document.text]
        encoded = tokenizer.encode_batch([document.text for document in kept])
        for document, ids in zip(kept, encoded, strict=True):
            tally.tokens += len(ids) + 1
            yield split_of(document.name, config), ids
        tally.documents += len(kept)
        tally.skipped += len(batch) - len(kept)
        tally.bytes_read = batch[-1].bytes_read
        report(tally)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text or "")
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def input_files(source: str | None) -> list[Path]:
    """The readable files that `source`, a file, folder or glob, stands for, sorted. Raises UserError for none."""
    if not source:
        raise UserError("data.source is not set: name a file, a folder or a glob of text files.")
    path = Path(source).expanduser()
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    # A path with brackets in it is a file, whatever glob makes of it.
    candidates = [path] if path.is_file() else found
    files = sorted(file for file in candidates if file.is_file() and file.name.endswith(tuple(READERS)))
    if not files:
        raise UserError(f"data.source={source} matches no file that ends in {', '.join(READERS)}: set another one.")
    return files


def read_documents(files: list[Path], column: str) -> Iterator[Document]:
    """The documents of `files` in order. Raises UserError naming the file and row that cannot be read."""
    bytes_before = 0
    for path in files:
        size, number = path.stat().st_size, 0
        read = next(reader for ending, reader in READERS.items() if path.name.endswith(ending))
        try:
            for number, text, share in read(path, column):
                yield Document(f"{path.name}:{number}", text, bytes_before + round(share * size))
        except (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read from row {number + 1} on: mend or remove it ({error}).") from error
        bytes_before += size


def _read_parquet(path: Path, column: str) -> Iterator[Row]:
    with pq.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        if column not in columns:
            raise UserError(f"{path} has no column {column}: set data.text_column to one of {', '.join(columns)}.")
        rows, number = file.metadata.num_rows, 1
        for batch in file.iter_batches(PARQUET_ROWS, columns=[column]):
            for text in batch.column(0).to_pylist():
                yield Row(number, _text(text, path, number, column), number / rows)
                number += 1


def _read_jsonl(path: Path, column: str) -> Iterator[Row]:
    with _open(path) as (lines, share):
        for number, line in enumerate(lines, start=1):
            text = _json_text(line, path, number, column) if line.strip() else None
            yield Row(number, text, share())


def _json_text(line: bytes, path: Path, number: int, column: str) -> str | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} row {number} is no JSON: mend or remove it ({error}).") from error
    if not isinstance(row, dict) or column not in row:
        found = f"only {', '.join(row)}" if isinstance(row, dict) else "no object"
        raise UserError(f"{path} row {number} has no key {column}, {found}: set data.text_column.")
    return _text(row[column], path, number, column)


def _read_txt(path: Path, column: str) -> Iterator[Row]:
    with _open(path) as (file, _):
        yield Row(1, file.read().decode("utf-8"), 1.0)


READERS = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".txt": _read_txt,
    ".txt.gz": _read_txt,
}


def _text(value: object, path: Path, number: int, column: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{path} row {number} holds a {type(value).__name__} in {column}, not text: set data.text_column."
        )
    return value


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
    """The file's bytes, unpacked where it ends in .gz, and a function that says what share of it is read by now."""
    size = path.stat().st_size or 1
    with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        yield file, lambda: raw.tell() / size


@contextmanager
def _progress(total_bytes: int, log: Callable[[str], None]) -> Iterator[Callable[[Tally], None]]:
    """A function to call with the tally after every batch: moves a bar on a terminal, logs a line now and then else."""
    if not Console().is_terminal:
        yield _line_reporter(total_bytes, log)
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda tally: bar.update(task, completed=tally.bytes_read, description=str(tally))


def _line_reporter(total_bytes: int, log: Callable[[str], None]) -> Callable[[Tally], None]:
    start = last = time.monotonic()

    def report(tally: Tally) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LOG_INTERVAL_S or not tally.bytes_read:
            return
        last = now
        rate = tally.bytes_read / (now - start)
        eta = (total_bytes - tally.bytes_read) / rate
        log(f"{tally}, {tally.bytes_read / total_bytes:.0%} read at {rate / 1e6:.1f} MB/s, {eta:.0f} s to go")

    return report


if __name__ == "__main__":
    from conf.cli import launch  # the command line knows this package, not the other way round

    launch(lambda config: prepare(config.data), "prepare")
