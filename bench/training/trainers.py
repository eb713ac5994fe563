"""The trainers of bench.training: ours, nanoGPT's and Hugging Face's GPT-2, each as a step on synthetic tokens.

All get bf16 autocast, fused AdamW and clipping at 1, and every parameter in fp32. Ours runs train.py's own train_step,
the peers torch's own AdamW.
nanoGPT's model comes from a file that the user names; the loop around it is nanoGPT's train.py's.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import train
from bench.common.results import ROOT
from conf.schema import Config, TrainConfig
from data.config import DataConfig
from data.loader import TrainLoader
from errors import UserError, described
from model.attention import AttentionConfig, build_attention
from model.gpt2 import GPT2, ModelConfig
from trainer.distributed.parallel import data_parallel, shard
from trainer.distributed.world import ALONE, World
from trainer.graphs import MicroStepGraphs
from trainer.optimizer import OptimizerConfig, build_optimizer
from trainer.parts import compile_model
from trainer.precision import Compute
from trainer.state import TrainState

VOCABULARY = 50257
PADDED = 50304  # the peers' vocabulary, which they pad themselves, or their matrix products would be slow
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Cell:
    """A model at a context length, and the micro-batches it is tried with."""

    model: str
    context_length: int
    batches: tuple[int, ...]
    activation_checkpointing: str = "none"
    """Of ours alone: the peers have none."""

    @property
    def name(self) -> str:
        return f"{self.model}_{self.context_length // 1024}k"

    def shape(self) -> ModelConfig:
        """The model of conf/model at this context length.

        Raises:
            UserError: there is no such model.
        """
        known = sorted(file.stem for file in (ROOT / "conf" / "model").glob("*.yaml"))
        if self.model not in known:
            raise UserError(f"model {self.model} is unknown; choose among {', '.join(known)}")
        shape = ModelConfig(**OmegaConf.load(ROOT / "conf" / "model" / f"{self.model}.yaml"))
        return replace(shape, context_length=self.context_length, vocab_size=VOCABULARY)


@dataclass(frozen=True)
class Trainer:
    """Who trains, with which attention, and whether its model is compiled."""

    name: str
    attention: str
    compiled: bool = True

    def __str__(self) -> str:
        return f"{self.name}:{self.attention}" + ("" if self.compiled else ":eager")


@dataclass
class Job:
    """A model with its optimizer, and what takes one step of a given micro-batch with them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], object]
    state: TrainState | None = None
    """Of ours, what its checkpoints hold."""
    batch: int | None = None
    """Of ours, the micro-batch of the last step, and how many steps of it there were on end."""
    steps: int = 0
    graphs: MicroStepGraphs | None = None
    """Of ours, those steps from the second on, where they are captured."""
    parked: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)

    def park(self) -> None:
        """Gives the memory of weights, moments and graphs back, so that another job has the GPU to itself."""
        self.batch, self.graphs = None, None
        self.optimizer.zero_grad(set_to_none=True)
        moments = [x for state in self.optimizer.state.values() for x in state.values() if x.ndim]
        for tensor in (*self.model.parameters(), *self.model.buffers(), *moments):
            storage = tensor.untyped_storage()
            if storage.size():
                self.parked.append((storage, storage.size()))
                storage.resize_(0)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The job has its memory for as long as this lasts."""
        try:
            self.resume()
            yield
        finally:
            self.park()

    @torch.no_grad()
    def resume(self) -> None:
        """The memory again, with weights like fresh ones and moments of zero.

        Not with zeros, on which a GPU draws less power, and so runs some 8 % faster.
        """
        while self.parked:
            storage, size = self.parked.pop()
            storage.resize_(size)
        for name, parameter in self.model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(float(name.endswith("weight")))  # LayerNorm's are 1
        for buffer in self.model.buffers():
            buffer.copy_(torch.ones_like(buffer).tril())  # the peers' causal masks
        for state in self.optimizer.state.values():
            for x in state.values():
                x.zero_()


@cache
def tokens(batch: int, context_length: int, device: str) -> tuple[Tensor, Tensor]:
    """Random inputs and targets, the same for all, laid out as a loader's: of one sequence, slices would not be."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (batch, context_length + 1), generator=generator)
    inputs, targets = torch.stack((ids[:, :-1], ids[:, 1:])).to(device)
    return inputs, targets


class Tokens:
    """Stands for the data loader of a run."""

    def __init__(self, context_length: int, device: str):
        self.batch, self.context_length, self.device = 1, context_length, device

    def next_batches(self, count: int, agreed: Callable) -> list[tuple[Tensor, Tensor]]:
        return [tokens(self.batch, self.context_length, self.device)] * count

    def state_dict(self) -> dict:
        return {}


def ours(
    cell: Cell,
    trainer: Trainer,
    device: str,
    loader: TrainLoader | None = None,
    max_steps: int = 1200,
    world: World = ALONE,
) -> Job:
    """train.py's step, on random tokens unless a loader is given, in this process of those that train together."""
    config = Config(
        attention=AttentionConfig(trainer.attention),
        model=cell.shape(),
        data=DataConfig(name="tokens", dir="", tokenizer="gpt2"),
        train=TrainConfig(
            activation_checkpointing=cell.activation_checkpointing,
            compile=trainer.compiled,
            max_steps=max_steps,
        ),
    )
    compute = Compute(torch.device(device), DTYPE, world)
    with torch.device(device):
        model = GPT2(config.model, build_attention(config.attention), config.train.activation_checkpointing)
    shard(model, compute, config.train.reshard_after_forward)
    optimizer, synthetic = build_optimizer(model, config.optimizer), Tokens(cell.context_length, device)
    state = TrainState(model, optimizer, compute.grad_scaler(), loader or synthetic, "gpt2")
    called = data_parallel(compile_model(model, config.train, compute), world)

    def step(batch: int) -> tuple[Tensor, float]:
        synthetic.batch, config.train.batch_size = batch, batch * world.size  # one micro-step for each process
        if batch != job.batch:
            job.batch, job.steps, job.graphs = batch, 0, None
        if job.steps == 1:  # not before, so that the second step's peak of memory has them
            job.graphs = train.capture(called, state, config, compute)
        result = train.train_step(called, state, config, compute, job.graphs)
        job.steps += 1
        state.step += 1
        return result

    job = Job(model, optimizer, step, state)
    return job


def _peer(model: nn.Module, loss_of: Callable, cell: Cell, trainer: Trainer, device: str) -> Job:
    """A peer's model in nanoGPT's loop."""
    settings = OptimizerConfig()
    optimizer = build_optimizer(model, settings, torch.optim.AdamW)
    called = torch.compile(model) if trainer.compiled else model

    def step(batch: int) -> None:
        with torch.autocast(torch.device(device).type, DTYPE):
            loss = loss_of(called, *tokens(batch, cell.context_length, device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Job(model, optimizer, step)


def load_nanogpt(path: Path):
    """nanoGPT's model.py as a module.

    Raises:
        UserError: there is no such file, or it is none of nanoGPT's.
    """
    if not path.is_file():
        raise UserError(f"--nanogpt {path} does not exist; give the model.py of karpathy/nanoGPT")
    loader = SourceFileLoader("nanogpt_model", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    try:
        loader.exec_module(module)
    except Exception as error:  # whatever the file does
        raise UserError(f"--nanogpt {path} cannot be run as Python ({described(error)})") from error
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise UserError(f"--nanogpt {path} has no GPT and GPTConfig; give the model.py of karpathy/nanoGPT")
    return module


def nanogpt(cell: Cell, trainer: Trainer, device: str, module) -> Job:
    """nanoGPT's GPT with biases, as GPT-2 has them; naive attention is the branch it takes without torch's kernel."""
    shape = cell.shape()
    sizes = {"n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.n_embd}
    config = module.GPTConfig(block_size=cell.context_length, vocab_size=PADDED, dropout=0.0, bias=True, **sizes)
    with torch.device(device):
        model = module.GPT(config)
    if trainer.attention == "naive":
        mask = torch.ones(cell.context_length, cell.context_length).tril()[None, None]
        for block in model.transformer.h:
            block.attn.flash = False
            block.attn.register_buffer("bias", mask.to(device))
    return _peer(model, lambda model, x, y: model(x, y)[1], cell, trainer, device)


def huggingface(cell: Cell, trainer: Trainer, device: str) -> Job:
    """transformers' GPT2LMHeadModel; its naive attention is called eager there."""
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to import, and needed by few

    shape = cell.shape()
    sizes = {
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_positions": cell.context_length,
    }
    config = GPT2Config(vocab_size=PADDED, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, **sizes)
    config._attn_implementation = {"naive": "eager", "sdpa": "sdpa"}[trainer.attention]
    with torch.device(device):
        model = GPT2LMHeadModel(config)
    return _peer(model, lambda model, x, y: model(input_ids=x, labels=y).loss, cell, trainer, device)
