"""Made-up output folders of train.py."""

from pathlib import Path

from omegaconf import OmegaConf

from conf.schema import Config
from data.config import DataConfig
from model.attention import VARIANTS
from trainer.loggers.jsonl import JsonlLogger


def save_run(folder: Path, metrics: dict[int, dict], attention: str = "flash2", **train: int) -> Path:
    """Write metrics.jsonl, from metrics by step of 100 tokens, and config.yaml."""
    log = JsonlLogger(folder / "metrics.jsonl", print)
    for step, of_step in metrics.items():
        log.log(step, 100 * step, of_step)
    log.close()
    data = DataConfig(name="tokens", dir="tokens", tokenizer="byte")
    config = Config(attention=VARIANTS[attention](), data=data)
    vars(config.train).update(train)
    OmegaConf.save(OmegaConf.structured(config), folder / "config.yaml")
    return folder
