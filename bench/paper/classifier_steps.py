"""Training steps of the classifiers of bench.lra on random tokens: forward, backward and AdamW in bf16.

On a GPU, a step is a CUDA graph, so that the host's speed does not matter. The graphs of a cell share their memory:
only one of them runs at a time. A step that cannot be captured is timed without a graph, and its row says so.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.attention.accuracy import check_on
from bench.attention.shapes import AttentionShape
from bench.common.timing import Gpu, recorded
from bench.lra import listops
from bench.lra.attentions import EXACT, UNPADDED, build_attention
from bench.lra.config import EncoderConfig
from bench.lra.encoder import Classifier, packing_of
from bench.lra.tasks import Task
from bench.lra.training import graph_of, shape_of
from bench.paper.turns import take_turns
from errors import UserError, first_line, is_out_of_gpu_memory, problem_of
from trainer.meters import GIB

CHECKED_BATCH = 2
Step = Callable[[], object]


def check_exact(name: str, config: EncoderConfig, batch: int, device: str) -> None:
    """Compare an attention that computes all pairs with the fp64 reference. Raise WrongResult if the error is large."""
    sizes = {"heads": config.n_head, "head_dim": config.head_dim, "causal": False}
    shape = AttentionShape("lra", batch, config.context_length, **sizes)
    attend = partial(call_packed if name == UNPADDED else call_plain, build_attention(name, config))
    check_on(shape, device, name, attend)


def call_plain(attend: Callable, q: Tensor, k: Tensor, v: Tensor, **_) -> Tensor:
    """Call an attention of bench.lra, which is never causal, with the registry's arguments."""
    return attend(q, k, v)


def call_packed(attend: Callable, q: Tensor, k: Tensor, v: Tensor, **_) -> Tensor:
    """Call an attention on sequences that are packed into one, as Classifier does: q, k, v (B, T, H, D)."""
    batch, length = q.shape[:2]
    bounds = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    return attend(*(x.flatten(0, 1)[None] for x in (q, k, v)), cu_seqlens=bounds)[0].unflatten(0, (batch, length))


def draw_batch(task: Task, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return random tokens without padding, (sequences, T) int64, and labels (batch_size,) int64."""
    generator = torch.Generator().manual_seed(0)
    sequences = batch_size * (2 if task.pairs else 1)
    tokens = torch.randint(1, task.vocab_size, (sequences, task.padded_length), generator=generator)
    return tokens, torch.randint(task.classes, (batch_size,), generator=generator)


def lengths_of(task: Task, sequences: int) -> Tensor:
    """Return the lengths (sequences,) int32 for flash2_unpadded.

    Sequences of ListOps have the lengths of new expressions. Sequences of other tasks have the full length.
    """
    if task.name != "listops":
        return torch.full((sequences,), task.padded_length, dtype=torch.int32)
    rng = np.random.default_rng(0)
    if task.context_length < listops.SHORTEST:  # the smoke size is shorter than all expressions
        return torch.from_numpy(rng.integers(1, task.context_length, sequences, np.int32, endpoint=True))
    _, lengths, _ = listops.generate(sequences, task.padded_length, rng)
    return torch.from_numpy(lengths)


def build_step(task: Task, batch_size: int, attention: str, backend: str | None, device: str) -> Step:
    """Return the step of a new classifier, compiled by a backend of torch.compile if there is one."""
    torch.manual_seed(0)
    model: nn.Module = Classifier(shape_of(task), attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), task.learning_rate, fused=True, capturable=device == "cuda")
    called = torch.compile(model, backend=backend) if backend else model
    tokens, labels = (x.to(device) for x in draw_batch(task, batch_size))
    padding = {}
    if attention == UNPADDED:
        lengths = lengths_of(task, len(tokens)).to(device)
        padding = {"lengths": lengths, "packing": packing_of(lengths, task.padded_length)}

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(called(tokens, **padding), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def step_row(attention: str, batch_size: int, compiled: bool = False) -> dict:
    """Return the row of a step, without results."""
    results = "ms", "peak_gib", "graph", "status", "message"
    return {"attention": attention, "compiled": compiled, "batch_size": batch_size, **dict.fromkeys(results)}


def warm_step(row: dict, task: Task, backend: str, gpu: Gpu) -> Step | None:
    """Check the attention of a row, run its step, and return the step. Fill in the peak memory of the second step.

    The memory includes the weights and the optimizer's moments. Return None if the attention does not support the
    length.
    """
    name, before = row["attention"], gpu.allocated()
    try:
        if name in (*EXACT, UNPADDED):
            check_exact(name, shape_of(task), min(CHECKED_BATCH, row["batch_size"]), gpu.device)
            gpu.release()
        step = build_step(task, row["batch_size"], name, backend if row["compiled"] else None, gpu.device)
    except UserError as error:
        row.update(status="unsupported", message=problem_of(error))
        return None
    step()
    row["peak_gib"] = (gpu.peak(step) - before) / GIB
    return step


def captured(step: Step, row: dict, pool: tuple[int, int]) -> Step:
    """Return a step as a CUDA graph in `pool`. If the capture fails, return the step itself and say so in the row.

    A graph can need more memory than its step, because the memory of a graph has its own fragments.
    """
    try:
        replay = graph_of(step, pool)
    except RuntimeError as error:
        cause = error.__context__ or error  # the error that ended the capture
        is_oom = any(map(is_out_of_gpu_memory, (error, cause)))
        row.update(graph=False, message="out of memory" if is_oom else first_line(cause))
        return step
    row["graph"] = True
    return replay


def time_steps(rows: list[dict], task: Task, backend: str, gpu: Gpu, rounds: int) -> None:
    """Time the training steps of a task in turn, and complete their rows."""
    warm = []
    for row in rows:
        with recorded([row], gpu):
            if step := warm_step(row, task, backend, gpu):
                warm.append((row, step))
        gpu.release()
    if gpu.device == "cuda":
        pool, graphs = torch.cuda.graph_pool_handle(), []
        for row, step in warm:
            with recorded([row], gpu):
                graphs.append((row, captured(step, row, pool)))
            if row["graph"] is False:
                gpu.release()  # the memory of the failed capture
        warm = graphs
    take_turns(warm, gpu, rounds)
