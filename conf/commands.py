"""The commands to type after a run, as words with quotes for Hydra and the shell."""

import os
import sys
from pathlib import Path

from omegaconf import OmegaConf

from conf.schema import Config
from data.config import SPLIT_KEYS, DataConfig
from errors import assigned
from model.attention import SPARSE_KEYS, AttentionConfig, CustomConfig
from trainer.distributed.world import started, started_by_submitit, started_on_node
from trainer.layout import shown

DATA_KEYS = ("dir", "tokenizer", "document_mask")


def next_commands(config: Config, folder: Path, checkpoint: Path, *, is_stopped: bool) -> list[list[str]]:
    """Return the command that continues a stopped run, or the commands that use the model of a finished run."""
    return [_to_continue(checkpoint, folder, config)] if is_stopped else _to_use(checkpoint.parent, config)


def _to_continue(checkpoint: Path, folder: Path, config: Config) -> list[str]:
    """Return the command that continues this run from `checkpoint`."""
    size, local = started()[1], started_on_node()
    nodes = [f"--nnodes={size // local}", "..."] if size > local else []
    launcher = ["torchrun", *nodes, f"--nproc_per_node={local}"] if size > 1 else ["python"]
    code = str(config.attention).split() if isinstance(config.attention, CustomConfig) else []
    places = [assigned("checkpoint.resume", shown(checkpoint)), assigned("hydra.run.dir", shown(folder))]
    places += [assigned("checkpoint.dir", config.checkpoint.dir)] if config.checkpoint.dir else []
    return [*launcher, _beside("train.py"), *code, *places]


def _to_use(checkpoints: Path, config: Config) -> list[list[str]]:
    """Return the commands that sample from the newest model in a folder, and evaluate it on the run's data."""
    source = assigned("checkpoint", shown(checkpoints))
    attention = _attention_words(config.attention)
    return [
        ["python", _beside("sample.py"), source, *attention],
        ["python", _beside("evaluate.py"), source, *attention, *_data_words(config.data)],
    ]


def _beside(program: str) -> str:
    """Return the path of a program in the folder of the running one."""
    return program if started_by_submitit() else os.path.relpath(Path(sys.argv[0]).with_name(program))


def _attention_words(attention: AttentionConfig) -> list[str]:
    """Return the attention of a model that another attention cannot run."""
    if isinstance(attention, CustomConfig):
        return str(attention).split()
    keys = [key for key, name in SPARSE_KEYS.items() if name == attention.name]
    choice = [f"attention={attention.name}"] if keys else []
    return choice + [assigned(f"attention.{key}", getattr(attention, key)) for key in keys]


def _data_words(data: DataConfig) -> list[str]:
    """Return the choice of the data, and the settings that say where and what its tokens are, except defaults."""
    file = Path(__file__).parent / "data" / f"{data.name}.yaml"
    usual = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.load(file)))
    is_built = data.name == "stdlib"  # evaluate.py builds the same split if the tokens are not there
    words = [] if is_built else [f"data={data.name}"]
    values = {key: getattr(data, key) for key in (*DATA_KEYS, *(SPLIT_KEYS if is_built else ()))}
    return words + [assigned(f"data.{key}", value) for key, value in values.items() if value != usual[key]]
