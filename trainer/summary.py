"""The texts that a run prints at its start and at its end."""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from data.tokenizers import get_tokenizer
from data.tokens import TokenSet
from errors import UserError, problem_of
from model.attention import AttentionConfig
from model.generate import generate
from model.gpt2 import GPT2, ModelConfig
from trainer.build import is_compiled
from trainer.config import TrainConfig
from trainer.evaluation import perplexity
from trainer.layout import block, command, count, duration, fitted, paragraph, shown, three_digits
from trainer.memory import memory_remarks
from trainer.optimizer import OptimizerConfig, schedule_remarks
from trainer.precision import Compute
from trainer.state import TrainState


def describe(
    state: TrainState,
    tokens: TokenSet,
    attention: AttentionConfig,
    settings: TrainConfig,
    optimizer: OptimizerConfig,
    compute: Compute,
    document_mask: bool,
    folder: Path,
) -> str:
    """Return the important settings of a run: a line each for model, data and run, then the kernels and remarks."""
    model, shape = state.model, state.model.config
    labelled = {
        "model": [
            f"{count(sum(p.numel() for p in model.parameters()))} parameters",
            f"{shape.n_layer} layers x {shape.n_embd}",
            f"{shape.n_head} heads" + (f" on {shape.kv_heads} key heads" if shape.groups > 1 else ""),
            f"context {shape.context_length:,}",
            f"{attention.title}{_implementation(attention, compute)} attention",
            compute.precision,
        ],
        "data": [
            shown(tokens.dir),
            f"{count(len(tokens.train))} {tokens.tokenizer} tokens",
            _batch(settings, shape.context_length, compute),
        ],
        "run": [
            {"adamw": "AdamW", "muon": "Muon and AdamW"}[optimizer.name],
            f"lr {optimizer.lr:g}",
            *([f"continuing after step {state.step}"] if state.step else []),
            f"{settings.max_steps:,} steps",
            compute.devices,
            shown(folder),
        ],
    }
    if attention.name in ("flash2", "local") and compute.device.type != "cpu":
        labelled["kernels"] = _kernels(attention, shape, settings, compute, document_mask)
    lines = [block(label, items) for label, items in labelled.items()]
    lines += [paragraph("note", text) for text in _remarks(state, settings, optimizer, compute)]
    return "\n".join(lines)


def _implementation(attention: AttentionConfig, compute: Compute) -> str:
    return " (PyTorch)" if attention.name == "flash2" and compute.device.type == "cpu" else ""


def _batch(settings: TrainConfig, context_length: int, compute: Compute) -> str:
    """Return the tokens of an optimizer step as a product without factors of 1."""
    sequences, micro_steps = settings.share(compute.world.size)
    factors = [f"{sequences} sequences", f"{context_length:,} tokens"]
    several = {"micro-steps": micro_steps, "processes": compute.world.size}
    factors += [f"{number} {name}" for name, number in several.items() if number > 1]
    return f"batch {' x '.join(factors)} = {settings.sequences * context_length:,} tokens"


def _kernels(
    attention: AttentionConfig, shape: ModelConfig, settings: TrainConfig, compute: Compute, document_mask: bool
) -> list[str]:
    """Return what flash2 launches on a GPU, perhaps in a window."""
    from kernels.common.launching import arch_of  # needs Triton, which a machine without a GPU may lack
    from kernels.flash2.dispatch import explain

    deterministic, where = attention.deterministic or settings.deterministic, arch_of(compute.device)
    kind = shape.head_dim, compute.dtype, True, shape.context_length, where, shape.dropout
    window = attention.window if attention.name == "local" else 0
    grouped = shape.kv_heads < shape.n_head
    return explain(*kind, deterministic, document_mask, window, grouped).split(", ")


def _remarks(state: TrainState, settings: TrainConfig, optimizer: OptimizerConfig, compute: Compute) -> Iterator[str]:
    last = settings.max_steps
    if state.step == last:
        yield f"this run ended with step {last}; to train on, raise train.max_steps={last}"
    yield from memory_remarks(state.model, settings, compute)
    yield from schedule_remarks(state.step, state.optimizer.param_groups[0]["lr"], optimizer, last)
    if state.resumed_from not in (0, compute.world.size):
        yield (
            f"the checkpoint is of {state.resumed_from} processes, this run has {compute.world.size}: the batches of a "
            "step stay the same, but sums are rounded in another way, and dropout draws other masks"
        )


def last_words(
    state: TrainState,
    loss: float | None,
    stopped_by: signal.Signals | None,
    seconds: float,
    folder: Path,
    checkpoint: Path,
    commands: Sequence[Sequence[str]],
) -> str:
    """Return what a run came to: steps, tokens and time, losses, folders, and the commands to type next.

    `seconds` is the time of this process, `loss` the training loss (nats) of its last step.
    """
    came = "finished" if stopped_by is None else "stopped"
    reason = [] if stopped_by is None else [f"{stopped_by.name} after step {state.step}"]
    losses = [f"training {loss:.4f} at step {state.step:,}"] if loss is not None else []
    if state.best_step:
        best = f"{state.best_loss:.4f} (perplexity {three_digits(perplexity(state.best_loss))})"
        losses.insert(0, f"best validation {best} at step {state.best_step:,}")
    lines = [block(came, [*reason, f"{state.step:,} steps", f"{state.tokens:,} tokens", f"time {duration(seconds)}"])]
    lines += [block("loss", losses)] if losses else []
    lines += [block("output", [shown(folder)]), block("checkpoint", [shown(checkpoint)])]
    labels = ["next" if stopped_by is None else "continue", *[""] * len(commands)]
    return "\n".join([*lines, *map(command, labels, commands)])


def sample(model: GPT2, tokens: TokenSet, settings: TrainConfig, compute: Compute) -> str:
    """Return a text that the model generates from the end-of-text token, train.sample_tokens long."""
    if not settings.sample_tokens:
        return "no sample (train.sample_tokens=0)"
    try:
        tokenizer = compute.world.agreed(lambda: get_tokenizer(tokens.tokenizer))
    except UserError as error:
        return f"no sample: {error}"
    model.eval()
    # Compiled blocks, as with fsdp, would be compiled again for each layer and each length.
    with compute.autocast(), torch.compiler.set_stance("force_eager"):
        text = generate(
            model,
            [tokenizer.eot],
            max_tokens=settings.sample_tokens,
            temperature=0.8,
            top_k=200,
            generator=torch.Generator().manual_seed(settings.seed),
            stop=tokenizer.eot,
            vocab_size=tokenizer.vocab_size,
        )
        try:
            return "a sample:\n" + fitted(tokenizer.decode(text))
        except UserError as error:  # the run is finished, and the remedy is for sample.py
            return f"no sample: {problem_of(error)}"


def first_step_message(seconds: float, settings: TrainConfig, compute: Compute, as_graphs: bool) -> str:
    """Return the message after the first step: its time, and whether compilation is included and CUDA graphs follow."""
    included = ", compilation included" if is_compiled(settings, compute) else ""
    return f"first step in {seconds:.1f} s{included}{'; the next ones are CUDA graphs' if as_graphs else ''}"
