"""Measure the preparation of token files: ours and nanoGPT's way, on the same files, in turn in one process.

nanoGPT's way maps a `datasets` table with one process per worker, then writes all shards into one memory map. Its time
excludes loading the table; ours includes reading the files. Seconds are medians.

Example: python -m bench.prepare source="corpus/*.parquet"
"""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import MISSING

from bench.common.command_line import check_output_file, check_positive, launch
from bench.common.results import ROOT, environment, write
from data.config import DataConfig
from data.prepare import prepare
from data.readers import columns_of, find_files
from data.tokenizers import get_tokenizer
from data.tokens import DTYPE, read_meta
from errors import UserError

DOCUMENTS_PER_SHARD = 8_013_769 // 1024  # nanoGPT writes OpenWebText in 1024 shards.
VAL_FRACTION = 0.01
COLUMN = "text"  # as in DataConfig


@dataclass
class PreparationSettings:
    """What `python -m bench.prepare` reads."""

    source: str = MISSING
    """Parquet files with a column called text: a file, a folder or a glob, as for data.source."""
    workers: int | None = None
    """Threads of ours, and processes of nanoGPT's way. null uses all cores."""
    rounds: int = 3
    """Runs of each way."""
    out: Path | None = None
    """File to write. null writes bench/results/cpu/prepare.json."""

    def __post_init__(self):
        check_positive(self, "workers", "rounds", most=1024)
        check_output_file("out", self.out)


def run(settings: PreparationSettings) -> None:
    """Measure both ways, print the speeds and write the results."""
    check_files(settings.source)
    out = settings.out or ROOT / "bench" / "results" / "cpu" / "prepare.json"
    rows = measure(settings.source, settings.workers or os.cpu_count(), settings.rounds)
    speed = rows[0]["tokens_per_second"] / rows[1]["tokens_per_second"]
    for row in rows:
        print(f"{row['way']:8} {row['tokens_per_second'] / 1e6:.2f} M tokens/s")
    write(out, {"environment": environment(), "rows": rows, "speed": speed})
    print(f"ours is {speed:.2f} times as fast as nanoGPT's way; written to {out}")


def check_files(source: str) -> None:
    """Raise a UserError if a file of `source` is not a parquet file with a column called text."""
    for file in find_files(source, print, key="source"):
        if file.suffix != ".parquet":
            raise UserError(f"source={source} includes {file}; name .parquet files only, for nanoGPT's way")
        if COLUMN not in columns_of(file):
            raise UserError(f"source={source} includes {file} without a column {COLUMN}; name files that have one")


def measure(source: str, workers: int, rounds: int) -> list[dict]:
    """Return a row for each way. Every round runs each way once, in a new folder."""
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, way in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                samples[name].append(way(source, workers, Path(folder)))
            print(f"round {number + 1} of {rounds}: {name} {samples[name][-1][0]:.1f} s", flush=True)
    rows = []
    for name, pairs in samples.items():
        all_seconds, (tokens, *_) = zip(*pairs, strict=True)
        row = {"way": name, "workers": workers, "tokens": tokens, "seconds": statistics.median(all_seconds)}
        rows.append(row | {"tokens_per_second": tokens / row["seconds"], "all_seconds": all_seconds})
    if len({row["tokens"] for row in rows}) > 1:
        counts = " and ".join(f"{row['tokens']:,}" for row in rows)
        raise UserError(f"source={source} becomes {counts} tokens in the two ways; leave empty documents out of it")
    return rows


def ours(source: str, workers: int, folder: Path) -> tuple[float, int]:
    """Return the seconds and tokens of data.prepare."""
    config = DataConfig("text", str(folder), "gpt2", source=source, val_fraction=VAL_FRACTION, workers=workers)
    started = time.perf_counter()
    prepare(config, log=lambda line: None)
    return time.perf_counter() - started, sum(count["tokens"] for count in read_meta(folder)["counts"].values())


def nanogpts(source: str, workers: int, folder: Path) -> tuple[float, int]:
    """Return the seconds and tokens of nanoGPT's way."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    files = [str(path) for path in find_files(source, lambda line: None)]
    table = load_dataset("parquet", data_files=files, split="train", cache_dir=str(folder / "cache"))
    started = time.perf_counter()
    splits = table.train_test_split(test_size=VAL_FRACTION, seed=2357, shuffle=True)
    mapped = splits.map(tokenize, remove_columns=table.column_names, num_proc=workers, load_from_cache_file=False)
    tokens = 0
    for name, split in mapped.items():
        length = int(np.sum(split["len"], dtype=np.uint64))
        array = np.memmap(folder / f"{name}.bin", dtype=DTYPE, mode="w+", shape=(length,))
        shards, start = max(1, len(split) // DOCUMENTS_PER_SHARD), 0
        for index in range(shards):
            shard = split.shard(num_shards=shards, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(shard["ids"])
            array[start : start + len(ids)] = ids
            start += len(ids)
        array.flush()
        tokens += length
    return time.perf_counter() - started, tokens


def tokenize(row: dict) -> dict:
    """Return the token ids of a row of the table, and their number."""
    tokenizer = get_tokenizer("gpt2")
    ids = [*tokenizer._encoding.encode_ordinary(row[COLUMN]), tokenizer.eot]
    return {"ids": ids, "len": len(ids)}


WAYS = {"ours": ours, "nanogpt": nanogpts}

if __name__ == "__main__":
    launch(run, PreparationSettings)
