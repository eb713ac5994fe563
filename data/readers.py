"""Documents from files, streamed in a fixed order: parquet, JSON lines and plain text; the last two also compressed."""

import codecs
import fnmatch
import glob
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data.config import DataConfig
from data.folders import describe, is_lfs_pointer, real_files
from errors import UserError

PARQUET_ROWS = 128
BROKEN = (pa.ArrowException, OSError, UnicodeDecodeError)
CODECS = {".gz": "gzip", ".zst": "zstd"}
PLAIN = ".jsonl", ".txt", ".raw"
ENDINGS = (".parquet", *PLAIN, *(plain + packed for plain in PLAIN for packed in CODECS))


class BadRow(UserError):
    """A row that is not text. data.on_bad_row=skip leaves it out."""

    def __init__(self, place: str, problem: str, remedy: str = "fix it"):
        super().__init__(f"{place} {problem}; {remedy}, or set data.on_bad_row=skip")
        self.summary = f"{place} {problem}"


class Position(NamedTuple):
    """A place in the corpus, with what identifies the part before it."""

    file: int
    row: int
    checksum: int
    """CRC-32 of the rows before it in the file, or a parquet file's size."""
    name: str
    """Name of the file."""
    before: str
    """Hash of the names and sizes of the files before it."""


class Row(NamedTuple):
    """A row of a file, and the share and the checksum of the file's part that is read so far."""

    number: int
    text: str | None
    share: float
    checksum: int
    bad: tuple[str, ...] = ()
    """The problems of the row, if the row is skipped."""


class Document(NamedTuple):
    """A document of the corpus."""

    place: str
    """Its file and first row, for messages."""
    split: str | None
    """train or val if the file decides, None if a share is held out."""
    row: int
    """Number of its first row, counted over all files."""
    text: str
    """Empty if the row is null or bad, or if document_start is set and all rows are blank."""
    bad: tuple[str, ...]
    """Its rows that are skipped, and why."""
    after: Position
    """Where to continue reading."""
    bytes_read: int
    """Bytes of input read so far."""


def find_files(source: str, log: Callable[[str], None], key: str = "data.source") -> list[Path]:
    """Return the readable files of `source` (a file, folder or glob), sorted. Log which files are skipped.

    `key` is the setting that messages name.

    Raises:
        UserError: no file matches.
    """
    path = Path(source).expanduser()
    # A file whose name has brackets is not a pattern.
    places = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    files, skipped = real_files(places, ENDINGS)
    note = f"skipped {describe(skipped)}" if skipped else "nothing skipped"
    if not files:
        endings = ", ".join(ENDINGS)
        raise UserError(f"{key}={source} matches no file that ends in {endings} ({note}); set another {key}")
    if skipped:
        log(f"{key}={source}: {len(files):,} files; {note}")
    return files


class Corpus:
    """The files of a corpus, in reading order."""

    def __init__(self, files: list[Path], config: DataConfig):
        patterns = {"val": config.val_files, "train": config.train_files}
        chosen = [(file, split) for file in files if (split := _split(file, patterns))]
        self.files = [file for file, _ in chosen]
        self.splits = [None if config.val_files is None else split for _, split in chosen]
        for split, pattern in patterns.items():
            if config.val_files is not None and split not in self.splits:
                raise UserError(f"data.{split}_files={pattern} matches no file; set another pattern or data.source")
        self.sizes, self.hashes = [], [hashlib.sha256().hexdigest()]
        """Bytes of each file, and hashes of the names and sizes of the first 0, 1, ... all files."""
        names_and_sizes = hashlib.sha256()
        for path in self.files:
            with _named(path):
                self.sizes.append(path.stat().st_size)
                if is_lfs_pointer(path):
                    raise UserError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` there")
            names_and_sizes.update(f"{path.name}\0{self.sizes[-1]}\n".encode(errors="surrogateescape"))
            self.hashes.append(names_and_sizes.hexdigest())
        self._column, self._skips = config.text_column, config.on_bad_row == "skip"
        try:
            self._start = config.document_start and re.compile(config.document_start)
        except re.error as error:
            setting = f"data.document_start={config.document_start}"
            raise UserError(f"{setting} is not a regular expression ({error}); fix it") from error

    def summary(self) -> dict:
        """Return what tells this corpus from others of the same settings."""
        return {"files": len(self.files), "bytes": sum(self.sizes), "names_and_sizes": self.hashes[-1]}

    def is_unchanged(self, position: Position) -> bool:
        """Return whether what was read before `position` is still the same."""
        i = position.file
        if i >= len(self.files) or (self.files[i].name, self.hashes[i]) != (position.name, position.before):
            return False
        if self.files[i].suffix == ".parquet":
            return self.sizes[i] == position.checksum
        read = (0, 0)
        with _named(self.files[i], lambda: read[0] + 1):
            lines = islice(_read_lines(self.files[i], whole=self._is_document(i)), position.row)
            for number, (_, _, checksum) in enumerate(lines, start=1):
                read = (number, checksum)
        return read == (position.row, position.checksum)

    def count_rows(self) -> list[int]:
        """Return the rows of each file. Files other than parquet are read for this."""
        return [self._count(i) for i in range(len(self.files))]

    def _count(self, i: int) -> int:
        number = 0
        with _named(self.files[i], lambda: number + 1):
            if self.files[i].suffix == ".parquet":
                return pq.read_metadata(self.files[i]).num_rows
            if self._is_document(i):
                return 1
            for _ in _read_lines(self.files[i]):
                number += 1
        return number

    def _is_document(self, i: int) -> bool:
        """Return whether file `i` is one document and one row."""
        return _is_text(self.files[i]) and not self._start

    def documents(self, first: Position | None = None, rows: list[int] | None = None) -> Iterator[Document]:
        """Yield the documents in order, from `first` on. `rows` is count_rows(), needed for Document.row.

        Raises:
            UserError: a row cannot be read; names file and row.
        """
        start, start_row = (first.file, first.row) if first else (0, 0)
        for i in range(start, len(self.files)):
            path, rows_before, bytes_before = self.files[i], sum(rows[:i]) if rows else 0, sum(self.sizes[:i])
            for part in self._join(self._rows(i, start_row if i == start else 0)):
                text, last = "".join(row.text or "" for row in part), part[-1]
                yield Document(
                    place=f"{path} row {part[0].number + 1}",
                    split=self.splits[i],
                    row=rows_before + part[0].number,
                    text=text if text.strip() or not self._start else "",
                    bad=sum((row.bad for row in part), ()),
                    after=Position(i, last.number + 1, last.checksum, path.name, self.hashes[i]),
                    bytes_read=bytes_before + round(last.share * self.sizes[i]),
                )

    def _join(self, rows: Iterator[Row]) -> Iterator[list[Row]]:
        """Yield the rows of each document of a file: one, or with document_start all up to the next match."""
        document = []
        for row in rows:
            # `$` matches before "\n", but not before the "\r\n" of Windows.
            if document and (not self._start or self._start.search((row.text or "").replace("\r\n", "\n"))):
                yield document
                document = []
            document.append(row)
        if document:
            yield document

    def _rows(self, i: int, first: int) -> Iterator[Row]:
        path, number = self.files[i], first
        if path.suffix == ".parquet":
            values = _read_parquet(path, self._column, first)
        else:
            values = _read_lines(path, first, whole=self._is_document(i))
        with _named(path, lambda: number + 1):
            for value, share, checksum in values:
                text, bad = None, ()
                try:
                    text = _parse(value, path, f"{path} row {number + 1}", self._column)
                except BadRow as error:
                    if not self._skips:
                        raise
                    bad = (error.summary,)
                yield Row(number, text, share, checksum, bad)
                number += 1


def _split(path: Path, patterns: dict[str, str | None]) -> str | None:
    for split, pattern in patterns.items():
        if pattern is not None and fnmatch.fnmatch(path.name, pattern):
            return split
    return None


def _is_text(path: Path) -> bool:
    unpacked = path.with_suffix("") if path.suffix in CODECS else path
    return unpacked.suffix not in (".parquet", ".jsonl")


@contextmanager
def _named(path: Path, row: Callable[[], int] = lambda: 1) -> Iterator[None]:
    """Turn a read error inside the context into a UserError that names `path` and the row, counted from 1."""
    try:
        yield
    except BROKEN as error:
        raise UserError(f"{path} cannot be read from row {row()} on ({error}); fix or remove it") from error


def columns_of(path: Path) -> list[str]:
    """Return the names of a parquet file's columns."""
    with _named(path):
        return pq.read_schema(path).names


def _read_parquet(path: Path, column: str, first: int) -> Iterator[tuple[pa.Scalar, float, int]]:
    """Yield the values of `column` from row `first` on, with Row's share and checksum."""
    size = path.stat().st_size
    with pq.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        if column not in columns:
            raise UserError(f"data.text_column={column} is not in {path}; set one of {', '.join(columns)}")
        number = 0
        for group in range(file.num_row_groups):
            if number + (rows := file.metadata.row_group(group).num_rows) <= first:
                number += rows
                continue
            for batch in file.iter_batches(PARQUET_ROWS, columns=[column], row_groups=[group]):
                for value in batch.column(0):
                    if number >= first:
                        yield value, (number + 1) / file.metadata.num_rows, size
                    number += 1


def _read_lines(path: Path, first: int = 0, whole: bool = False) -> Iterator[tuple[bytes, float, int]]:
    """Yield the lines from `first` on, or the whole file as one, with Row's share and checksum."""
    size, codec, checksum = path.stat().st_size or 1, CODECS.get(path.suffix), 0
    with open(path, "rb") as raw:
        unpacked = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)) if codec else raw
        with unpacked as file:
            for number, line in enumerate([file.read()] if whole else file):
                checksum = zlib.crc32(line, checksum)
                if number >= first:
                    yield line if number else line.removeprefix(codecs.BOM_UTF8), raw.tell() / size, checksum


def _parse(value: bytes | pa.Scalar, path: Path, place: str, column: str) -> str | None:
    """Return the text of a row, or None for a null or an empty JSON line."""
    try:
        if _is_text(path):
            return value.decode("utf-8")
        if isinstance(value, pa.Scalar):
            text = value.as_py()
        else:
            text = _json_value(value, place, column) if value.strip() else None
    except UnicodeDecodeError as error:
        raise BadRow(place, f"is not UTF-8 ({error})") from error
    if not isinstance(text, str | None):
        raise BadRow(place, f"holds {type(text).__name__} in {column}, not text", "set data.text_column")
    return text


def _json_value(line: bytes, place: str, column: str) -> object:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise  # see _parse
    except (ValueError, RecursionError) as error:
        raise BadRow(place, f"is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadRow(place, "is not a JSON object")
    if column not in row:
        raise BadRow(place, f"has no key {column}", f"set data.text_column to one of {', '.join(row)}")
    return row[column]
