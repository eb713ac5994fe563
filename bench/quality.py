"""Is speed paid for by quality? The fast step and a plain one from the same weights on the same tokens.

    python -m bench.quality tokens/wikipedia

The fast step is train.py's: flash2, the chunked loss, the fused kernels and optimizer, compiled. The plain one shares
no line of it: Hugging Face's GPT-2 with eager attention, cross-entropy in fp32 over whole logits, clipping by
clip_grad_norm_ and torch's AdamW without fusion, under bf16 autocast, not compiled.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from bench.attention import output_file, positive, results_folder, write
from bench.environment import environment
from bench.trainers import DTYPE, Cell, Trainer, ours
from data.config import DataConfig
from data.loader import TrainLoader
from data.tokens import open_tokens
from errors import UserError, refusing
from model.huggingface import save_pretrained
from trainer.optimizer import OptimizerConfig, learning_rate

TOLERANCE = 0.01  # nats between the mean losses of the last steps
LAST = 100  # of them
SETTINGS = OptimizerConfig()


def plain(model: nn.Module, context_length: int, device: str) -> nn.Module:
    """Hugging Face's GPT-2 with the weights of `model`."""
    from transformers import GPT2LMHeadModel  # slow to import

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model.config, model.state_dict(), Path(folder), eot=0)
        options = {"attn_implementation": "eager", "dtype": torch.float32}
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.partition("\n")[0])
    parser.add_argument("tokens", type=Path, help="folder of GPT-2 tokens, as data.prepare makes it")
    parser.add_argument("--model", default="gpt2", help="of conf/model (gpt2)")
    parser.add_argument("--context-length", type=positive, default=1024)
    parser.add_argument("--batch", type=positive, default=16, help="sequences a step (16)")
    parser.add_argument("--steps", type=positive, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu", help="folder under bench/results; by default made of the device's name")
    parser.add_argument("--out", type=output_file, help="file to write instead of bench/results/<gpu>/quality.json")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> float:
    """Trains both, writes the curves, and returns the distance at their ends in nats."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench.quality trains on a GPU and finds none; give --device cpu and a small --model")
    cell = Cell(arguments.model, arguments.context_length, (arguments.batch,))
    device, steps = arguments.device, arguments.steps
    tokens = open_tokens(DataConfig(name="tokens", dir=str(arguments.tokens), tokenizer="gpt2"))
    sizes = {"batch_size": arguments.batch, "context_length": arguments.context_length, "vocab_size": 50257}
    loaders = [TrainLoader(tokens.train, seed=1, device=torch.device(device), name="train.bin", **sizes) for _ in "ab"]
    torch.manual_seed(1)
    job = ours(cell, Trainer("ours", "flash2", device == "cuda"), device, loaders[0], max_steps=steps)
    peer = plain(job.model, arguments.context_length, device)
    runs = {
        "fast": fast_losses(partial(job.step, arguments.batch), steps),
        "plain": plain_losses(peer, iter(loaders[1]), steps),
    }
    out = arguments.out or results_folder(arguments.gpu) / "quality.json"
    rows, where = [], {"environment": environment(), "model": cell.name, "batch_size": arguments.batch}
    for name, losses in runs.items():
        curve = torch.stack(list(track(losses, description=name, total=steps))).tolist()
        rows.append({"trained_by": name, "end": statistics.mean(curve[-LAST:]), "loss_curve": curve})
        write(out, where | {"rows": rows})
    for loader in loaders:
        loader.close()
    fast, slow = (row["end"] for row in rows)
    distance = abs(fast - slow)
    print(f"mean loss of the last {LAST} of {steps} steps: fast {fast:.4f}, plain {slow:.4f}")
    print(f"apart by {distance:.4f} nats (at most {TOLERANCE} wanted); written to {out}")
    return distance


def main() -> None:
    with refusing():
        distance = run(parse())
    if distance > TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    main()
