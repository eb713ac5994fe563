"""Results files: the machine and the versions that something was measured with, and the measured rows."""

import hashlib
import json
import os
import platform
import re
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from torch.utils._triton import has_triton_package

from errors import UserError
from trainer import folders

ROOT = Path(__file__).parents[2]


def environment() -> dict:
    """Return the `environment` of a results file. GIT_COMMIT names the commit if the tree is not a git checkout."""
    cuda = torch.cuda.is_available()
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": platform.processor() or platform.machine(),
        "driver": _output(driver).partition("\n")[0] if cuda else None,
        "torch": torch.__version__,
        "triton": version("triton") if has_triton_package() else None,
        "cudnn": _cudnn_version() if cuda and torch.version.hip is None else None,  # on AMD, torch gives MIOpen's
        "commit": os.environ.get("GIT_COMMIT") or _commit(),
        "date": date.today().isoformat(),
    }


def _commit() -> str:
    """Return the commit, and a digest of the edits since the commit: they can change what is measured."""
    git = ["git", "-C", str(ROOT)]
    edits = _output([*git, "diff", "HEAD", "--", "*.py", "*.yaml"])
    digest = f"+{hashlib.sha256(edits.encode()).hexdigest()[:7]}" if edits else ""
    return _output([*git, "rev-parse", "HEAD"]) + digest


def short_commit(commit: str) -> str:
    """Return the first 12 digits of a commit, and the digest of edits if there is one."""
    digits, plus, edits = commit.partition("+")
    return digits[:12] + plus + edits


def results_folder(gpu: str | None = None) -> Path:
    """Return the results folder called `gpu`, or the folder of this machine's GPU."""
    if gpu is None:
        if not torch.cuda.is_available():
            raise UserError("out=null names the results folder after the GPU, and torch finds none; give out=FILE")
        gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower().removeprefix("nvidia "))
    return ROOT / "bench" / "results" / gpu


def write(out: Path, results: dict) -> None:
    """Replace a results file. If writing fails, a UserError is raised and the old file stays."""
    write_text(out, json.dumps(results, indent=1, allow_nan=False) + "\n")


def write_text(out: Path, text: str) -> None:
    """Replace a file. If writing fails, a UserError is raised and the old file stays."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folders.write_text(out, text)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); make room or name another file") from error


def set_aside(out: Path) -> None:
    """Rename a results file to NAME.old, if there is one, so that a new measurement can be interrupted."""
    out = out.resolve()  # as in write_text
    if out.is_file():
        out.replace(out.with_name(f"{out.name}.old"))


def read_results(path: Path) -> dict:
    """Read a results file, or raise a UserError if it is missing, truncated, or from another program."""
    try:
        results = json.loads(path.read_text())
        of_bench = {"gpu", "torch", "triton", "commit"} <= set(results["environment"])
    except (OSError, ValueError, TypeError, KeyError):
        of_bench = False
    if not of_bench:
        raise UserError(f"{path} is not a results file of bench; restore it or measure again")
    return results


def _cudnn_version() -> str | None:
    """Return the version that torch loads, such as "9.19.0", which may be newer than the one that torch came with."""
    number = torch.backends.cudnn.version()  # None in a torch without cuDNN
    return number and f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""
