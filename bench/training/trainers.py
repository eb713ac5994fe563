"""The trainers of bench.training: ours, nanoGPT's and Hugging Face's GPT-2, each as steps on random tokens.

All use bf16 autocast, fp32 parameters, fused AdamW and gradient clipping at 1. Ours runs train.py's own step, also in
FP8. The peers use torch's AdamW. nanoGPT's model comes from a file that the user names, in the loop of its train.py.
torchao can put its linear layers into FP8.
"""

import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import train
from bench.attention.accuracy import check_on
from bench.attention.shapes import AttentionShape
from bench.common.command_line import check_choice
from bench.common.results import ROOT
from conf.schema import Config, TrainConfig
from data.config import DataConfig
from data.loader import TrainLoader
from errors import UserError, described
from kernels.flash2 import flash2
from model.attention import VARIANTS, Attention, CustomConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from trainer.build import compile_model
from trainer.distributed.parallel import data_parallel, shard
from trainer.distributed.world import ALONE, World
from trainer.graphs import capture
from trainer.optimizer import OptimizerConfig, build_optimizer
from trainer.precision import Compute
from trainer.scales import ScaleUpdates
from trainer.state import TrainState

VOCABULARY = 50257
PADDED = 50304  # The peers do not pad their vocabulary, and the unpadded matrix products would be slow.
DTYPE = torch.bfloat16
CHECKED_LENGTH = 16384  # the time of the reference grows with the square of the length
NANOGPT_REMEDY = "give the model.py of karpathy/nanoGPT"


@dataclass(frozen=True)
class TrainingCell:
    """A model at a context length, and the micro-batches to try."""

    model: str
    context_length: int
    batches: tuple[int, ...]
    activation_checkpointing: str = "none"
    """Only ours uses it. The peers have no activation checkpointing."""
    n_kv_head: int | None = None
    """Heads of keys and values; null is n_head. Only ours can have fewer."""

    @property
    def name(self) -> str:
        return f"{self.model}_{self.context_length // 1024}k"

    def shape(self) -> ModelConfig:
        """Return the model of conf/model at this context length. An unknown model raises a UserError."""
        files = {file.stem: file for file in (ROOT / "conf" / "model").glob("*.yaml")}
        check_choice("model", self.model, sorted(files))
        shape = ModelConfig(**OmegaConf.load(files[self.model]))
        return replace(shape, context_length=self.context_length, vocab_size=VOCABULARY, n_kv_head=self.n_kv_head)

    def sizes(self) -> dict[str, int]:
        """Return the sizes that have the same name in all trainers."""
        return {key: getattr(self.shape(), key) for key in ("n_layer", "n_head", "n_embd")}


@dataclass(frozen=True)
class Trainer:
    """A trainer (ours, nanogpt or huggingface), its attention, and whether its model is compiled."""

    name: str
    attention: str
    """A variant's name. For ours also custom:module:function, a user's own function."""
    compiled: bool = True
    precision: str = "bf16"
    """bf16; for ours also fp8; for nanogpt also tensorwise and rowwise, the scales of torchao's float8."""

    def __str__(self) -> str:
        eager, precision = "" if self.compiled else ":eager", "" if self.precision == "bf16" else f":{self.precision}"
        return f"{self.name}:{self.attention}{eager}{precision}"


class Job:
    """A model with its optimizer. step(batch) takes one optimizer step of `batch` sequences.

    Only one job at a time holds its memory; the others are parked.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        self.parked: list[tuple[torch.UntypedStorage, int]] = []

    def park(self) -> None:
        """Free the memory of weights and moments."""
        self.optimizer.zero_grad(set_to_none=True)
        moments = [x for state in self.optimizer.state.values() for x in state.values() if x.ndim]
        for tensor in (*self.model.parameters(), *self.model.buffers(), *moments):
            storage = tensor.untyped_storage()
            if storage.size():
                self.parked.append((storage, storage.size()))
                storage.resize_(0)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the job's memory inside the block only."""
        try:
            self.resume()
            yield
        finally:
            self.park()

    @torch.no_grad()
    def resume(self) -> None:
        """Allocate the memory again, with newly drawn weights and zero moments."""
        while self.parked:
            storage, size = self.parked.pop()
            storage.resize_(size)
        for name, parameter in self.model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)  # With zeros a GPU draws less power and runs about 8 % faster.
            else:
                parameter.fill_(float(name.endswith("weight")))  # LayerNorm weights are 1.
        for buffer in self.model.buffers():
            if buffer.ndim > 1:
                buffer.copy_(torch.ones_like(buffer).tril())  # a causal mask of the peers
            else:
                buffer.zero_()  # statistics of FP8, or a scale, which OurJob sets afterwards
        for state in self.optimizer.state.values():
            for x in state.values():
                x.zero_()


@cache
def tokens(batch: int, context_length: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets, (batch, context_length) each, with the strides of a data loader's batches."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (batch, context_length + 1), generator=generator)
    inputs, targets = torch.stack((ids[:, :-1], ids[:, 1:])).to(device)
    return inputs, targets


class RandomTokens:
    """Random batches in place of a run's data loader."""

    def __init__(self, context_length: int, device: str):
        self.batch, self.context_length, self.device = 1, context_length, device

    def next_batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return [tokens(self.batch, self.context_length, self.device)] * count

    def state_dict(self) -> dict:
        return {}


class OurJob(Job):
    """Takes train.py's own steps."""

    def __init__(self, model: nn.Module, state: TrainState, config: Config, compute: Compute, synthetic: RandomTokens):
        super().__init__(state.model, state.optimizer)
        self.wrapped, self.state, self.config, self.compute, self.synthetic = model, state, config, compute, synthetic
        self.queued = partial(train.micro_step, model, state, config, compute)
        self.batch, self.steps, self.micro_step = None, 0, self.queued  # steps: since the micro-batch changed

    def step(self, batch: int) -> Tensor:
        self.synthetic.batch = batch
        settings = self.config.train
        settings.batch_size = batch * self.compute.world.size  # one micro-step in each process
        if batch != self.batch:
            self.batch, self.steps, self.micro_step = batch, 0, self.queued
        if self.steps == 1:  # The second step captures, so that its peak of memory includes the graphs.
            length = self.config.model.context_length
            self.micro_step = capture(self.queued, self.state.model, length, settings, self.compute)
        result = train.train_step(self.wrapped, self.micro_step, self.state, self.config, self.compute)
        self.steps += 1
        self.state.step += 1
        return result

    def park(self) -> None:
        self.batch, self.micro_step = None, self.queued
        super().park()

    def resume(self) -> None:
        super().resume()
        self.state.fp8_scales = ScaleUpdates(self.state.model, self.compute.world)


def ours(
    cell: TrainingCell,
    trainer: Trainer,
    device: str,
    loader: TrainLoader | None = None,
    max_steps: int = 1200,
    world: World = ALONE,
) -> OurJob:
    """Return train.py's job in this process of `world`, on random tokens unless a loader is given.

    Raises:
        WrongResult: the attention is far from the fp64 reference.
    """
    checkpointing = cell.activation_checkpointing
    settings = TrainConfig(activation_checkpointing=checkpointing, compile=trainer.compiled, max_steps=max_steps)
    variant, _, function = trainer.attention.partition(":")
    attention = CustomConfig(function=function) if function else VARIANTS[variant]()
    check_attention(build_attention(attention), cell, trainer, device)
    data = DataConfig(name="tokens", dir="", tokenizer="gpt2")
    config = Config(attention=attention, model=cell.shape(), data=data, train=settings)
    compute = Compute(torch.device(device), DTYPE, world, fp8=trainer.precision == "fp8")
    with torch.device(device):
        model = GPT2(config.model, build_attention(attention), checkpointing, compute.fp8)
    shard(model, compute, settings.reshard_after_forward)
    optimizer, synthetic = build_optimizer(model, config.optimizer), RandomTokens(cell.context_length, device)
    state = TrainState(model, optimizer, compute.grad_scaler(), loader or synthetic, "gpt2")
    return OurJob(data_parallel(compile_model(model, settings, compute), world), state, config, compute, synthetic)


def check_attention(attend: Attention, cell: TrainingCell, trainer: Trainer, device: str) -> None:
    """Compare an attention with the fp64 reference on one sequence of the cell, or on its first CHECKED_LENGTH tokens.

    Raises:
        WrongResult: the error is too large.
    """
    config, length = cell.shape(), min(cell.context_length, CHECKED_LENGTH)
    heads = {"heads": config.n_head, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    shape = AttentionShape(cell.name, 1, length, **heads, packed=config.kv_heads == config.n_head)
    attend = flash2 if trainer.attention == "flash2" else attend  # bind calls flash2_packed, as the model does
    check_on(shape, device, trainer.attention, attend)


class PeerJob(Job):
    """Takes the steps of nanoGPT's loop with a peer's model. loss_of(model, inputs, targets) returns the loss."""

    def __init__(self, model: nn.Module, loss_of: Callable, cell: TrainingCell, trainer: Trainer, device: str):
        self.settings = OptimizerConfig()
        super().__init__(model, build_optimizer(model, self.settings, torch.optim.AdamW))
        self.called = torch.compile(model) if trainer.compiled else model
        self.loss_of, self.context_length, self.device = loss_of, cell.context_length, device

    def step(self, batch: int) -> None:
        with torch.autocast(torch.device(self.device).type, DTYPE):
            loss = self.loss_of(self.called, *tokens(batch, self.context_length, self.device))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def load_nanogpt(path: Path) -> SimpleNamespace:
    """Return what nanoGPT's model.py defines. Any other file raises a UserError."""
    if not path.is_file():
        raise UserError(f"nanogpt={path} does not exist; {NANOGPT_REMEDY}")
    try:
        module = SimpleNamespace(**runpy.run_path(str(path)))
    except (Exception, SystemExit) as error:  # The file can raise anything.
        raise UserError(f"nanogpt={path} cannot be run as Python ({described(error)}); {NANOGPT_REMEDY}") from error
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise UserError(f"nanogpt={path} has no GPT and GPTConfig; {NANOGPT_REMEDY}")
    return module


def nanogpt(cell: TrainingCell, trainer: Trainer, device: str, module: SimpleNamespace) -> PeerJob:
    """Return the job of nanoGPT's GPT, with biases. Naive attention is its branch for a torch without SDPA.

    In another precision than bf16, torchao multiplies the linear layers of the blocks in FP8.
    """
    sizes = cell.sizes() | {"block_size": cell.context_length, "vocab_size": PADDED}
    config = module.GPTConfig(dropout=0.0, bias=True, **sizes)
    with torch.device(device):
        model = module.GPT(config)
    if trainer.attention == "naive":
        mask = torch.ones(cell.context_length, cell.context_length).tril()[None, None]
        for block in model.transformer.h:
            block.attn.flash = False
            block.attn.register_buffer("bias", mask.to(device))
    if trainer.precision != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # optional

        recipe = Float8LinearConfig.from_recipe_name(trainer.precision)
        convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: name != "lm_head")
    return PeerJob(model, lambda model, x, y: model(x, y)[1], cell, trainer, device)


def huggingface(cell: TrainingCell, trainer: Trainer, device: str) -> PeerJob:
    """Return the job of transformers' GPT2LMHeadModel, which calls naive attention eager."""
    from transformers import GPT2Config, GPT2LMHeadModel  # optional, and slow to import

    sizes = cell.sizes() | {"n_positions": cell.context_length, "vocab_size": PADDED}
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, **sizes)
    config._attn_implementation = {"naive": "eager", "sdpa": "sdpa"}[trainer.attention]
    with torch.device(device):
        model = GPT2LMHeadModel(config)
    return PeerJob(model, lambda model, x, y: model(input_ids=x, labels=y).loss, cell, trainer, device)
