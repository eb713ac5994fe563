"""Made-up runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.report.made_up import save_run


@pytest.fixture
def write_run(tmp_path) -> Callable[..., Path]:
    """Return save_run for names below one folder."""
    return lambda name, *metrics, **settings: save_run(tmp_path / "runs" / name, *metrics, **settings)
