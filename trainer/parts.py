"""What a run is made of, each part built from the configuration."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from data.loader import TrainLoader, check_length
from data.tokens import SPLITS, TokenSet
from errors import UserError
from model.attention import AttentionConfig, build_attention, check_attention, kept_share
from model.gpt2 import GPT2, ModelConfig
from model.huggingface import find_pretrained, load_pretrained, read_config
from trainer import checkpoint
from trainer.background import BackgroundCheckpoints
from trainer.checkpoint import CheckpointConfig, Checkpoints, State
from trainer.config import TrainConfig
from trainer.distributed.world import World, is_of_submitit, restarted
from trainer.flops import model_flops_per_token, peak_flops
from trainer.meters import ThroughputMeter
from trainer.precision import Compute
from trainer.state import SHAPE, check_resumable

if TYPE_CHECKING:
    from conf.schema import Config  # which names the settings of this package


def reset_process(settings: TrainConfig, compute: Compute) -> None:
    """Fixes every random draw; in deterministic mode every kernel's order of summation too.

    The jobs of a sweep are one process: what an earlier one compiled, chose or holds of the GPU's memory is given up,
    and its peak forgotten.
    """
    torch.manual_seed(settings.seed)
    torch.use_deterministic_algorithms(settings.deterministic)
    if settings.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts, which is later
        torch.backends.cudnn.benchmark = False
    if is_compiled(settings, compute):
        torch._dynamo.reset()  # or it would take the next job's context length for one of many, and compile for all
    if compute.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(compute.device)


def load_resumed(config: "Config", folder: Path, is_given: bool, world: World) -> State | None:
    """The checkpoint to continue, if any: the same for all processes, tensors that are to be split left on the disk.

    `folder` is where this run's own go; `is_given` says that the user has named it, so that it is the same again.
    """
    source = config.checkpoint.resume
    if source != "auto" and restarted() and world.is_first:
        print(
            "torchrun has started the processes again, and this run begins as the first time; with "
            "hydra.run.dir=FOLDER checkpoint.resume=auto it would go on from its newest checkpoint"
        )
    if source == "auto":
        if not is_given and not is_of_submitit():  # whose jobs, queued again, have the same folder
            raise UserError(
                "checkpoint.resume=auto needs a folder that is the same at every start; give hydra.run.dir=FOLDER, or "
                "with -m hydra.sweep.dir=FOLDER, for all outputs, or checkpoint.dir=FOLDER for checkpoints alone"
            )
        source = world.from_first(folder if checkpoint.find(folder) else None)
    if source is None:
        return None
    tell = print if world.is_first else lambda text: None
    state = checkpoint.load(source, key="checkpoint.resume", tell=tell, whole=not world.is_sharded)
    if state["step"] > config.train.max_steps:
        raise UserError(
            f"checkpoint.resume={state['path']} has {state['step']} steps behind it, more than train.max_steps="
            f"{config.train.max_steps}; raise that, or resume from an earlier checkpoint"
        )
    return state


def open_checkpoints(
    folder: Path, settings: CheckpointConfig, model: GPT2, compute: Compute, timeout_s: int
) -> Checkpoints:
    """The run's checkpoints in `folder`: files, or folders of parts where the weights are split."""
    options = {"keep": settings.keep, "writes": compute.world.is_first}
    if compute.world.is_sharded:
        from trainer.sharded import ShardedCheckpoints  # DCP takes seconds to import

        return ShardedCheckpoints(folder, model=model, timeout_s=timeout_s, **options)
    asynchronous = settings.asynchronous
    if asynchronous or (asynchronous is None and compute.device.type == "cuda"):
        return BackgroundCheckpoints(folder, model=model, **options)
    return Checkpoints(folder, **options)


def build_model(config: "Config", compute: Compute, tokens: TokenSet, resumed: State | None) -> GPT2:
    """The model on its device, with fresh weights or pretrained ones; a resumed run loads its own later.

    Its shape takes the place of config.model, so that it is what is recorded of the run.
    """
    shape, pretrained = config.model, None
    if shape.pretrained is not None and resumed:  # which has its weights, wherever those are that it once started from
        with checkpoint.of_this_version(resumed):
            shape = replace(shape, **{key: resumed["model_config"][key] for key in SHAPE if key != "context_length"})
    elif shape.pretrained is not None:
        pretrained = find_pretrained(shape.pretrained)
        shape = read_config(pretrained, shape)
    config.model = shape
    if shape.vocab_size is None:
        shape.vocab_size = tokens.vocab_size
    if shape.vocab_size < tokens.vocab_size:
        raise UserError(
            f"model.vocab_size={shape.vocab_size} is below the {tokens.vocab_size} tokens of the {tokens.tokenizer} "
            "tokenizer; leave model.vocab_size out, or choose data of another tokenizer"
        )
    for split in SPLITS:  # validation would come to it hours later
        check_length(getattr(tokens, split), shape.context_length, str(tokens.dir / f"{split}.bin"))
    if resumed:
        check_resumable(resumed, shape, tokens.tokenizer)
    documents = config.data.document_mask
    kind = {"head_dim": shape.head_dim, "dtype": compute.dtype, "dropout_p": shape.dropout, "documents": documents}
    check_attention(config.attention, device=compute.device, context_length=shape.context_length, **kind)
    torch.manual_seed(config.train.seed)
    model = GPT2(shape, build_attention(config.attention), config.train.activation_checkpointing)
    if pretrained is not None:
        load_pretrained(model, pretrained)
    return model.to(compute.device)


def build_loader(config: "Config", compute: Compute, tokens: TokenSet, model: GPT2) -> TrainLoader:
    """This process's share of the training batches."""
    return TrainLoader(
        tokens.train,
        batch_size=config.train.share(compute.world.size)[0],
        context_length=model.config.context_length,
        seed=config.train.seed,
        device=compute.device,
        vocab_size=model.config.vocab_size,
        name=str(tokens.dir / "train.bin"),
        rank=compute.world.rank,
        ranks=compute.world.size,
    )


def is_compiled(settings: TrainConfig, compute: Compute) -> bool:
    """Whether the model is compiled: on a GPU, unless told otherwise."""
    return compute.device.type == "cuda" if settings.compile is None else settings.compile


def compile_model(model: GPT2, settings: TrainConfig, compute: Compute) -> nn.Module:
    """The model as the loop calls it, compiled if it is to be."""
    if not is_compiled(settings, compute):
        return model
    # ddp's gradients travel while others are computed because torch cuts the compiled model at their buckets, which it
    # cannot inside of an activation checkpoint.
    torch._dynamo.config.optimize_ddp = settings.activation_checkpointing != "full"
    # What autograd.Functions trace to is part of the graph by which torch keeps what it compiled, so that a second
    # start may take it from the disk; torch refrains where one of them could do what it does not see.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    if not compute.world.is_sharded:
        return torch.compile(model, fullgraph=True)
    for block in model.h:  # each by itself, as FSDP gathers its weights between them
        block.forward = torch.compile(block.forward, fullgraph=True)
    return model


def tokens_in_step(settings: TrainConfig, shape: ModelConfig) -> int:
    return settings.sequences * shape.context_length


def build_meter(model: GPT2, tokens_per_step: int, compute: Compute, attention: AttentionConfig) -> ThroughputMeter:
    """Counts FLOPs for this model with this attention, and MFU for this device."""
    shape, kept = model.config, kept_share(attention, model.config.context_length)
    sizes = model.n_params(), shape.n_layer, shape.n_embd, shape.context_length
    on_gpu = compute.device.type == "cuda"
    return ThroughputMeter(
        tokens_per_step=tokens_per_step,
        flops_per_token=model_flops_per_token(*sizes, kept=kept),
        flops_per_token_causal=model_flops_per_token(*sizes, causal=True, kept=kept),
        peak_flops=peak_flops(torch.cuda.get_device_name(compute.device), compute.dtype) if on_gpu else None,
        device=compute.device,
        n_devices=compute.world.size,
    )
