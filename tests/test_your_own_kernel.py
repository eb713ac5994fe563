"""docs/your-own-kernel.md, followed in an empty folder."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.attention import __main__ as attention
from bench.attention import function_check
from bench.common.command_line import launch
from bench.training import __main__ as training
from tests.e2e import ROOT, TINY, write_tokens

PAGE = (ROOT / "docs" / "your-own-kernel.md").read_text()
BLOCKS = {language: re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) for language in ("bash", "python")}
EXPORTS, *COMMANDS = BLOCKS["bash"]
GPU = "# needs a GPU\n"
ON_GPU = [command for command in COMMANDS if GPU in command]
CHECK, TRAIN = (command for command in COMMANDS if GPU not in command)
PROGRAMS = {
    "bench.attention": (attention.run, attention.AttentionSettings),
    "bench.training": (training.run, training.TrainingSettings),
}


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


@pytest.fixture
def start(folder, monkeypatch):
    """Return a function that runs a command of a benchmark in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def start(command: str, *more: str) -> None:
        python, m, module, *arguments = shlex.split(command, comments=True)
        assert (python, m) == ("python", "-m")
        monkeypatch.setattr("sys.argv", [module, *arguments, *more])
        launch(*PROGRAMS[module])

    return start


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("my-folder")
    [kernel] = BLOCKS["python"]
    (folder / "my_kernel.py").write_text(kernel)
    return folder


def test_the_kernel_passes_the_check(start, monkeypatch, capsys):
    """At two lengths and head sizes, because the whole matrix takes longer."""
    monkeypatch.setattr(function_check, "LENGTHS", (1, 63))
    monkeypatch.setattr(function_check, "HEAD_DIMS", (40, 64))
    start(CHECK)
    assert "42 ok, 0 wrong, 18 unsupported" in capsys.readouterr().out


def test_the_kernel_trains(folder):
    """With a small model and corpus, in the page's own shell."""
    write_tokens(folder / "tokens")
    run(folder, " ".join([TRAIN.strip(), *(setting for setting in TINY if not setting.startswith("train.max_steps"))]))
    [log] = folder.glob("outputs/*_custom*/metrics.jsonl")
    assert json.loads(log.read_text().splitlines()[-1])["step"] == 20


def test_the_commands_for_a_gpu_compose(start, capsys):
    assert len(ON_GPU) == 2
    for command in ON_GPU:
        start(command, "--cfg", "job")
        assert "function: my_kernel:attention" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("command", ON_GPU)
def test_a_command_for_a_gpu_runs(folder, command):
    assert "my_kernel:attention" in run(folder, command)
