"""Tokenize a corpus into token files, in constant memory. An interrupted preparation is continued."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.config import HELD_OUT_DOCUMENTS, HELD_OUT_TOKENS, SPLIT_KEYS, DataConfig
from data.readers import BadRow, Corpus, Document, Position, find_files
from data.token_files import SPLITS, TokenWriter, differences, has_files, publish, read_meta
from data.tokenizers import Tokenizer, get_tokenizer
from errors import UserError, problem_of

BATCH_CHARACTERS = 2**19
BATCH_DOCUMENTS = 1024
LOG_INTERVAL_S = 10.0
SAVE_INTERVAL_S = 2.0

Log = Callable[[str], None]


class Encoded(NamedTuple):
    """A batch of documents as tokens: bytes and documents of each split, and the place in the corpus after it.

    `empty` documents were skipped, and so were the `bad` rows.
    """

    blocks: dict[str, bytes]
    documents: dict[str, int]
    empty: int
    bad: list[str]
    after: Position
    bytes_read: int


def prepare(config: DataConfig, *, log: Log = print) -> None:
    """Tokenize the corpus of `config` into `config.dir`, unless this was done before with the same settings.

    Skip documents that are null or empty. Continue a preparation that was killed or stopped.

    Raises:
        UserError: the corpus cannot be read, `config.dir` was made with other settings, or the disk is full.
    """
    if config.name in ("stdlib", "tokens"):
        raise UserError(f"data={config.name} needs no preparation; set data=text and data.source to prepare text")
    if config.val_fraction is not None and config.val_files is not None:
        raise UserError(
            f"data.val_fraction={config.val_fraction} has no effect beside data.val_files={config.val_files}; "
            "set one of them to null"
        )
    folder, settings = Path(config.dir).expanduser(), _settings(config)
    done = f"{folder} is prepared already, with the same settings"
    publish(folder)
    if config.source is None:
        if _is_prepared(folder, settings):  # without looking for the hub's files, which may be deleted
            return log(done)
        if config.hub_id is not None:
            get_tokenizer(config.tokenizer, ", or data.tokenizer=byte")  # fail before gigabytes are downloaded
    corpus = Corpus(source_files(config, log), config)
    if _is_prepared(folder, settings | corpus.summary()):
        return log(f"{done} and from files of the same names and sizes")
    tokenizer = get_tokenizer(config.tokenizer, ", or data.tokenizer=byte")
    rows = held_out = None
    if config.val_files is None:
        rows = corpus.count_rows()
        _check_documents(config, sum(rows))
        held_out = hold_out(sum(rows), config.val_fraction or HELD_OUT_DOCUMENTS, config.split_seed)
    with TokenWriter(folder, settings) as writer:
        if writer.position:
            writer.position = Position(*writer.position)
            if not corpus.is_unchanged(writer.position):
                raise UserError(
                    f"{writer.scratch} was begun with other files or rows than those before its place to continue; "
                    "put the files back, delete that folder, or choose another data.dir"
                )
            log(f"continuing after {_tally(writer)}")
        documents = corpus.documents(writer.position, rows)
        encode = partial(_encode, tokenizer=tokenizer, held_out=held_out, skip=config.on_bad_row == "skip")
        encoded = _encode_all(documents, encode, config.workers or os.cpu_count() or 1)
        _write(writer, encoded, corpus.sizes, log)
        if held_out is not None and writer.total("documents") and not writer.counts["val"]["documents"]:
            share = config.val_fraction or HELD_OUT_TOKENS
            log(
                f"{_tally(writer)}: too few to hold out whole documents, so val.bin gets the last {100 * share:g} % of "
                "the tokens; data.val_fraction sets this share"
            )
            writer.hold_out_tail(share, tokenizer.eot)
        writer.finish(config.tokenizer, **corpus.summary())
    shares = ", ".join(f"{count['tokens']:,} in {split}.bin" for split, count in writer.counts.items())
    log(f"{folder}: {_tally(writer)}: {shares}")
    if writer.bad_rows:
        log(f"skipped {writer.bad_rows[0]}; {folder / 'meta.json'} lists all {len(writer.bad_rows):,} bad rows")


def source_files(config: DataConfig, log: Log) -> list[Path]:
    """Return the corpus's files on this machine. Hub corpora are downloaded if needed."""
    if config.source:
        return find_files(config.source, log)
    if config.hub_id is None:
        raise UserError(
            "data.source=null names no text; give a file, a folder or a glob of text files, or set data=CORPUS"
        )
    from data.hub import download  # slow to import

    return download(config, log)


def hold_out(rows: int, fraction: float, seed: int) -> np.ndarray:
    """Return which rows are held out, boolean (rows,). These are the rows that nanoGPT holds out with `datasets`.

    No row is held out if the share of one of the splits is less than a row.
    """
    held_out = np.zeros(rows, dtype=bool)
    if rows * min(fraction, 1 - fraction) >= 1:
        held_out[np.random.default_rng(seed).permutation(rows)[: int(np.ceil(fraction * rows))]] = True
    return held_out


def _settings(config: DataConfig) -> dict:
    """Return the settings that the token files depend on."""
    names = ["name", "source", "hub_id", "hub_revision", "hub_files", "text_column", "document_start"]
    names += ["train_files", "val_files", "tokenizer"]
    names += SPLIT_KEYS if config.val_files is None else ()
    return {name: getattr(config, name) for name in names}


def _is_prepared(folder: Path, settings: dict) -> bool:
    meta = read_meta(folder)
    if meta is None:
        return False
    if differing := differences(meta["source"], settings):
        raise UserError(f"{folder} was prepared with {differing}; choose another data.dir, or delete that folder")
    return has_files(folder)


def _check_documents(config: DataConfig, total: int) -> None:
    """Raise UserError if a hub corpus does not have the known number of documents."""
    if config.source is None and config.expected_documents not in (None, total):
        raise UserError(
            f"data.hub_id={config.hub_id} has {total:,} documents in the hub's cache, but "
            f"{config.expected_documents:,} in revision {config.hub_revision}; delete its files in the cache, and "
            "prepare it again"
        )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_all(
    documents: Iterator[Document], encode: Callable[[list[Document]], Encoded], workers: int
) -> Iterator[Encoded]:
    """Yield the documents as tokens, in order. Threads suffice, because the tokenizer releases the GIL."""
    pool, pending = ThreadPoolExecutor(workers), deque()

    def submitted() -> Iterator[Future]:
        try:
            for batch in _batches(documents):
                yield pool.submit(encode, batch)
        except UserError as error:  # a bad row; the batches before it come first
            failed = Future()
            failed.set_exception(error)
            yield failed

    try:
        for future in submitted():
            pending.append(future)
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(batch: list[Document], tokenizer: Tokenizer, held_out: np.ndarray | None, skip: bool) -> Encoded:
    parts: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    empty, bad = 0, []
    for document in batch:
        bad += document.bad
        empty += not document.text and not document.bad
        if document.text:
            split = document.split or ("val" if held_out[document.row] else "train")
            try:
                parts[split].append(tokenizer.encode_document(document.text))
            except UserError as error:
                row = BadRow(document.place, f"cannot be encoded ({problem_of(error)})")
                if not skip:
                    raise row from error
                bad.append(row.summary)
    blocks = {split: b"".join(part.tobytes() for part in parts[split]) for split in SPLITS}
    documents = {split: len(parts[split]) for split in SPLITS}
    return Encoded(blocks, documents, empty, bad, batch[-1].after, batch[-1].bytes_read)


def _write(writer: TokenWriter, batches: Iterable[Encoded], sizes: list[int], log: Log) -> None:
    """Write the batches. Save and log at intervals. `sizes` are the bytes of each file of the corpus."""
    read_before = sum(sizes[: writer.position.file]) if writer.position else 0
    start = saved = logged = time.monotonic()
    for batch in batches:
        for split in SPLITS:
            writer.write(split, batch.blocks[split], batch.documents[split])
        writer.skipped += batch.empty
        writer.bad_rows += batch.bad
        writer.position = batch.after
        now = time.monotonic()
        if now - saved >= SAVE_INTERVAL_S:
            writer.save()
            saved = time.monotonic()
        if now - logged >= LOG_INTERVAL_S and batch.bytes_read > read_before:
            rate = (batch.bytes_read - read_before) / (now - start)
            eta = (sum(sizes) - batch.bytes_read) / rate
            share = batch.bytes_read / sum(sizes)
            log(f"{_tally(writer)}, {share:.0%} read at {rate / 1e6:.1f} MB/s, {eta:.0f} s to go")
            logged = now


def _tally(writer: TokenWriter) -> str:
    skipped = [f"{writer.skipped:,} empty ones"] if writer.skipped else []
    skipped += [f"{len(writer.bad_rows):,} bad rows"] if writer.bad_rows else []
    note = f" ({' and '.join(skipped)} skipped)" if skipped else ""
    return f"{writer.total('documents'):,} documents{note}, {writer.total('tokens'):,} tokens"


if __name__ == "__main__":
    from conf.cli import launch  # conf imports data, so data imports it only as a program

    launch(lambda config: prepare(config.data), "prepare")
