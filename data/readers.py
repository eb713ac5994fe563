"""Documents out of files: parquet, JSON lines and plain text, the last two also packed, streamed in a fixed order."""

import fnmatch
import glob
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data.config import DataConfig
from errors import UserError

PARQUET_ROWS = 128
BROKEN = (pa.ArrowException, OSError, UnicodeDecodeError)


class Row(NamedTuple):
    """A row of a file: its number from 0, its text if any, and the share of the file that is read by now."""

    number: int
    text: str | None
    share: float


class Document(NamedTuple):
    """A document of the corpus."""

    place: str
    """Its file and first row, for messages."""
    split: str | None
    """train or val where files say so, None where a share is to be held out."""
    row: int
    """Number of its first row, counted over all files."""
    text: str | None
    after: tuple[int, int]
    """File and row with which the next document begins."""
    bytes_read: int
    """Bytes of input read by now."""


class Corpus:
    """The files of a corpus in the order in which they are read, sorted by name."""

    def __init__(self, files: list[Path], config: DataConfig):
        self.files = [file for file in files if _split(file, config) != "none"]
        self.splits = [None if config.val_files is None else _split(file, config) for file in self.files]
        if config.val_files is not None:
            for split in ("train", "val"):
                if split not in self.splits:
                    pattern = getattr(config, f"{split}_files")
                    raise UserError(f"No file is called {pattern}: set data.{split}_files, or another data.source.")
        self.bytes = sum(_size(path) for path in self.files)
        self._column = config.text_column
        try:
            self._start = config.document_start and re.compile(config.document_start)
        except re.error as error:
            raise UserError(
                f"data.document_start={config.document_start} is no regular expression ({error})."
            ) from error

    def fingerprint(self) -> str:
        """Of the files' names, order and sizes."""
        listing = "".join(f"{path.name}\0{_size(path)}\n" for path in self.files)
        return hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()

    def count_rows(self) -> list[int]:
        """Rows of each file; without those of parquet, which says, the files are read for it."""
        return [self._count(path) for path in self.files]

    def _count(self, path: Path) -> int:
        if _is_text(path) and not self._start:
            return 1
        number = 0
        with _named(path, lambda: number + 1):
            if path.suffix == ".parquet":
                return pq.read_metadata(path).num_rows
            with _open(path) as (lines, _):
                for number, _ in enumerate(lines, start=1):  # noqa: B007 (read where it fails)
                    pass
        return number

    def text_bytes(self) -> int:
        """About how many bytes of text the files hold; packed ones are taken to hold four times their size."""
        return sum(_text_bytes(path, self._column) for path in self.files)

    def documents(self, first: tuple[int, int] = (0, 0), rows: list[int] | None = None) -> Iterator[Document]:
        """The documents in order, from a file and row on; `rows` as counted, where Document.row is wanted.

        Raises UserError naming the file and row that cannot be read.
        """
        bytes_before = sum(_size(path) for path in self.files[: first[0]])
        for i in range(first[0], len(self.files)):
            path, size = self.files[i], _size(self.files[i])
            row_before = sum(rows[:i]) if rows else 0
            for number, text, share, following in self._parts(path, first[1] if i == first[0] else 0):
                after = (i + 1, 0) if following is None else (i, following)
                place = f"{path} row {number + 1}"
                yield Document(
                    place, self.splits[i], row_before + number, text, after, bytes_before + round(share * size)
                )
            bytes_before += size

    def _parts(self, path: Path, first: int) -> Iterator[tuple[int, str | None, float, int | None]]:
        """First row, text and share of each document of a file, and the row of the next one, None at the end."""
        held: Row | None = None
        texts: list[str] = []
        for row in self._rows(path, first):
            if held is not None and not (self._start and not self._start.search(row.text or "")):
                yield held.number, self._join(texts, held), held.share, row.number
                held = None
            if held is None:
                held, texts = row, []
            texts.append(row.text or "")
            held = held._replace(share=row.share)
        if held is not None:
            yield held.number, self._join(texts, held), 1.0, None

    def _join(self, texts: list[str], row: Row) -> str | None:
        """A document's text: that of its one row, or of its parts, of which blank ones alone make none."""
        if not self._start:
            return row.text
        text = "".join(texts)
        return text if text.strip() else None

    def _rows(self, path: Path, first: int) -> Iterator[Row]:
        if _is_text(path):
            read = _read_lines if self._start else _read_text
        else:
            read = _read_parquet if path.suffix == ".parquet" else _read_jsonl
        number = first - 1
        with _named(path, lambda: number + 2):
            for row in read(path, self._column, first):
                number = row.number
                yield row


def find_files(source: str) -> list[Path]:
    """The readable files that `source`, a file, folder or glob, stands for, sorted. Raises UserError for none."""
    path = Path(source).expanduser()
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    # A path with brackets in it is a file, whatever glob makes of it.
    candidates = [path] if path.is_file() else found
    files = sorted(file for file in candidates if file.is_file() and file.name.endswith(ENDINGS))
    if not files:
        raise UserError(f"data.source={source} matches no file that ends in {', '.join(ENDINGS)}: set another one.")
    return files


PACKED = {".gz": "gzip", ".zst": "zstd"}
PLAIN = ".jsonl", ".txt", ".raw"
ENDINGS = (".parquet", *PLAIN, *(plain + packed for plain in PLAIN for packed in PACKED))


def _split(path: Path, config: DataConfig) -> str:
    if config.val_files is not None and fnmatch.fnmatch(path.name, config.val_files):
        return "val"
    return "train" if fnmatch.fnmatch(path.name, config.train_files) else "none"


def _is_text(path: Path) -> bool:
    unpacked = path.with_suffix("") if path.suffix in PACKED else path
    return unpacked.suffix not in (".parquet", ".jsonl")


@contextmanager
def _named(path: Path, row: Callable[[], int]) -> Iterator[None]:
    """What breaks inside, while `path` is read, is a UserError that names it and the row, counted from 1."""
    try:
        yield
    except BROKEN as error:
        raise UserError(f"{path} cannot be read from row {row()} on: mend or remove it ({error}).") from error


def _size(path: Path) -> int:
    """In bytes; of a file that is there no more, a UserError."""
    with _named(path, lambda: 1):
        return path.stat().st_size


def _text_bytes(path: Path, column: str) -> int:
    if path.suffix != ".parquet":
        return _size(path) * (4 if path.suffix in PACKED else 1)
    with _named(path, lambda: 1):
        file = pq.read_metadata(path)
    chunks = (file.row_group(i).column(j) for i in range(file.num_row_groups) for j in range(file.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def _read_parquet(path: Path, column: str, first: int) -> Iterator[Row]:
    with pq.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        if column not in columns:
            raise UserError(f"{path} has no column {column}: set data.text_column to one of {', '.join(columns)}.")
        total, number, groups = file.metadata.num_rows, 0, []
        for group in range(file.num_row_groups):  # those before `first` need not be read
            rows = file.metadata.row_group(group).num_rows
            if groups or number + rows > first:
                groups.append(group)
            else:
                number += rows
        for batch in file.iter_batches(PARQUET_ROWS, columns=[column], row_groups=groups):
            for text in _texts(batch.column(0)):
                if number >= first:
                    yield Row(number, _text(text, path, number, column), (number + 1) / total)
                number += 1


def _texts(values: pa.Array) -> Iterator[object]:
    try:
        yield from values.to_pylist()
    except UnicodeDecodeError:  # one after the other, so that the rows before the broken one are counted
        yield from (value.as_py() for value in values)


def _read_jsonl(path: Path, column: str, first: int) -> Iterator[Row]:
    with _open(path) as (lines, share):
        for number, line in enumerate(lines):
            if number >= first:
                text = _json_text(line, path, number, column) if line.strip() else None
                yield Row(number, text, share())


def _json_text(line: bytes, path: Path, number: int, column: str) -> str | None:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise  # the file is broken
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} row {number + 1} is no JSON: mend or remove it ({error}).") from error
    if not isinstance(row, dict) or column not in row:
        found = f"only {', '.join(row)}" if isinstance(row, dict) else "no object"
        raise UserError(f"{path} row {number + 1} has no key {column}, {found}: set data.text_column.")
    return _text(row[column], path, number, column)


def _read_text(path: Path, column: str, first: int) -> Iterator[Row]:
    with _open(path) as (file, _):
        yield Row(0, file.read().decode("utf-8"), 1.0)


def _read_lines(path: Path, column: str, first: int) -> Iterator[Row]:
    with _open(path) as (lines, share):
        for number, line in enumerate(lines):
            if number >= first:
                yield Row(number, line.decode("utf-8"), share())


def _text(value: object, path: Path, number: int, column: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{path} row {number + 1} holds a {type(value).__name__} in {column}, not text: set data.text_column."
        )
    return value


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], float]]]:
    """The file's bytes, unpacked, and a function that says what share of it is read by now."""
    size, codec = path.stat().st_size or 1, PACKED.get(path.suffix)
    with open(path, "rb") as raw:
        unpacked = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)) if codec else raw
        with unpacked as file:
            yield file, lambda: raw.tell() / size
