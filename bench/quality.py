"""Check that the fast step trains as well as a plain one, from the same weights on the same tokens.

The fast step is train.py's, compiled. The plain step shares no code with it: Hugging Face's GPT-2 with eager attention,
cross-entropy in fp32 over all logits, clip_grad_norm_ and torch's unfused AdamW, under bf16 autocast, not compiled.

Training amplifies rounding: control=true trains the plain model again with torch's fused attention, and ends at another
loss too. The program fails if the fast runs end more than 0.01 nats from the plain ones, on average over the seeds.

fp8=true instead compares the fast step in FP8 with the fast step in bf16, with the same limit of 0.01 nats. The control
is then the fast step in bf16 with torch's fused attention.

Examples:
    python -m bench.quality tokens=tokens/wikipedia seeds=[1,2,3] control=true
    python -m bench.quality tokens=tokens/wikipedia fp8=true control=true model_name=gpt2-medium
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import MISSING
from rich.progress import track
from torch import Tensor, nn

from bench.common.command_line import check_choice, check_output_file, check_positive, launch
from bench.common.results import ROOT, environment, results_folder, set_aside, write
from bench.training.trainers import DTYPE, VOCABULARY, OurJob, Trainer, TrainingCell, ours
from data.config import DataConfig
from data.loader import TrainLoader, check_length
from data.tokens import TokenSet, open_tokens
from errors import UserError, problem_of
from model.huggingface import save_pretrained
from trainer.build import check_fp8
from trainer.loggers import finite
from trainer.optimizer import OptimizerConfig, learning_rate
from trainer.precision import PrecisionConfig, choose_compute

TOLERANCE = 0.01  # nats between the mean losses of the last tenth of the steps
OPTIMIZER = OptimizerConfig()


@dataclass
class QualitySettings:
    """What `python -m bench.quality` reads."""

    tokens: str = MISSING
    """Folder of GPT-2 tokens, made by data.prepare."""
    model_name: str = "gpt2"
    """A model of conf/model."""
    context_length: int = 1024
    """Tokens of a sequence."""
    batch: int = 16
    """Sequences of a step."""
    steps: int = 1000
    """Steps of each run."""
    seeds: list[int] = field(default_factory=lambda: [1])
    """Seeds of the weights and of the order of the data."""
    fp8: bool = False
    """Compare FP8 with bf16, not the fast step with the plain one."""
    control: bool = False
    """Also train the plain model, or with fp8=true the bf16 model, with torch's fused attention."""
    device: str = "cuda"
    """cuda or cpu."""
    out: Path | None = None
    """File to write. null writes bench/results/<this GPU>/quality.json, or fp8-quality-<model_name>.json with
    fp8=true. The old file is renamed to *.json.old at the start."""

    def __post_init__(self):
        models = sorted(file.stem for file in (ROOT / "conf" / "model").glob("*.yaml"))
        check_choice("model_name", self.model_name, models)
        check_positive(self, "context_length", "batch", "steps", most=2**20)
        check_positive(self, "seeds", most=2**32 - 1)
        check_choice("device", self.device, ("cuda", "cpu"))
        check_output_file("out", self.out)


def check_device_and_sizes(cell: TrainingCell, device: str) -> None:
    """Refuse fp8=true on a device without FP8 or for unsuitable sizes, before the run in bf16 takes its time."""
    try:
        check_fp8(cell.shape(), choose_compute(device, PrecisionConfig("fp8")))
    except UserError as error:
        remedy = "use a GPU from Ada or Hopper on and a context_length that is a multiple of 16, or leave fp8 out"
        raise UserError(f"fp8=true does not run ({problem_of(error)}); {remedy}") from error


def open_gpt2_tokens(folder: str, context_length: int) -> TokenSet:
    """Open the folder in the setting `tokens` of a benchmark. Errors name that setting instead of data.dir."""
    try:
        tokens = open_tokens(DataConfig(name="tokens", dir=folder, tokenizer="gpt2"))
        check_length(tokens.train, context_length, "train.bin")
    except UserError as error:
        remedy = "give a folder of GPT-2 tokens from data.prepare"
        raise UserError(f"tokens={folder} cannot be used ({problem_of(error)}); {remedy}") from error
    return tokens


def run(settings: QualitySettings) -> None:
    """Train all, write the curves, and exit with status 1 if the fast runs end elsewhere than the plain ones."""
    if not abs(compare(settings)) <= TOLERANCE:  # also true of NaN
        sys.exit(1)


def compare(settings: QualitySettings) -> float:
    """Train all and write the curves. Return how far the fast runs end above the plain ones on average, in nats.

    With fp8=true, return how far FP8 ends above bf16.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda finds no GPU; use device=cpu with a small model, such as model_name=gpt2-nano")
    cell = TrainingCell(settings.model_name, settings.context_length, (settings.batch,))
    judged, base, curves, file = "fast", "plain", curves_of_steps, "quality.json"
    if settings.fp8:
        check_device_and_sizes(cell, settings.device)
        judged, base, curves, file = "fp8", "bf16", curves_of_precisions, f"fp8-quality-{settings.model_name}.json"
    tokens = open_gpt2_tokens(settings.tokens, settings.context_length)
    out = settings.out or results_folder() / file
    set_aside(out)
    about = {"environment": environment(), "model": cell.name, "batch_size": settings.batch}
    rows, ends, last = [], {}, max(1, settings.steps // 10)
    for seed in settings.seeds:
        for name, curve in curves(cell, tokens.train, seed, settings):
            ends.setdefault(name, []).append(end := statistics.mean(curve[-last:]))
            losses = [finite(loss) for loss in curve]
            rows.append({"trained_by": name, "seed": seed, "end": finite(end), "loss_curve": losses})
            write(out, about | {"rows": rows})
            print(f"seed {seed}: {name} {end:.4f}")
    base_end = statistics.mean(ends.pop(base))
    above = {name: statistics.mean(of_seeds) - base_end for name, of_seeds in ends.items()}
    print(", ".join(f"{name} {nats:+.4f}" for name, nats in above.items()) + f" nats from {base}")
    print(f"mean losses of the last {last} of {settings.steps} steps; at most {TOLERANCE} wanted; written to {out}")
    return above[judged]


def curves_of_steps(
    cell: TrainingCell, tokens: np.ndarray, seed: int, settings: QualitySettings
) -> Iterator[tuple[str, list[float]]]:
    """Yield the name (fast, plain, control) and the losses of each run of a seed."""
    device, steps = settings.device, settings.steps
    torch.manual_seed(seed)
    with loader(tokens, seed, settings) as batches:
        job = ours(cell, Trainer("ours", "flash2", device == "cuda"), device, batches, max_steps=steps)
        attentions = {"plain": "eager"} | ({"control": "sdpa"} if settings.control else {})
        peers = {name: plain(job.model, attention, device) for name, attention in attentions.items()}
        yield "fast", losses_of("fast", seed, fast_losses(job, settings), steps)
    for name, peer in peers.items():
        with loader(tokens, seed, settings) as batches:
            yield name, losses_of(name, seed, plain_losses(peer, batches, steps), steps)


def curves_of_precisions(
    cell: TrainingCell, tokens: np.ndarray, seed: int, settings: QualitySettings
) -> Iterator[tuple[str, list[float]]]:
    """Yield the name (bf16, fp8, control) and the losses of each run of a seed."""
    compiled = settings.device == "cuda"
    trainers = {"bf16": Trainer("ours", "flash2", compiled), "fp8": Trainer("ours", "flash2", compiled, "fp8")}
    if settings.control:
        trainers["control"] = Trainer("ours", "sdpa", compiled)
    for name, trainer in trainers.items():
        yield name, losses_of_precision(name, cell, trainer, tokens, seed, settings)


def losses_of_precision(
    name: str, cell: TrainingCell, trainer: Trainer, tokens: np.ndarray, seed: int, settings: QualitySettings
) -> list[float]:
    """Train one model and return its losses. Its memory is free afterwards, because a GPU may not hold two models."""
    torch.manual_seed(seed)
    with loader(tokens, seed, settings) as batches:
        job = ours(cell, trainer, settings.device, batches, max_steps=settings.steps)
        return losses_of(name, seed, fast_losses(job, settings), settings.steps)


def loader(tokens: np.ndarray, seed: int, settings: QualitySettings) -> TrainLoader:
    """Return the batches of a run. They depend on the seed alone."""
    shape = {"batch_size": settings.batch, "context_length": settings.context_length, "vocab_size": VOCABULARY}
    return TrainLoader(tokens, seed=seed, device=torch.device(settings.device), name="train.bin", **shape)


def losses_of(name: str, seed: int, losses: Iterator[Tensor], steps: int) -> list[float]:
    """Take all steps of a run, with a progress line, and return their losses."""
    return torch.stack(list(track(losses, description=f"{name}, seed {seed}", total=steps))).tolist()


def plain(model: nn.Module, attention: str, device: str) -> nn.Module:
    """Return Hugging Face's GPT-2 with the weights of `model`, and transformers' attention of that name."""
    from transformers import GPT2LMHeadModel  # slow to import

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model.config, model.state_dict(), Path(folder), eot=0)
        options = {"attn_implementation": attention, "dtype": torch.float32}
        return GPT2LMHeadModel.from_pretrained(folder, **options).to(device).train()


def plain_losses(model: nn.Module, batches: TrainLoader, steps: int) -> Iterator[Tensor]:
    """Train the plain model and yield the loss of each step."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = OPTIMIZER.beta1, OPTIMIZER.beta2
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=OPTIMIZER.eps, foreach=False, fused=False)
    for step in range(steps):
        inputs, targets = batches.next_batch()
        with torch.autocast(inputs.device.type, DTYPE):
            logits = model(input_ids=inputs).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, OPTIMIZER, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


def fast_losses(job: OurJob, settings: QualitySettings) -> Iterator[Tensor]:
    """Train with train.py's step and yield the loss of each step."""
    for _ in range(settings.steps):
        yield job.step(settings.batch)[0]


if __name__ == "__main__":
    launch(run, QualitySettings)
