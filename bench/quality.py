"""Is speed paid for by quality? The fast step and a plain one from the same weights on the same tokens.

    python -m bench.quality tokens/wikipedia
    python -m bench.quality tokens/wikipedia --seeds 1,2,3 --control

Training amplifies differences of the last bit, so that two plain runs too end apart: --control trains the plain model
again by torch's own attention, which differs by rounding alone, and several seeds show what is no chance. The mean of
the seeds' differences, in which chance cancels, may be 0.01 nats; the control is there to be looked at.

The fast step is train.py's: flash2, the chunked loss, the fused kernels and optimizer, compiled. The plain one shares
no line of it: Hugging Face's GPT-2 with eager attention, cross-entropy in fp32 over whole logits, clipping by
clip_grad_norm_ and torch's AdamW without fusion, under bf16 autocast, not compiled.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from bench.common.command_line import output_file, positive, sizes
from bench.common.results import environment, results_folder, write
from bench.training.trainers import DTYPE, VOCABULARY, Cell, Trainer, ours
from data.config import DataConfig
from data.loader import TrainLoader
from data.tokens import open_tokens
from errors import UserError, refusing
from model.huggingface import save_pretrained
from trainer.loggers import finite
from trainer.optimizer import OptimizerConfig, learning_rate

TOLERANCE = 0.01  # nats between the mean losses of the last steps
LAST = 100  # of them
SETTINGS = OptimizerConfig()


def plain(model: nn.Module, attention: str, device: str) -> nn.Module:
    """Hugging Face's GPT-2 with the weights of `model`, and transformers' attention of that name."""
    from transformers import GPT2LMHeadModel  # slow to import

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model.config, model.state_dict(), Path(folder), eot=0)
        options = {"attn_implementation": attention, "dtype": torch.float32}
        return GPT2LMHeadModel.from_pretrained(folder, **options).to(device).train()


def plain_losses(model: nn.Module, batches: Iterator, steps: int) -> Iterator[Tensor]:
    """Trains the plain model; the loss of each step."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": SETTINGS.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = SETTINGS.beta1, SETTINGS.beta2
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=SETTINGS.eps, foreach=False, fused=False)
    for step in range(steps):
        inputs, targets = next(batches)
        with torch.autocast(inputs.device.type, DTYPE):
            logits = model(input_ids=inputs).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, SETTINGS, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


def fast_losses(step: Callable[[], tuple[Tensor, float]], steps: int) -> Iterator[Tensor]:
    """Trains by train.py's step; the loss of each."""
    for _ in range(steps):
        yield step()[0][0]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.partition("\n")[0])
    parser.add_argument("tokens", type=Path, help="folder of GPT-2 tokens, as data.prepare makes it")
    parser.add_argument("--model", default="gpt2", help="of conf/model (gpt2)")
    parser.add_argument("--context-length", type=positive, default=1024, help="tokens of a sequence (1024)")
    parser.add_argument("--batch", type=positive, default=16, help="sequences a step (16)")
    parser.add_argument("--steps", type=positive, default=1000, help="of each run (1000)")
    parser.add_argument("--seeds", type=sizes, default=(1,), help="of weights and order, separated by commas (1)")
    parser.add_argument("--control", action="store_true", help="a second plain run too, by another attention")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpu", help="folder under bench/results; by default made of the device's name")
    parser.add_argument("--out", type=output_file, help="file to write instead of bench/results/<gpu>/quality.json")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> float:
    """Trains all, writes the curves; returns by how many nats the fast runs end above the plain ones, on average."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench.quality trains on a GPU and finds none; give --device cpu and a small --model")
    cell = Cell(arguments.model, arguments.context_length, (arguments.batch,))
    tokens = open_tokens(DataConfig(name="tokens", dir=str(arguments.tokens), tokenizer="gpt2"))
    out = arguments.out or results_folder(arguments.gpu) / "quality.json"
    rows, where = [], {"environment": environment(), "model": cell.name, "batch_size": arguments.batch}
    for seed in arguments.seeds:
        for name, curve in curves(cell, tokens.train, seed, arguments):
            end = statistics.mean(curve[-LAST:])
            rows.append({"trained_by": name, "seed": seed, "end": end, "loss_curve": curve})
            write(out, where | {"rows": [written(row) for row in rows]})
    ends = {(row["seed"], row["trained_by"]): row["end"] for row in rows}
    names = list(dict.fromkeys(row["trained_by"] for row in rows))
    print(f"mean loss of the last {min(LAST, arguments.steps)} of {arguments.steps} steps")
    for seed in arguments.seeds:
        print(f"seed {seed}: " + ", ".join(f"{name} {ends[seed, name]:.4f}" for name in names))
    above = {
        name: statistics.mean(ends[seed, name] - ends[seed, "plain"] for seed in arguments.seeds) for name in names
    }
    print(", ".join(f"{name} {above[name]:+.4f}" for name in names if name != "plain") + " nats from plain")
    print(f"at most {TOLERANCE} wanted; written to {out}")
    return above["fast"]


def written(row: dict) -> dict:
    """The row as JSON can have it."""
    return row | {"end": finite(row["end"]), "loss_curve": [finite(loss) for loss in row["loss_curve"]]}


def curves(
    cell: Cell, tokens: np.ndarray, seed: int, arguments: argparse.Namespace
) -> Iterator[tuple[str, list[float]]]:
    """The runs of one seed: who trained, and the loss of each step."""
    device, steps = arguments.device, arguments.steps
    shape = {"batch_size": arguments.batch, "context_length": arguments.context_length, "vocab_size": VOCABULARY}

    def loader() -> TrainLoader:
        return TrainLoader(tokens, seed=seed, device=torch.device(device), name="train.bin", **shape)

    torch.manual_seed(seed)
    with closing(loader()) as batches:
        job = ours(cell, Trainer("ours", "flash2", device == "cuda"), device, batches, max_steps=steps)
        attentions = {"plain": "eager"} | ({"control": "sdpa"} if arguments.control else {})
        peers = {name: plain(job.model, attention, device) for name, attention in attentions.items()}
        yield "fast", trained("fast", seed, fast_losses(partial(job.step, arguments.batch), steps), steps)
    for name, peer in peers.items():
        with closing(loader()) as batches:
            yield name, trained(name, seed, plain_losses(peer, iter(batches), steps), steps)


def trained(name: str, seed: int, losses: Iterator[Tensor], steps: int) -> list[float]:
    """Takes all steps, and shows how far it is."""
    return torch.stack(list(track(losses, description=f"{name}, seed {seed}", total=steps))).tolist()


def main() -> None:
    with refusing():
        above = run(parse())
    if not abs(above) <= TOLERANCE:  # nor where it is no number
        sys.exit(1)


if __name__ == "__main__":
    main()
