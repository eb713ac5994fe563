"""The parts of a run, each built from the settings that it uses."""

import os
import random
import re
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn

from data.loader import TrainLoader, check_length
from data.tokens import SPLITS, TokenSet
from errors import UserError
from model.attention import AttentionConfig, build_attention, check_attention
from model.gpt2 import GPT2, ModelConfig
from model.huggingface import SIZES
from trainer.checkpoint.files import State
from trainer.checkpoint.load import check_resumable, of_this_version, sizes_of
from trainer.config import TrainConfig
from trainer.flops import model_flops_per_token, peak_flops
from trainer.folders import keep_previous, link_latest, write_text
from trainer.loading import read_shape
from trainer.loggers import Loggers, describe_changes, start_loggers
from trainer.meters import ThroughputMeter
from trainer.precision import Compute

NOTE = re.compile(r"# changed after step (\d+): ")  # in config.yaml


def fix_randomness(settings: TrainConfig) -> None:
    """Seed Python, NumPy and torch. In deterministic mode, also fix the order of every summation."""
    random.seed(settings.seed)
    np.random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    torch.use_deterministic_algorithms(settings.deterministic)
    if settings.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads this when it starts, which is later
        torch.backends.cudnn.benchmark = False


def run_shape(shape: ModelConfig, tokens: TokenSet, resumed: State | None, given: Collection[str]) -> ModelConfig:
    """Return the model's shape with everything that the data, pretrained weights or a checkpoint decide.

    `given` are the keys that the user set one by one. The other sizes are defaults or come from a preset, and give way
    to those of pretrained weights.
    """
    asked = shape
    if shape.pretrained is not None and resumed:  # the checkpoint has the weights; their first source may be gone
        with of_this_version(resumed):
            sizes = resumed["model_config"]
            kept = {"context_length": shape.context_length, "n_kv_head": shape.n_kv_head or sizes.get("n_kv_head")}
            shape = replace(shape, **sizes_of(sizes) | kept)
    elif shape.pretrained is not None:
        shape = read_shape(shape.pretrained, shape, tokens.tokenizer)
    _check_given(asked, shape, given)
    if shape.vocab_size is None:
        shape = replace(shape, vocab_size=tokens.vocab_size)
    if resumed:  # before the other checks, because the sizes can be the checkpoint's
        check_resumable(resumed, asdict(shape), tokens.tokenizer)
        shape = replace(shape, pretrained=resumed["config"]["model"].get("pretrained"))  # null changes nothing
    if shape.vocab_size < tokens.vocab_size:
        raise UserError(
            f"model.vocab_size={shape.vocab_size} is below the {tokens.vocab_size} tokens of the {tokens.tokenizer} "
            "tokenizer; leave model.vocab_size out, or choose data of another tokenizer"
        )
    for split in SPLITS:  # validation would find a short file hours later
        check_length(getattr(tokens, split), shape.context_length, str(tokens.dir / f"{split}.bin"))
    return shape


def _check_given(asked: ModelConfig, found: ModelConfig, given: Collection[str]) -> None:
    """Refuse sizes among the keys `given` that pretrained weights do not have. A null leaves the choice to them."""
    for key in SIZES:
        if key in given and getattr(asked, key) not in (None, size := getattr(found, key)):
            raise UserError(
                f"model.{key}={getattr(asked, key)} contradicts model.pretrained={found.pretrained}, which has {size}; "
                f"leave model.{key} out"
            )


def build_model(
    shape: ModelConfig, attention: AttentionConfig, settings: TrainConfig, compute: Compute, document_mask: bool
) -> GPT2:
    """Return the model on its device, with random weights."""
    asked = {"dropout_p": shape.dropout, "documents": document_mask, "sampling": settings.sample_tokens > 0}
    check_variant(attention, shape, compute, **asked)
    check_fp8(shape, compute)
    torch.manual_seed(settings.seed)
    model = GPT2(shape, build_attention(attention), settings.activation_checkpointing, compute.fp8)
    return model.to(compute.device)


def check_variant(attention: AttentionConfig, shape: ModelConfig, compute: Compute, **asked) -> None:
    """Refuse an attention that cannot run a model of this shape. `asked` are further arguments of check_attention."""
    sizes = {"head_dim": shape.head_dim, "groups": shape.groups, "context_length": shape.context_length}
    kind = {"device": compute.device, "dtype": compute.dtype, "dropout_p": 0.0}
    check_attention(attention, **sizes | kind | asked)


def check_fp8(shape: ModelConfig, compute: Compute) -> None:
    """Refuse sizes whose products the GPU does not compute in FP8."""
    sizes = {"context_length": shape.context_length, "n_embd": shape.n_embd, "n_kv_head": shape.kv_heads}
    widths = {**sizes, "n_kv_head": 2 * shape.kv_heads * shape.head_dim}
    if compute.fp8 and (wrong := next((key for key, width in widths.items() if width % 16), None)):
        raise UserError(
            f"precision=fp8 needs matrices whose sides are multiples of 16, unlike with model.{wrong}={sizes[wrong]}; "
            f"choose another model.{wrong}, or set precision=bf16"
        )


def build_loader(settings: TrainConfig, tokens: TokenSet, shape: ModelConfig, compute: Compute) -> TrainLoader:
    """Return this process's share of the training batches."""
    options = batch_options(settings, shape, compute)
    file = {"name": str(tokens.dir / "train.bin"), "sha256": tokens.sha256}
    return TrainLoader(tokens.train, seed=settings.seed, **file, **options)


def batch_options(settings: TrainConfig, shape: ModelConfig, compute: Compute) -> dict[str, Any]:
    """Return the options of a loader: the sizes of a batch, the device, and the share of this process."""
    world, sizes = compute.world, {"context_length": shape.context_length, "vocab_size": shape.vocab_size}
    share = {"batch_size": settings.share(world.size)[0], "rank": world.rank, "ranks": world.size}
    return sizes | share | {"device": compute.device, "agree": world.agreed}


def is_compiled(settings: TrainConfig, compute: Compute) -> bool:
    """Return whether the model is compiled: train.compile, or if that is null, whether there is a GPU."""
    return compute.device.type == "cuda" if settings.compile is None else settings.compile


def compile_model(model: GPT2, settings: TrainConfig, compute: Compute) -> nn.Module:
    """Return the model as the loop calls it, compiled if it is to be."""
    if not is_compiled(settings, compute):
        return model
    # For ddp, torch splits the compiled model at the gradient buckets. It cannot split an activation checkpoint.
    torch._dynamo.config.optimize_ddp = settings.activation_checkpointing != "full"
    # Let torch cache graphs with our autograd functions on disk, so that a second start is faster.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    if not compute.world.is_sharded:  # one graph, because torch also fuses the end of a block with the next block
        return torch.compile(model, fullgraph=model.attention.fullgraph)
    for block in model.h:  # one by one, because FSDP gathers weights between the blocks
        block.forward = torch.compile(block.forward, fullgraph=model.attention.fullgraph)
    return model


def build_meter(model: GPT2, settings: TrainConfig, loader: TrainLoader, compute: Compute) -> ThroughputMeter:
    """Return a meter with the FLOPs of this model, and the peak of this device."""
    shape, kept = model.config, model.attention.kept_share(model.config.context_length)
    sizes = model.n_params(), shape.n_layer, shape.n_embd, shape.context_length
    return ThroughputMeter(
        tokens_per_step=settings.sequences * shape.context_length,
        flops_per_token=model_flops_per_token(*sizes, kept=kept),
        flops_per_token_causal=model_flops_per_token(*sizes, causal=True, kept=kept),
        peak_flops=_peak_flops(compute),
        device=compute.device,
        waited_s=lambda: loader.waited_s,
        n_devices=compute.world.size,
    )


def _peak_flops(compute: Compute) -> float | None:
    """Return the peak of this device in FLOP/s, or None if it is unknown."""
    on_gpu = compute.device.type == "cuda"
    return peak_flops(torch.cuda.get_device_name(compute.device), compute.dtype) if on_gpu else None


def open_logs(
    folder: Path,
    compute: Compute,
    changes: dict[str, list],
    *,
    run_config: dict[str, Any],
    resumed_step: int | None,
    is_branch: bool,
    **options,
) -> Loggers:
    """Start the first process's loggers, save config.yaml, and link outputs/latest. The other processes log nothing.

    config.yaml has the newest settings, run_config. A comment above them names the settings that a run resumed at
    resumed_step changed, here `changes`. `is_branch` is true if the run continues another folder's run.
    `options` are further arguments of start_loggers.
    """

    def start() -> Loggers:
        own = {
            "run_config": run_config,
            "resumed_step": resumed_step,
            "is_branch": is_branch,
            "has_mfu": _peak_flops(compute) is not None,
        }
        loggers = start_loggers(folder, **own, **options)  # before config.yaml, because wandb can refuse the run
        path = folder / "config.yaml"
        if resumed_step is None or is_branch:  # the file is another run's
            keep_previous(path)
        earlier = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        notes = [line for line in earlier if (found := NOTE.match(line)) and int(found[1]) < resumed_step]
        notes += [f"# changed after step {resumed_step}: {describe_changes(changes)}"] if changes else []
        settings = OmegaConf.to_yaml(OmegaConf.create(run_config))
        write_text(path, "".join(f"{note}\n" for note in notes) + settings)
        link_latest(folder, loggers.message)
        return loggers

    return compute.world.agreed(lambda: start() if compute.world.is_first else Loggers([]))
