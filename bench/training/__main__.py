"""Measure training steps of ours, nanoGPT and Hugging Face side by side on one GPU, and the floor of a step.

Each trainer first runs alone at the cell's micro-batches, from the smallest until the speed falls or memory runs out.
Then all trainers of the cell are timed in turn in one process, each at its best micro-batch and alone in the GPU's
memory. The file has all rows; "best" marks those timed in turn, and tables show only these. A cell is a model at a
context length. The floor is the model's matrix products and the fastest attention alone.

Example: python -m bench.training cells=[gpt2_1k] nanogpt=path/to/nanoGPT/model.py breakdown=true
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bench.attention.contenders import available
from bench.common.command_line import check_choice, check_output_file, check_positive, launch
from bench.common.console import print_rows
from bench.common.results import environment, results_folder, set_aside, write
from bench.common.timing import Gpu, recorded
from bench.training.breakdown import breakdown
from bench.training.floor import floor_finalists, floor_row
from bench.training.steps import Finalist, alternate, search, text_of
from bench.training.trainers import Job, Trainer, TrainingCell, huggingface, load_nanogpt, nanogpt, ours
from errors import UserError
from model.attention import Custom, load_function
from model.attention.custom import is_installed
from trainer.precision import has_fp8

# The GPT-3 models try the largest micro-batch that nanoGPT has memory for on an H200, and twice that size.
CELLS = {
    cell.name: cell
    for cell in (
        TrainingCell("gpt2", 1024, (32, 64, 128, 256)),
        TrainingCell("gpt2", 8192, (1, 8, 16)),
        TrainingCell("gpt2", 16384, (1, 4)),
        TrainingCell("gpt2-medium", 1024, (32, 64)),
        TrainingCell("gpt3-1.3b", 2048, (24, 48), "selective"),
        TrainingCell("gpt3-1.3b", 8192, (6, 12), "selective"),
        TrainingCell("gpt3-2.7b", 2048, (12, 24), "selective"),
        TrainingCell("gpt3-2.7b", 8192, (3, 6), "selective"),
        TrainingCell("gpt2", 65536, (1,)),
        TrainingCell("gpt2", 131072, (1,)),
        TrainingCell("gpt2", 262144, (1,), "full"),
        TrainingCell("gpt2", 1048576, (1,), "full"),
    )
}
ATTENTIONS = {
    "ours": ("flash2", "sdpa", "flash1", "fused_softmax", "naive"),  # the variants that compute every causal pair
    "nanogpt": ("sdpa", "naive"),
    "huggingface": ("sdpa", "naive"),
}
FP8 = "ours:flash2:fp8"
TORCHAO = "nanogpt:sdpa:tensorwise", "nanogpt:sdpa:rowwise"
TRAINERS = {
    str(trainer): trainer
    for name, attentions in ATTENTIONS.items()
    for compiled in (True, False)
    for trainer in (Trainer(name, attention, compiled) for attention in attentions)
} | {FP8: Trainer("ours", "flash2", precision="fp8")}
TRAINERS |= {name: Trainer("nanogpt", "sdpa", precision=name.rpartition(":")[2]) for name in TORCHAO}
MAIN, NAIVE = ("ours:flash2", FP8, "nanogpt:sdpa", *TORCHAO), ("ours:naive", "nanogpt:naive")
WITH_NAIVE = "gpt2_8k", "gpt2_16k"  # around the longest context that naive attention has memory for
LONGEST_FLOOR = 8192  # At longer contexts the floor is nearly all attention.


@dataclass
class TrainingSettings:
    """What `python -m bench.training` reads."""

    cells: list[str] | None = None
    """Measure only these cells, for example [gpt2_1k,gpt3-2.7b_8k]. An unknown name prints all of them."""
    trainers: list[str] | None = None
    """Measure only these, for example [ours:flash2,nanogpt:sdpa:eager]. An unknown name prints all of them. null: all
    for gpt2_1k; ours:flash2 and nanogpt:sdpa in bf16 and FP8 for the others, and both with naive attention for gpt2_8k
    and gpt2_16k. Rows of FP8 need a GPU with FP8, and nanoGPT's rows of FP8 need torchao."""
    function: str | None = None
    """Your own attention, written module:function. It gets a compiled and an uncompiled row in each cell."""
    nanogpt: Path | None = None
    """nanoGPT's model.py. null leaves nanoGPT out, and then the published results are not replaced."""
    batches: list[int] | None = None
    """Micro-batches to try instead of the cell's, for example [32,64]."""
    rounds: int = 5
    """Samples of each trainer, taken in turn."""
    breakdown: bool = False
    """Also profile each trainer and show the time of each class of kernels."""
    budget_seconds: float = 3600
    """No cell begins after this time."""
    out: Path | None = None
    """File to write. null writes bench/results/<this GPU>/training.json, but only if everything is measured. The
    old file is renamed to *.json.old at the start."""

    def __post_init__(self):
        check_positive(self, "batches", most=2**20)
        check_positive(self, "rounds", most=10_000)
        check_positive(self, "budget_seconds", most=365 * 24 * 3600)
        check_output_file("out", self.out)
        check_choice("cells", self.cells, CELLS)
        check_choice("trainers", self.trainers, TRAINERS)
        for name in self.trainers or []:
            if problem := obstacle(TRAINERS[name], self.nanogpt):
                raise UserError(f"trainers={name} {problem}")

    def is_partial(self) -> bool:
        """Return whether the results are incomplete and must not replace the published ones."""
        return bool(self.cells or self.trainers or self.function or self.batches or not self.nanogpt)


def run(settings: TrainingSettings) -> None:
    """Measure the cells. Write all rows again after each trainer, so that an interruption loses little."""
    builders = load_builders(settings)
    if not torch.cuda.is_available():
        raise UserError("bench.training finds no GPU; run it on a machine with a GPU")
    out = settings.out or (None if settings.is_partial() else results_folder() / "training.json")
    torch.backends.cuda.matmul.allow_tf32 = True  # as in nanoGPT
    torch._dynamo.config.automatic_dynamic_shapes = False  # Compile each micro-batch separately.
    torch._dynamo.config.recompile_limit = 64
    where, rows, gpu = environment(), [], Gpu()
    until = time.monotonic() + settings.budget_seconds
    gpu.wake()
    if out:
        print(f"the rows are written to {out} after each trainer")
        set_aside(out)
    for cell in chosen_cells(settings):
        if time.monotonic() > until:
            print(f"budget_seconds={settings.budget_seconds:g} is used up; skipped: {cell.name}")
            continue
        print(cell.name, flush=True)
        for measured in measure(cell, settings, builders, gpu):
            new = [row | {"commit": where["commit"]} for row in measured]
            if out:
                write(out, {"environment": where, "rows": rows + new})
        rows += new
    show(rows)
    if out:
        print(f"written to {out}")


def load_builders(settings: TrainingSettings) -> dict[str, Callable[..., Job]]:
    """Return the function that builds a job, by the trainer's name. Refuse bad files of the user before measuring."""
    if settings.function:
        Custom(f"function={settings.function}", load_function(settings.function))
    builders = {"ours": ours, "huggingface": huggingface}
    if settings.nanogpt:
        builders["nanogpt"] = partial(nanogpt, module=load_nanogpt(settings.nanogpt))
    return builders


def chosen_cells(settings: TrainingSettings) -> list[TrainingCell]:
    """Return the cells of the settings, micro-batches in ascending order."""
    cells = [CELLS[name] for name in settings.cells or CELLS]
    batches = tuple(sorted(set(settings.batches or ())))
    return [replace(cell, batches=batches) for cell in cells] if batches else cells


def chosen_trainers(settings: TrainingSettings, cell: TrainingCell) -> list[Trainer]:
    """Return the trainers of a cell; see TrainingSettings.trainers for the default."""
    names = TRAINERS if cell.name == "gpt2_1k" else MAIN + (NAIVE if cell.name in WITH_NAIVE else ())
    chosen = [TRAINERS[name] for name in settings.trainers or names]
    if settings.function:
        chosen += [Trainer("ours", f"custom:{settings.function}", compiled) for compiled in (True, False)]
    return [trainer for trainer in chosen if not obstacle(trainer, settings.nanogpt)]


def obstacle(trainer: Trainer, nanogpt_file: Path | None) -> str | None:
    """Return what the trainer needs and this machine or the settings lack, with the remedy. None if it can run."""
    if trainer.name == "nanogpt" and not nanogpt_file:
        return "needs nanoGPT's model.py; add nanogpt=path/to/model.py"
    if str(trainer) in TORCHAO and not is_installed("torchao"):
        return "needs the package torchao; install it with pip install torchao"
    if trainer.precision != "bf16" and not has_fp8(torch.device("cuda")):
        return "needs an NVIDIA GPU from Ada or Hopper on; leave it out"
    return None


def measure(
    cell: TrainingCell, settings: TrainingSettings, builders: dict[str, Callable[..., Job]], gpu: Gpu
) -> Iterator[list[dict]]:
    """Yield the cell's rows so far after each trainer's search, and all rows at the end."""
    rows, finalists = [], []
    for trainer in chosen_trainers(settings, cell):
        new, best = search(cell, trainer, partial(builders[trainer.name], cell, trainer, gpu.device), gpu)
        rows += new
        finalists += [best] if best else []
        yield rows
    parts = floor_parts(cell, finalists, gpu)
    alternate(cell, [*finalists, *parts.values()], settings.rounds, gpu)
    for finalist in (*finalists, *parts.values()):
        if finalist.row["status"] != "ok":
            print(f"  {finalist.row['trainer']}, timed in turn: {text_of(finalist.row)}", flush=True)
        elif settings.breakdown and finalist.steps and finalist in finalists:
            add_breakdown(finalist, gpu)
    finalists.clear()
    torch._dynamo.reset()
    gpu.release()
    yield rows + ([floor_row(cell, parts)] if parts else [])


def add_breakdown(finalist: Finalist, gpu: Gpu) -> None:
    """Add the milliseconds of each class of kernels to the row, or print why the profiler does not give them."""
    failure = {}
    with recorded([failure], gpu), finalist.job.alone():  # The profiler may lack permission.
        finalist.row["breakdown_ms"] = breakdown(partial(finalist.job.step, finalist.row["batch_size"]))
    if failure:
        print(f"  no breakdown of {finalist.row['trainer']}: {failure.get('message', 'out of memory')}")


def floor_parts(cell: TrainingCell, finalists: list[Finalist], gpu: Gpu) -> dict[str, Finalist]:
    """Return the parts of the floor at our best micro-batch, if there is one."""
    batch = next((best.row["batch_size"] for best in finalists if best.row["trainer"] == "ours"), None)
    if batch is None or cell.context_length > LONGEST_FLOOR:
        return {}
    fused = {name: attend for name, attend in available().items() if name not in ("naive", "flex")}
    return floor_finalists(cell, batch, fused, gpu)


def name_of(row: dict) -> str:
    """Return the trainer's name of a row, such as ours:flash2."""
    how = row["trainer"], row["attention"], row["compiled"], row.get("precision", "bf16")
    return "floor" if row["trainer"] == "floor" else str(Trainer(*how))


def show(rows: list[dict]) -> None:
    """Print the best rows, and the milliseconds of each class of kernels if they were measured."""
    best = [row | {"name": name_of(row)} for row in rows if row["best"] or row["trainer"] == "floor"]
    columns = {"model": "{model}", "context": "{context_length:,}", "trainer": "{name}", "batch": "{batch_size:d}"}
    speeds = {"tokens/s": "{tokens_per_second:,.0f}", "TFLOP/s": "{tflops:.0f}", "MFU": "{mfu:.1%}"}
    others = {"GiB": "{peak_gib:.1f}", "first step": "{first_step_s:.1f} s", "status": "{status}"}
    print_rows("training steps, each trainer at its best micro-batch", best, columns | speeds | others)
    if profiled := [row | row["breakdown_ms"] for row in best if row.get("breakdown_ms")]:
        classes = {name: f"{{{name}:.2f}}" for name in profiled[0]["breakdown_ms"]}
        print_rows("milliseconds a step", profiled, columns | classes)


if __name__ == "__main__":
    launch(run, TrainingSettings)
