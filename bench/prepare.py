"""Preparation of token files: ours beside nanoGPT's way, on the same files, in one process, alternating.

    python -m bench.prepare --source "corpus/*.parquet"    a table, and bench/results/cpu/prepare.json

nanoGPT's way is a map over a `datasets` table with as many processes as there are workers, then a write of all shards
into one memory map. Loading the table, which writes a copy of the corpus to disk, is not counted for it; reading the
files is for ours. Seconds are medians; the tokens of both must be as many.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.common.command_line import output_file, positive
from bench.common.results import ROOT, environment, write
from data.config import DataConfig
from data.prepare import prepare
from data.readers import find_files
from data.tokenizers import get_tokenizer
from data.tokens import DTYPE, read_meta
from errors import UserError, refusing

DOCUMENTS_PER_SHARD = 8_013_769 // 1024  # nanoGPT writes OpenWebText in 1024 shards
VAL_FRACTION = 0.01


def ours(source: str, workers: int, folder: Path) -> tuple[float, int]:
    """Seconds and tokens of data.prepare."""
    config = DataConfig("text", str(folder), "gpt2", source=source, val_fraction=VAL_FRACTION, workers=workers)
    started = time.perf_counter()
    prepare(config, log=lambda line: None)
    seconds = time.perf_counter() - started
    return seconds, sum(count["tokens"] for count in read_meta(folder)["counts"].values())


def as_tokens(row: dict) -> dict:
    """A row of the table as its ids and their number."""
    tokenizer = get_tokenizer("gpt2")
    ids = [*tokenizer._encoding.encode_ordinary(row["text"]), tokenizer.eot]
    return {"ids": ids, "len": len(ids)}


def nanogpts(source: str, workers: int, folder: Path) -> tuple[float, int]:
    """Seconds and tokens of a map and a memory map."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    files = [str(path) for path in find_files(source)]
    table = load_dataset("parquet", data_files=files, split="train", cache_dir=str(folder / "cache"))
    started = time.perf_counter()
    splits = table.train_test_split(test_size=VAL_FRACTION, seed=2357, shuffle=True)
    mapped = splits.map(as_tokens, remove_columns=table.column_names, num_proc=workers, load_from_cache_file=False)
    tokens = 0
    for name, split in mapped.items():
        length = int(np.sum(split["len"], dtype=np.uint64))
        array = np.memmap(folder / f"{name}.bin", dtype=DTYPE, mode="w+", shape=(length,))
        shards = max(1, len(split) // DOCUMENTS_PER_SHARD)
        start = 0
        for index in range(shards):
            shard = split.shard(num_shards=shards, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(shard["ids"])
            array[start : start + len(ids)] = ids
            start += len(ids)
        array.flush()
        tokens += length
    return time.perf_counter() - started, tokens


WAYS = {"ours": ours, "nanogpt": nanogpts}


def measure(source: str, workers: int, rounds: int) -> list[dict]:
    """A row for each way; every round does each once, in a folder of its own."""
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in WAYS}
    for round_ in range(rounds):
        for name, run in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                samples[name].append(run(source, workers, Path(folder)))
            print(f"round {round_ + 1} of {rounds}: {name} {samples[name][-1][0]:.1f} s", flush=True)
    rows = []
    for name, pairs in samples.items():
        seconds, tokens = statistics.median(pair[0] for pair in pairs), pairs[0][1]
        row = {"way": name, "workers": workers, "tokens": tokens, "seconds": seconds}
        rows.append(row | {"tokens_per_second": tokens / seconds, "all_seconds": [pair[0] for pair in pairs]})
    if len({row["tokens"] for row in rows}) > 1:
        raise UserError(f"the ways differ in their tokens: {rows}")
    return rows


@refusing()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", required=True, help="parquet files with a column called text, as data.source")
    parser.add_argument("--workers", type=positive, default=os.cpu_count(), help="threads, and processes (all cores)")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each (3)")
    parser.add_argument("--out", type=output_file, default=ROOT / "bench" / "results" / "cpu" / "prepare.json")
    arguments = parser.parse_args()
    if other := next((file for file in find_files(arguments.source) if file.suffix != ".parquet"), None):
        raise UserError(f"--source {arguments.source} has {other}, and nanoGPT's way is for .parquet; name such files")
    rows = measure(arguments.source, arguments.workers, arguments.rounds)
    speed = rows[0]["tokens_per_second"] / rows[1]["tokens_per_second"]
    for row in rows:
        print(f"{row['way']:8} {row['tokens_per_second'] / 1e6:.2f} M tokens/s")
    print(f"ours over nanoGPT's: {speed:.2f}; written to {arguments.out}")
    write(arguments.out, {"environment": environment(), "rows": rows, "speed": speed})


if __name__ == "__main__":
    main()
