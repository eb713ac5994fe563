"""Runs as train.py leaves them, and the browser that their page is opened in."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.bench.report.made_up import save_run


@pytest.fixture
def write_run(tmp_path) -> Callable[..., Path]:
    """save_run, for names below one folder."""
    return lambda name, *metrics, **settings: save_run(tmp_path / "runs" / name, *metrics, **settings)


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
