"""Check that the attention variants train the same model: one run of train.py for each, from the same seed.

Settings of train.py come after `--` and apply to all runs; `steps` replaces train.max_steps. The program fails if the
final validation losses spread over more than `tolerance` nats. Without a tolerance, the runs may differ in other
settings too, such as the optimizer.

Examples:
  python -m bench.parity steps=600 -- data=tokens data.dir=tokens/wikipedia
  python -m bench.parity "variants=[flash2,'flash2:optimizer=muon optimizer.lr=1e-3']" tolerance=null -- data=tokens
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path

import torch

from bench.common.command_line import check_choice, check_output_file, check_positive, launch
from bench.common.console import print_rows
from bench.common.results import ROOT, environment, results_folder, set_aside, write
from bench.report.runs import read_runs
from conf.schema import Config
from errors import UserError, refuse
from model.attention import BUILT_IN

RECIPE = [
    "model=gpt2",
    "train.batch_size=32",
    "train.eval_interval=100",
    "train.eval_tokens=360448",
    "train.sample_tokens=64",
    "optimizer.lr=6e-4",
    "optimizer.warmup_steps=60",
    "checkpoint.interval=1000000",
]
SET_HERE = {
    "attention": "name it in variants=",
    "train.max_steps": "give steps= instead",
    "wandb.mode": "leave it out, because the runs log no metrics to wandb",
    "hydra.run.dir": "leave it out, because each run has a folder of its own",
}
"""The settings of train.py that this program sets, and the remedy for a user who gives them."""
OF_TRAINING = {field.name for field in fields(Config)} | {"experiment"}
COLUMNS = {
    "attention": "{variant}",
    "val loss": "{val_loss:.4f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "TFLOP/s": "{tflops:.3g}",
    "MFU": "{mfu:.1%}",
    "peak GiB": "{peak_gib:.1f}",
}


@dataclass
class ParitySettings:
    """What `python -m bench.parity` reads."""

    variants: list[str] = field(default_factory=lambda: ["naive", "sdpa", "flash2"])
    """Attention variants. A variant may add settings of train.py, quoted: 'flash2:data.document_mask=true'."""
    settings: list[str] = field(default_factory=list)
    """Settings of train.py. Write them after `--` instead, without quotes."""
    steps: int = 600
    """Optimizer steps of each run, at least 2, because the first compiles and is not timed."""
    tolerance: float | None = 0.02
    """Largest spread of the final validation losses, in nats; null accepts any."""
    gpu: str | None = None
    """Folder under bench/results. null derives its name from the device."""
    out: Path | None = None
    """File to write. null writes bench/results/<gpu>/parity.json, but only for the default variants. The old file is
    renamed to *.json.old."""

    def __post_init__(self):
        check_positive(self, "steps")
        check_output_file("out", self.out)
        if self.steps < 2:
            raise UserError(f"steps={self.steps} leaves no step to time after the first; give at least 2")
        of_variants = " ".join(variant.partition(":")[2] for variant in self.variants).split()
        for word in [*self.settings, *of_variants]:
            if remedy := SET_HERE.get(key_of(word)):
                raise UserError(f"{word} is set by bench.parity itself; {remedy}")
        check_choice("variants", [variant.partition(":")[0] for variant in self.variants], BUILT_IN)


def key_of(word: str) -> str:
    """Return the key that a word of a command line sets, adds or deletes."""
    return word.lstrip("+~").partition("=")[0]


def run(settings: ParitySettings) -> None:
    """Train all variants in a new folder of outputs, compare them and write the results.

    Exit with status 1 if they differ too much.
    """
    if not torch.cuda.is_available() and "device=cpu" not in settings.settings:
        raise UserError("bench.parity finds no GPU; add -- device=cpu, which takes hours")
    work = Path(f"outputs/{datetime.now():%Y-%m-%d_%H-%M-%S}_parity").absolute()
    folders = {variant: work / re.sub(r"\W+", "-", variant) for variant in settings.variants}
    is_default = settings.variants == ParitySettings().variants
    out = settings.out or (results_folder(settings.gpu) / "parity.json" if is_default else None)
    for variant, folder in folders.items():
        train(variant, folder, settings)
    rows = [summarise(variant, folder) for variant, folder in folders.items()]
    if out:
        set_aside(out)
        write(out, {"environment": environment(), "rows": rows})
    print_rows("training parity", rows, COLUMNS)
    losses = [row["val_loss"] for row in rows]
    spread = max(losses) - min(losses)
    wanted = "" if settings.tolerance is None else f" (at most {settings.tolerance} wanted)"
    written = f"; written to {out}" if out else ""
    print(f"final validation losses spread over {spread:.4f} nats{wanted}{written}")
    if settings.tolerance is not None and spread > settings.tolerance:
        sys.exit(1)


def train(variant: str, folder: Path, settings: ParitySettings) -> None:
    """Train one variant in `folder`."""
    attention, _, own = variant.partition(":")
    fixed = [f"attention={attention}", f"train.max_steps={settings.steps}", "wandb.mode=disabled"]
    fixed += [f"hydra.run.dir={folder}", *own.split()]
    command = [sys.executable, "train.py", *RECIPE, *settings.settings, *fixed]
    if status := subprocess.run(command, cwd=ROOT).returncode:
        raise UserError(f"train.py ended with status {status} for {variant}; fix the error that is printed above")


def summarise(variant: str, folder: Path) -> dict:
    """Return the row of a run from its metrics.jsonl. Speeds are medians over the second half of the run."""
    [run] = read_runs([str(folder)])
    speeds = "tokens_per_second", "step_ms", "tflops", "tflops_causal", "mfu", "data_wait_fraction"
    curves = {key: [(row["step"], row[key]) for row in run.rows if key in row] for key in ("train/loss", "val/loss")}
    return {
        "variant": variant,
        "steps": run.rows[-1]["step"],
        "tokens": run.rows[-1]["tokens"],
        "val_loss": curves["val/loss"][-1][1],
        **{key: run.typical(f"perf/{key}") for key in speeds},
        "peak_gib": max(run.finite("memory/peak_allocated_gib"), default=None),  # a GPU's memory
        "loss_curve": curves["train/loss"],
        "val_curve": curves["val/loss"],
    }


def main() -> None:
    """Read the settings before `--` with Hydra, and the settings after it as a list for train.py."""
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    for argument in given[:end]:
        if key_of(argument).partition(".")[0] in OF_TRAINING:
            refuse(f"{argument} is not a setting of bench.parity; settings of train.py come after --")
    passed_on = [f"settings={json.dumps(given[end + 1 :], ensure_ascii=False)}"] if given[end:] else []
    sys.argv[1:] = given[:end] + passed_on
    launch(run, ParitySettings)


if __name__ == "__main__":
    main()
