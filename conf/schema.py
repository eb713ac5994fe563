"""The typed schema of conf/*.yaml: the type, default and meaning of each key.

The schema of a group is in the file of the code that reads it: in model/, data/ and trainer/.
"""

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from data.config import DataConfig
from errors import UserError, check_range
from model.attention import VARIANTS, AttentionConfig
from model.gpt2 import ModelConfig
from trainer.checkpoint.config import CheckpointConfig
from trainer.config import TrainConfig
from trainer.loggers import WandbConfig
from trainer.optimizer import OptimizerConfig
from trainer.precision import PrecisionConfig


@dataclass
class ComputeConfig:
    """Settings of all programs that run a model."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    device: str = "auto"
    """auto (the GPU if the machine has one), cpu or cuda."""


@dataclass
class Config(ComputeConfig):
    """Settings of `python train.py`."""

    attention: AttentionConfig = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = MISSING
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False
    """Also write TensorBoard's event files, to the folder `tensorboard` in the run's output folder."""
    parallel: str | None = None
    """How processes share the model. ddp: each holds the whole model. fsdp: weights, gradients and moments are split
    among all processes. hsdp: they are split within a node and replicated across nodes. none: there is one process.
    null is ddp with several processes, else none."""


@dataclass
class PrepareConfig:
    """Settings of `python -m data.prepare` and `python -m data.inspect`."""

    data: DataConfig = MISSING


@dataclass
class SampleConfig(ComputeConfig):
    """Settings of `python sample.py`."""

    checkpoint: str = MISSING
    """A checkpoint file, a run's folder, or a Hugging Face GPT-2 (a folder of save_pretrained, or a hub id)."""
    prompt: str = ""
    """Text to continue; empty starts a new document."""
    num_samples: int = 1
    """Number of continuations."""
    max_tokens: int = 200
    """Length of a continuation, in tokens."""
    temperature: float = 0.8
    """Divisor of the logits; 0 always takes the likeliest token."""
    top_k: int | None = 200
    """Draw only from the k likeliest tokens; null for all tokens."""
    top_p: float | None = None
    """Draw only from the likeliest tokens that together reach this probability; null for all tokens."""
    seed: int = 1337
    """Seed of the draws."""
    attention: AttentionConfig = MISSING

    def __post_init__(self):
        for key, low in (("num_samples", 1), ("max_tokens", 1), ("temperature", 0)):
            check_range(key, getattr(self, key), low)
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} is out of range; give at least 1, or null for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(
                f"top_p={self.top_p} is out of range; give a number above 0 and at most 1, or null for all tokens"
            )


@dataclass
class EvaluateConfig(ComputeConfig):
    """Settings of `python evaluate.py`."""

    checkpoint: str = MISSING
    """A checkpoint file, a run's folder, or a Hugging Face GPT-2 (a folder of save_pretrained, or a hub id)."""
    data: DataConfig = MISSING
    attention: AttentionConfig = MISSING
    context_length: int | None = None
    """Tokens of a window; null is the model's context."""
    stride: int | None = None
    """Tokens from one window to the next; only the last `stride` tokens of a window are scored. null is the window's
    length, without overlap."""
    batch_size: int = 8
    """Windows of one forward pass."""

    def __post_init__(self):
        for key in ("context_length", "stride", "batch_size"):
            check_range(key, getattr(self, key), 1)


@dataclass
class ReplayConfig(ComputeConfig):
    """Settings of `python replay.py`, which takes all others from the recorded run."""

    record: str = MISSING
    """A file of a run's replay folder."""
    checkpoint: str | None = None
    """A checkpoint file or a run's folder. null is the run's newest checkpoint from before the recorded step, or the
    oldest checkpoint if all are later."""
    function: str | None = None
    """For runs with attention=custom: the run's attention.function. A record must not name code to import."""


@dataclass
class ExportConfig:
    """Settings of `python export.py`."""

    checkpoint: str = MISSING
    """A checkpoint file, or a run's folder."""
    to: str = MISSING
    """Folder to write the model and its tokenizer to."""


def register() -> None:
    """Store the schemas in Hydra, under the names in the defaults lists of conf/*.yaml."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name, config in VARIANTS.items():
        store.store(group="schema/attention", name=name, node=config)
    for config in (PrepareConfig, SampleConfig, EvaluateConfig, ReplayConfig, ExportConfig):
        store.store(name=f"{config.__name__.removesuffix('Config').lower()}_schema", node=config)
