"""The typed schema behind conf/*.yaml: every key, its type, its default and its meaning.

The schema of a group lies with the code that reads it: model/attention.py, model/gpt2.py, data/config.py and trainer/.
"""

import math
from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from bench.paper.config import PaperConfig
from data.config import DataConfig
from errors import UserError
from model.attention import AttentionConfig
from model.gpt2 import ModelConfig
from trainer.checkpoint import CheckpointConfig
from trainer.config import TrainConfig
from trainer.evaluation import EvaluationConfig
from trainer.loggers import WandbConfig
from trainer.optimizer import OptimizerConfig
from trainer.precision import PrecisionConfig


@dataclass
class Config:
    """What `python train.py` reads."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = MISSING
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    eval_only: bool = False
    """Do not train: score the model that `checkpoint=` names on the whole of the validation tokens."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    replay: str | None = None
    """Do not train: run the batch of a file in a run's replay folder again, with that run's settings, by the checkpoint
    that the file names or by the model of `checkpoint=`."""
    device: str = "auto"
    """auto (the GPU where there is one), cpu or cuda."""
    parallel: str | None = None
    """How processes that torchrun or hydra/launcher=slurm started train together: ddp (each holds the whole model),
    fsdp (weights, gradients and moments are split among all) or hsdp (split within a node, alike on every node); none
    is one process alone. null is ddp with more than one process."""


@dataclass
class PrepareConfig:
    """What `python -m data.prepare` reads."""

    data: DataConfig = MISSING


@dataclass
class SampleConfig:
    """What `python sample.py` reads."""

    checkpoint: str = MISSING
    """A checkpoint file, a run's folder, or a Hugging Face GPT-2 (a folder with model.safetensors, or a hub id)."""
    prompt: str = ""
    """Text to continue; empty starts a new document."""
    num_samples: int = 1
    """How many continuations, one after another."""
    max_tokens: int = 200
    """Length of each, in tokens."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int | None = 200
    """Only the k likeliest tokens are drawn; null for all."""
    top_p: float | None = None
    """Only the likeliest tokens that together reach this probability are drawn; null for all."""
    seed: int = 1337
    """Of the draws."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    device: str = "auto"
    """auto (the GPU where there is one), cpu or cuda."""

    def __post_init__(self):
        for key, low in (("num_samples", 1), ("max_tokens", 1), ("temperature", 0)):
            if not low <= getattr(self, key) < math.inf:
                raise UserError(f"{key}={getattr(self, key)} must be at least {low}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1, or null for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1, or null for all tokens")


@dataclass
class ExportConfig:
    """What `python export.py` reads."""

    checkpoint: str = MISSING
    """A checkpoint file, or a run's folder."""
    to: str = MISSING
    """Folder to write config.json and model.safetensors to."""


def register() -> None:
    """Makes the schemas known to Hydra, under the names that conf/*.yaml take them by."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    store.store(name="prepare_schema", node=PrepareConfig)
    store.store(name="sample_schema", node=SampleConfig)
    store.store(name="export_schema", node=ExportConfig)
    store.store(name="paper_schema", node=PaperConfig)
