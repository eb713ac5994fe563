"""Train a classifier on a task of Long Range Arena and measure its accuracy on test and training examples.

Batch sizes, steps and learning rates are from Xiong et al., as are AdamW without weight decay, a linear warm-up and a
linear decay. docs/lra.md lists the differences from their code. Each epoch has a new order of the examples. Matrix
products are in bf16 on a GPU, where forward and backward are one CUDA graph: the models are so small that the GPU would
otherwise wait for the host.

Examples:
    python -m bench.lra.training task=listops attention_name=flash2
    python -m bench.lra.training task=text attention_name=linformer source=imdb/plain_text
"""

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import MISSING
from rich.progress import track
from torch import Tensor

from bench.common.command_line import check_choice, check_positive, launch
from bench.lra.attentions import ATTENTIONS, UNPADDED, build_attention
from bench.lra.config import EncoderConfig
from bench.lra.datasets import Examples, first_of, load
from bench.lra.encoder import Classifier
from bench.lra.tasks import TASKS, Task
from trainer.precision import Compute, PrecisionConfig, choose_compute

CAPTURED = 2
"""Number of the step that is captured. The steps before it run without a graph, so that all kernels are compiled."""


class Score(NamedTuple):
    """How a model does on some examples."""

    accuracy: float
    """Share of the examples whose largest logit is the label's."""
    loss: float
    """Mean cross-entropy in nats."""


class Scores(NamedTuple):
    """How a model does after training. A model that scores much better on `train` than on `test` overfits."""

    test: Score
    train: Score
    """On the first training examples. Both scores have the same number of examples."""


@dataclass
class TrainingSettings:
    """What `python -m bench.lra.training` reads."""

    task: str = MISSING
    """listops, text, retrieval, image, pathfinder, path_x or path_256."""
    attention_name: str = "flash2"
    """An attention of bench.lra.attentions."""
    steps: int | None = None
    """Optimizer steps. null takes the task's. The warm-up shrinks with them."""
    seed: int = 1
    """Seed of the weights and of the order of the examples. The examples themselves do not depend on it."""
    source: str | None = None
    """Folder with the files of Text, Image or Retrieval. null takes the Hugging Face hub and its cache."""
    compile: bool = True
    """Compile the model for the training steps."""
    device: str = "auto"
    """auto, cuda or cpu."""

    def __post_init__(self):
        check_choice("task", self.task, TASKS)
        check_choice("attention_name", self.attention_name, ATTENTIONS)
        check_positive(self, "steps", most=10_000_000)
        check_positive(self, "seed", most=2**32 - 1)
        check_choice("device", self.device, ("auto", "cuda", "cpu"))


def run(settings: TrainingSettings) -> None:
    """Train, and print the scores."""
    task, compute = TASKS[settings.task], choose_compute(settings.device, PrecisionConfig("auto"))
    build_attention(settings.attention_name, shape_of(task))  # refuse an unsuitable length before the data are read
    train_set, test_set = (load(task, split, source=settings.source) for split in ("train", "test"))
    options = {"steps": settings.steps, "seed": settings.seed, "compiled": settings.compile}
    scores = train_and_evaluate(task, settings.attention_name, train_set, test_set, compute, **options)
    print(f"{task.name}, {settings.attention_name}:")
    for examples, score in (("test", scores.test), ("training", scores.train)):
        print(f"  {examples} examples: accuracy {100 * score.accuracy:.2f} %, loss {score.loss:.4f}")


def shape_of(task: Task) -> EncoderConfig:
    """Return the classifier's shape for a task."""
    return EncoderConfig(task.vocab_size, task.classes, task.padded_length, pairs=task.pairs)


def train_and_evaluate(
    task: Task,
    attention: str,
    train_set: Examples,
    test_set: Examples,
    compute: Compute,
    *,
    steps: int | None = None,
    seed: int = 1,
    compiled: bool = False,
) -> Scores:
    """Train a new classifier and return its scores on test examples and on training examples.

    Args:
        task: gives the shape, the batch size, the learning rate, and the steps if `steps` is None.
        attention: a name of bench.lra.attentions.
        train_set, test_set: from bench.lra.datasets.load. The device holds both completely.
        compute: the device and the dtype of matrix products.
        steps: optimizer steps.
        seed: decides the weights and the order of the examples.
        compiled: whether torch.compile compiles the training steps.

    Raises:
        UserError: the attention does not support the task's length.
        ArithmeticError: the loss is not finite.
    """
    torch.manual_seed(seed)
    model = Classifier(shape_of(task), attention).to(compute.device)
    batches = _Batches(task, train_set, compute.device).shuffled(seed)
    as_graph = compute.device.type == "cuda" and attention != UNPADDED  # its number of tokens changes
    _train(model, batches, task, steps or task.steps, compute, compiled, as_graph)
    seen = first_of(train_set, len(test_set.labels))
    return Scores(*(_evaluate(model, _Batches(task, part, compute.device), compute) for part in (test_set, seen)))


class _Batches:
    """Examples on a device, in batches of tokens, lengths (None if no sequence has padding) and labels."""

    def __init__(self, task: Task, examples: Examples, device: torch.device):
        tokens = examples.tokens
        tokens = tokens.view(np.int16) if tokens.dtype == np.uint16 else tokens  # torch does not index uint16 on a GPU
        self.tokens, self.labels = (torch.from_numpy(x).to(device) for x in (tokens, examples.labels))
        is_full = (examples.lengths == tokens.shape[1]).all()
        self.lengths = None if is_full else torch.from_numpy(examples.lengths).to(device)
        self.size, self.pairs = min(task.batch_size, len(self.labels)), task.pairs

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the examples with these numbers."""
        sequences = torch.stack([2 * rows, 2 * rows + 1], dim=1).flatten() if self.pairs else rows
        lengths = None if self.lengths is None else self.lengths[sequences]
        return self.tokens[sequences].long(), lengths, self.labels[rows]

    def shuffled(self, seed: int) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Yield whole batches without end, in a new order in each epoch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.labels), generator=generator).to(self.labels.device)
            for rows in order[: len(order) // self.size * self.size].split(self.size):
                yield self[rows]

    def in_order(self) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Yield all examples once. The last batch may be smaller."""
        for rows in torch.arange(len(self.labels), device=self.labels.device).split(self.size):
            yield self[rows]


def rate_share(step: int, task: Task, steps: int) -> float:
    """Return the share of the learning rate after `step` steps. The warm-up has the task's share of the steps."""
    warmup = steps * task.warmup_steps / task.steps
    return min((step + 1) / max(1, warmup), (steps - step) / (steps - warmup))


def _train(
    model: Classifier, batches: Iterator, task: Task, steps: int, compute: Compute, compiled: bool, as_graph: bool
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, eps=1e-6, weight_decay=0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_share, task=task, steps=steps))
    model.train()
    forward = torch.compile(model) if compiled else model

    def gradients(tokens: Tensor, lengths: Tensor | None, labels: Tensor) -> None:
        optimizer.zero_grad()
        with compute.autocast():
            logits = forward(tokens, lengths)
        F.cross_entropy(logits, labels).backward()

    for step in track(range(steps), description=f"{task.name}, {steps:,} steps"):
        batch = next(batches)
        if as_graph and step == CAPTURED:
            gradients = _captured(gradients, batch)
        gradients(*batch)
        optimizer.step()
        schedule.step()


def graph_of(call: Callable[[], object], pool: tuple[int, int] | None = None) -> Callable[[], None]:
    """Capture a call in a CUDA graph with memory of `pool`, and return the replay of the graph.

    The replay keeps the call alive, because the graph reads and writes the call's tensors.
    """
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # reference cycles left by the compiler may hold memory that the graph needs
    with torch.cuda.graph(graph, pool):
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, _call: Callable[[], object]) -> None:
    graph.replay()


def _captured(gradients: Callable, batch: tuple[Tensor, Tensor | None, Tensor]) -> Callable:
    """Return `gradients` as a CUDA graph for batches of this shape. Each call overwrites the gradients of the last."""
    inputs = [None if x is None else x.clone() for x in batch]
    replay = graph_of(partial(gradients, *inputs))

    def replay_on(*batch: Tensor | None) -> None:
        for kept, new in zip(inputs, batch, strict=True):
            if kept is not None:
                kept.copy_(new)
        replay()

    return replay_on


@torch.no_grad()
def _evaluate(model: Classifier, batches: _Batches, compute: Compute) -> Score:
    """Return the score on all batches, without torch.compile, which would compile again for the last batch."""
    model.eval()
    right = loss = torch.zeros((), device=compute.device)
    for tokens, lengths, labels in batches.in_order():
        with compute.autocast():
            logits = model(tokens, lengths)
        right = right + (logits.argmax(dim=1) == labels).sum()
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
    count = len(batches.labels)
    score = Score(right.item() / count, loss.item() / count)
    if not math.isfinite(score.loss):
        raise ArithmeticError(f"the loss after training is {score.loss}")
    return score


if __name__ == "__main__":
    launch(run, TrainingSettings)
