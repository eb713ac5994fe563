"""docs/your-own-kernel.md, followed in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import ROOT, rows

PAGE = (ROOT / "docs" / "your-own-kernel.md").read_text()
BLOCKS = {language: re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) for language in ("bash", "python")}
EXPORTS, *COMMANDS = BLOCKS["bash"]
GPU = "# needs a GPU\n"


def run(folder: Path, command: str) -> str:
    """Run a command in the shell, after the page's exports, and return its stdout."""
    exports = EXPORTS.replace("/path/to/this/repository", str(ROOT))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # so that `python` is this Python
    script = f"set -e\n{exports}\n{command}"
    ended = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("my-folder")
    [kernel] = BLOCKS["python"]
    (folder / "my_kernel.py").write_text(kernel)
    return folder


def test_the_page_has_the_commands_that_the_tests_below_run():
    assert [command.split()[2 if "-m" in command else 1] for command in COMMANDS if GPU not in command] == [
        "bench.attention",
        "$REPO/train.py",
    ]
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("command", [command for command in COMMANDS if GPU not in command])
def test_a_command_runs(folder, command):
    out = run(folder, command)
    if "bench.attention" in command:
        assert "0 wrong" in out
    else:
        [log] = folder.glob("outputs/*_custom/metrics.jsonl")
        assert rows(log.parent)[-1]["step"] == 20


@pytest.mark.parametrize("command", [command for command in COMMANDS if GPU in command])
def test_a_command_for_a_gpu_composes(folder, command):
    assert "function: my_kernel:attention" in run(folder, f"{command.strip()} --cfg job")


@pytest.mark.gpu
@pytest.mark.parametrize("command", [command for command in COMMANDS if GPU in command])
def test_a_command_for_a_gpu_runs(folder, command):
    assert "my_kernel:attention" in run(folder, command)
