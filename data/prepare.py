"""Tokenize a corpus into token files, in constant memory, from where an earlier run of it was interrupted."""

if __name__ == "__main__":
    from errors import before_imports

    before_imports()

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data.config import DataConfig
from data.readers import Corpus, Document, find_files
from data.tokenizers import Tokenizer, get_tokenizer
from data.tokens import DTYPE, SPLITS, TokenWriter, differences, has_files, publish, read_meta
from errors import UserError

BATCH_CHARACTERS = 2**19
BATCH_DOCUMENTS = 1024
LOG_INTERVAL_S = 10.0
SAVE_INTERVAL_S = 2.0
# A byte of English becomes 0.23 tokens of GPT-2's, of code 0.4, of other scripts up to 0.7.
TOKENS_PER_BYTE = {"gpt2": 0.35, "byte": 1.01}


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


@dataclass
class Encoded:
    """A batch of documents as tokens: bytes and documents of each split, and how far the corpus is read after it."""

    blocks: dict[str, bytes]
    documents: dict[str, int]
    skipped: int
    after: tuple[int, int]
    bytes_read: int


def prepare(config: DataConfig, *, log: Callable[[str], None] = print) -> None:
    """Tokenize the corpus that `config` names into `config.dir`, unless that was done before with the same settings.

    Documents that are null or empty are skipped. A preparation that was killed is continued. Raises UserError where the
    corpus is not to be had, where a file cannot be read or lacks the text (naming file and row), where the disk is too
    small, where `config.dir` holds what was made with other settings, and where the whole of a corpus of the hub turns
    out to be another one than expected.
    """
    if config.name in ("stdlib", "tokens"):
        raise UserError(f"data={config.name} needs no preparation: set data=text and data.source to prepare text.")
    folder = Path(config.dir).expanduser()
    publish(folder)
    settings, done = _settings(config), f"{folder} is prepared already, with the same settings"
    expected = _expected(config, "tokens")
    if config.source is None:
        if _is_prepared(folder, settings):  # the hub's files need not be here any more
            return log(f"{done}.")
        get_tokenizer(config.tokenizer)  # what is missing is told before gigabytes are downloaded
        if expected:
            _check_space(folder, expected)
    corpus = Corpus(source_files(config, log), config)
    settings |= {"files": len(corpus.files), "bytes": corpus.bytes, "names_and_sizes": corpus.fingerprint()}
    if _is_prepared(folder, settings):
        return log(f"{done} and from files of the same names and sizes.")
    tokenizer = get_tokenizer(config.tokenizer)
    if not expected:
        _check_space(folder, round(corpus.text_bytes() * TOKENS_PER_BYTE[config.tokenizer]))
    rows = corpus.count_rows() if config.val_files is None else None
    if rows is not None:
        _check_expected(config, "documents", sum(rows))
    held_out = None if rows is None else hold_out(sum(rows), config.val_fraction, config.split_seed)
    with TokenWriter(folder, settings) as writer:
        if writer.position:
            log(f"continuing after {_tally(writer)}")
        documents = corpus.documents(tuple(writer.position or (0, 0)), rows)
        batches = _batches(documents)
        workers = config.workers or os.cpu_count() or 1
        with _progress(corpus, writer.position, log) as report:
            _write(writer, _encode_all(batches, tokenizer, held_out, workers), report)
        _check_expected(config, "tokens", _tally(writer).tokens)
        meta = writer.finish(config.tokenizer, settings)
        tally = _tally(writer)
    shares = ", ".join(f"{count['tokens']:,} in {split}.bin" for split, count in meta["counts"].items())
    log(f"{folder}: {tally}: {shares}.")


def source_files(config: DataConfig, log: Callable[[str], None]) -> list[Path]:
    """The corpus's files on this machine, downloaded where need be."""
    if config.source:
        return find_files(config.source)
    if config.hub_id is None:
        raise UserError("data.source is not set: name a file, a folder or a glob of text files.")
    from data.hub import download  # not needed, and slow to import, where the files are local

    return download(config, log)


def hold_out(rows: int, fraction: float, seed: int) -> np.ndarray:
    """Which of the rows are held out, boolean: those that `datasets`' train_test_split takes, as nanoGPT does."""
    held_out = np.zeros(rows, dtype=bool)
    held_out[np.random.default_rng(seed).permutation(rows)[: int(np.ceil(fraction * rows))]] = True
    return held_out


def _settings(config: DataConfig) -> dict:
    """What decides the token files, besides the files of the corpus; never the number of workers."""
    names = (
        "name",
        "source",
        "hub_id",
        "hub_revision",
        "hub_files",
        "text_column",
        "document_start",
        "train_files",
        "val_files",
    )
    settings = {name: getattr(config, name) for name in names}
    if config.val_files is None:
        settings |= {"val_fraction": config.val_fraction, "split_seed": config.split_seed}
    return settings | {"tokenizer": config.tokenizer}


def _is_prepared(folder: Path, settings: dict) -> bool:
    meta = read_meta(folder)
    if meta is None:
        return False
    if differing := differences(meta["source"], settings):
        raise UserError(f"{folder} was prepared with {differing}: choose another data.dir or delete it.")
    return has_files(folder)


def _check_space(folder: Path, tokens: int) -> None:
    """Raises UserError where token files of about so many tokens would not fit on the disk."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    unfinished = sum(path.stat().st_size for path in (folder / "unfinished").glob("*.bin"))
    needed, free = tokens * DTYPE.itemsize - unfinished, shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"{folder} needs about {needed / 1e9:.2f} GB more for {tokens:,} tokens, and its disk has "
            f"{free / 1e9:.2f} GB left: free some, or set data.dir to another disk."
        )


def _expected(config: DataConfig, key: str) -> int | None:
    """How many documents or tokens the corpus is known to have; None where it is not."""
    if config.source or (key == "tokens" and config.tokenizer != "gpt2"):
        return None
    return getattr(config, f"expected_{key}")


def _check_expected(config: DataConfig, key: str, total: int) -> None:
    """Raises UserError where the whole of a pinned corpus has another number of documents or tokens than is known."""
    expected = _expected(config, key)
    if expected in (None, total):
        return
    raise UserError(
        f"{config.hub_id} gave {total:,} {key}, where {expected:,} are known of it: its files are not whole, or not "
        f"those of revision {config.hub_revision}; delete them from the hub's cache, and what {config.dir} holds, and "
        "prepare it again."
    )


def _encode_all(
    batches: Iterable[list[Document]], tokenizer: Tokenizer, held_out: np.ndarray | None, workers: int
) -> Iterator[Encoded]:
    """The batches as tokens, in order, a few of them at a time in threads: the tokenizer releases the GIL."""
    with ThreadPoolExecutor(workers) as pool:
        pending: deque = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(_encode, batch, tokenizer, held_out))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _encode(batch: list[Document], tokenizer: Tokenizer, held_out: np.ndarray | None) -> Encoded:
    parts: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for document in batch:
        if document.text:
            split = document.split or ("val" if held_out[document.row] else "train")
            try:
                parts[split].append(tokenizer.encode_document(document.text))
            except UserError as error:
                raise UserError(f"{document.place}: {error}") from error
    blocks = {split: b"".join(part.astype(DTYPE, copy=False).tobytes() for part in parts[split]) for split in SPLITS}
    documents = {split: len(parts[split]) for split in SPLITS}
    last = batch[-1]
    return Encoded(blocks, documents, len(batch) - sum(documents.values()), last.after, last.bytes_read)


def _write(writer: TokenWriter, batches: Iterable[Encoded], report: Callable[[Tally], None]) -> None:
    saved = time.monotonic()
    for batch in batches:
        for split in SPLITS:
            writer.write(split, batch.blocks[split], batch.documents[split])
        writer.skipped += batch.skipped
        writer.position = list(batch.after)
        if time.monotonic() - saved >= SAVE_INTERVAL_S:
            writer.save(writer.position)
            saved = time.monotonic()
        report(_tally(writer, batch.bytes_read))


def _tally(writer: TokenWriter, bytes_read: int = 0) -> Tally:
    totals = (sum(count[key] for count in writer.counts.values()) for key in ("documents", "tokens"))
    documents, tokens = totals
    return Tally(documents, writer.skipped, tokens, bytes_read)


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


@contextmanager
def _progress(
    corpus: Corpus, position: list[int] | None, log: Callable[[str], None]
) -> Iterator[Callable[[Tally], None]]:
    """A function to call with the tally after every batch: moves a bar on a terminal, logs a line now and then else."""
    read_before = sum(path.stat().st_size for path in corpus.files[: position[0] if position else 0])
    if not Console().is_terminal:
        yield _line_reporter(corpus.bytes, read_before, log)
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=corpus.bytes, completed=read_before)
        yield lambda tally: bar.update(task, completed=tally.bytes_read, description=str(tally))


def _line_reporter(total_bytes: int, read_before: int, log: Callable[[str], None]) -> Callable[[Tally], None]:
    start = last = time.monotonic()

    def report(tally: Tally) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LOG_INTERVAL_S or tally.bytes_read <= read_before:
            return
        last = now
        rate = (tally.bytes_read - read_before) / (now - start)
        eta = (total_bytes - tally.bytes_read) / rate
        log(f"{tally}, {tally.bytes_read / total_bytes:.0%} read at {rate / 1e6:.1f} MB/s, {eta:.0f} s to go")

    return report


if __name__ == "__main__":
    from conf.cli import launch  # the command line knows this package, not the other way round

    launch(lambda config: prepare(config.data), "prepare")
