"""What a run says about itself at its start and at its end."""

import torch

from data.tokenizers import get_tokenizer
from data.tokens import TokenSet
from errors import UserError
from model.attention import AttentionConfig
from model.generate import generate
from model.gpt2 import GPT2
from trainer.config import TrainConfig
from trainer.memory import memory_remarks
from trainer.optimizer import OptimizerConfig, schedule_remarks
from trainer.precision import Compute
from trainer.signals import StopRequest
from trainer.state import TrainState


def describe(
    state: TrainState,
    tokens: TokenSet,
    attention: AttentionConfig,
    settings: TrainConfig,
    optimizer: OptimizerConfig,
    compute: Compute,
    document_mask: bool,
) -> str:
    """Return a few lines: the model, its attention, the device, the data, and the steps to take."""
    model, shape = state.model, state.model.config
    backend = f" ({attention.backend})" if attention.name == "sdpa" else ""
    start = f"continuing after step {state.step}" if state.step else "starting"
    plan = f"{start}, to step {settings.max_steps} of {settings.sequences * shape.context_length:,} tokens"
    if state.step == settings.max_steps:
        plan = f"this run ended with step {state.step}; to train on, raise train.max_steps={settings.max_steps}"
    lines = [
        f"GPT-2 of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters: {shape.n_layer} layers, "
        f"width {shape.n_embd}, {shape.n_head} heads, context {shape.context_length}; {attention.name}{backend} "
        f"attention; {compute}",
        f"{tokens.dir}: {len(tokens.train):,} training and {len(tokens.val):,} validation tokens ({tokens.tokenizer})",
        plan,
        *memory_remarks(model, settings, compute),
        *schedule_remarks(state.step, state.optimizer.param_groups[0]["lr"], optimizer, settings.max_steps),
    ]
    if state.resumed_from not in (0, compute.world.size):
        lines.append(
            f"the checkpoint is of {state.resumed_from} processes, this run has {compute.world.size}: the batches of a "
            "step stay the same, but sums are rounded in another way, and dropout draws other masks"
        )
    if attention.name == "flash2" and compute.device.type == "cpu":
        lines.insert(1, "flash2 launches its PyTorch definition")
    elif attention.name == "flash2":
        from kernels.common.launching import arch_of  # needs Triton, which a machine without a GPU may lack
        from kernels.flash2.dispatch import explain

        deterministic, where = attention.deterministic or settings.deterministic, arch_of(compute.device)
        kind = shape.head_dim, compute.dtype, True, shape.context_length, where, shape.dropout
        lines.insert(1, f"flash2 launches {explain(*kind, deterministic, document_mask)}")
    return "\n".join(lines)


def last_words(
    state: TrainState, tokens: TokenSet, settings: TrainConfig, compute: Compute, stop: StopRequest, command: str
) -> str:
    """Return a sample of a finished run, or the `command` that continues a run that a signal stopped."""
    if stop.signal is not None:
        return f"{stop.signal.name} after step {state.step}; continue with: {command}"
    return sample(state.model, tokens, settings, compute)


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
        return "a sample:\n" + tokenizer.decode(text)


def first_step_message(seconds: float, compiled: bool, graphs: bool) -> str:
    """Return how long the first step took, and what it included."""
    included = ", compilation included" if compiled else ""
    return f"first step in {seconds:.1f} s{included}{'; the next ones are CUDA graphs' if graphs else ''}"
