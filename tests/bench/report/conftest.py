"""Made-up runs, and the browser for their page."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.bench.report.made_up import save_run


@pytest.fixture
def write_run(tmp_path) -> Callable[..., Path]:
    """Return save_run for names below one folder."""
    return lambda name, *metrics, **settings: save_run(tmp_path / "runs" / name, *metrics, **settings)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the Chromium that CHROMIUM names, or one on the path. Skip the tests if neither exists."""
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
