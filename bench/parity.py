"""Do the attention variants train the same model? One run each from the same seed: python -m bench.parity --help."""

import argparse
import json
import re
import statistics
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.common.command_line import output_file
from bench.common.results import ROOT, environment, results_folder, write
from errors import UserError, refusing
from model.attention import VARIANTS as ATTENTIONS

VARIANTS = ("naive", "sdpa", "flash2")
TOLERANCE = 0.02  # nats between the final validation losses


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.parity",
        description="Trains one model per attention variant from the same seed on the same tokens, and compares.",
        epilog="Example: python -m bench.parity data=tokens data.dir=tokens/wikipedia",
    )
    parser.add_argument("overrides", nargs="*", help="settings of train.py, the same for all (python train.py --help)")
    help_ = "which, separated by commas; one may have a setting of its own: flash2:data.document_mask=true"
    parser.add_argument("--variants", default=",".join(VARIANTS), help=help_)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="nats between the final validation losses")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run")
    parser.add_argument("--gpu", help="folder under bench/results; by default made of the device's name")
    parser.add_argument("--work", type=Path, help="folder of the runs; by default a new one in outputs")
    parser.add_argument("--out", type=output_file, help="file to write instead of bench/results/<gpu>/parity.json")
    return parser.parse_intermixed_args()


def check(arguments: argparse.Namespace) -> None:
    """UserError where a run could not be made, or its figures not be had; before the first of them takes its time."""
    for variant in arguments.variants.split(","):
        if (attention := variant.partition(":")[0]) not in ATTENTIONS:
            raise UserError(f"--variants names the attention {attention!r}; choose of {', '.join(ATTENTIONS)}")
        if (folder := folder_of(variant, arguments)).exists():
            raise UserError(f"{folder} has a run already; name another folder by --work")
    if arguments.steps < 2:
        raise UserError(f"--steps {arguments.steps} leaves no step to time after the first, which compiles; take 2")
    if not torch.cuda.is_available() and "device=cpu" not in arguments.overrides:
        raise UserError("bench.parity trains on a GPU, and torch finds none; device=cpu trains here, for hours")


def folder_of(variant: str, arguments: argparse.Namespace) -> Path:
    return arguments.work / re.sub(r"\W+", "-", variant)


def train(variant: str, arguments: argparse.Namespace) -> Path:
    """Runs train.py with one variant, and returns its folder.

    Raises:
        UserError: the run failed.
    """
    attention, _, own = variant.partition(":")
    folder = folder_of(variant, arguments)
    settings = [
        f"attention={attention}",
        *([own] if own else []),
        f"hydra.run.dir={folder}",
        f"train.max_steps={arguments.steps}",
        "wandb.mode=disabled",
    ]
    recipe = [
        "model=gpt2",
        "train.batch_size=32",
        "train.eval_interval=100",
        "train.eval_tokens=360448",
        "optimizer.lr=6e-4",
        "optimizer.warmup_steps=60",
        "checkpoint.interval=1000000",
        "train.sample_tokens=64",
    ]
    command = [sys.executable, str(ROOT / "train.py"), *recipe, *arguments.overrides, *settings]
    if code := subprocess.run(command, cwd=ROOT).returncode:
        raise UserError(f"train.py ended with status {code} for {variant}, and its reason is above; mend that")
    return folder


def summarise(variant: str, folder: Path) -> dict:
    """One row of the results from a run's metrics.jsonl: medians over the second half of the run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in rows if "perf/step_ms" in row]
    timed = timed[len(timed) // 2 :]

    def median(key: str) -> float | None:
        values = [row[key] for row in timed if key in row]
        return statistics.median_high(values) if values else None

    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    validation = [(row["step"], row["val/loss"]) for row in rows if "val/loss" in row]
    return {
        "variant": variant,
        "steps": rows[-1]["step"],
        "tokens": rows[-1]["tokens"],
        "val_loss": validation[-1][1],
        "tokens_per_second": median("perf/tokens_per_second"),
        "step_ms": median("perf/step_ms"),
        "tflops": median("perf/tflops"),
        "tflops_causal": median("perf/tflops_causal"),
        "mfu": median("perf/mfu"),
        "data_wait_fraction": median("perf/data_wait_fraction"),
        "peak_gib": max((row.get("memory/peak_allocated_gib", 0) for row in rows), default=None),
        "loss_curve": losses,
        "val_curve": validation,
    }


def show(rows: list[dict]) -> None:
    table = Table(title="training parity")
    for column in ("attention", "val loss", "tokens/s", "x naive", "TFLOP/s", "MFU", "peak GiB"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    naive = next((row["tokens_per_second"] for row in rows if row["variant"] == "naive"), None)
    for row in rows:
        table.add_row(
            row["variant"],
            f"{row['val_loss']:.4f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / naive:.2f}" if naive else "-",
            f"{row['tflops']:.0f}" if row["tflops"] >= 1 else f"{row['tflops']:.3f}",
            f"{row['mfu']:.1%}" if row["mfu"] else "-",
            f"{row['peak_gib']:.1f}" if row["peak_gib"] else "-",
        )
    Console(width=100).print(table)


@refusing()
def main() -> None:
    arguments = parse()
    arguments.work = arguments.work or Path(f"outputs/{datetime.now():%Y-%m-%d_%H-%M-%S}_parity")
    check(arguments)
    out = arguments.out or results_folder(arguments.gpu) / "parity.json"
    rows = [summarise(variant, train(variant, arguments)) for variant in arguments.variants.split(",")]
    write(out, {"environment": environment(), "rows": rows})
    show(rows)
    losses = [row["val_loss"] for row in rows]
    spread = max(losses) - min(losses)
    wanted = arguments.tolerance
    print(f"final validation losses spread over {spread:.4f} nats (at most {wanted} wanted); written to {out}")
    if spread > wanted:
        sys.exit(1)


if __name__ == "__main__":
    main()
