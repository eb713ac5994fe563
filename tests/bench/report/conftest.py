"""Runs as train.py leaves them, and the browser that their page is opened in."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from playwright.sync_api import Browser, sync_playwright

from conf.schema import Config
from data.config import DataConfig
from model.attention import AttentionConfig
from trainer.loggers import JsonlLogger

Writer = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path) -> Writer:
    """Writes a run's metrics.jsonl, from metrics by step of 100 tokens, and its config.yaml."""

    def write(name: str, metrics: dict[int, dict], attention: str = "flash2", **train: int) -> Path:
        folder = tmp_path / "runs" / name
        log = JsonlLogger(folder / "metrics.jsonl")
        for step, of_step in metrics.items():
            log.log(step, 100 * step, of_step)
        log.close()
        config = Config(
            attention=AttentionConfig(name=attention), data=DataConfig(name="tokens", dir="tokens", tokenizer="byte")
        )
        vars(config.train).update(train)
        OmegaConf.save(OmegaConf.structured(config), folder / "config.yaml")
        return folder

    return write


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The Chromium that CHROMIUM names, which has to work then, or else one on the path."""
    installed = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    path = os.environ.get("CHROMIUM") or next(filter(None, installed), None)
    if path is None:
        pytest.skip("needs Chromium: install it, or name it by CHROMIUM=/path/to/chromium")
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync")
    arguments = ["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in quiet)]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
