"""Results files: on what, and with which versions, something was measured, and its rows."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Collection
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from errors import UserError

ROOT = Path(__file__).parents[2]


def environment() -> dict:
    """The `environment` of a results file. The commit is GIT_COMMIT's, for copies of a tree, or else the checkout's."""
    cuda = torch.cuda.is_available()
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": platform.processor() or platform.machine(),
        "driver": _output(driver).partition("\n")[0] if cuda else None,
        "torch": torch.__version__,
        "triton": _triton(),
        "commit": os.environ.get("GIT_COMMIT") or _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "date": date.today().isoformat(),
    }


def results_folder(gpu: str | None) -> Path:
    """Where the results of this GPU go, unless the user names it otherwise."""
    if gpu is None:
        if not torch.cuda.is_available():
            raise UserError("results go to a folder named after the GPU, and torch finds none; name a file by --out")
        gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower().removeprefix("nvidia "))
    return ROOT / "bench" / "results" / gpu


def write(out: Path, results: dict) -> None:
    """Replaces a results file as a whole.

    Raises:
        UserError: the disk refuses it, and the file is as it was.
    """
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
        partial.replace(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); make room, or name another file") from error


def read_results(path: Path) -> dict:
    """What a results file holds: its environment, its rows, and what else its benchmark wrote.

    Raises:
        UserError: there is none, or it is cut, or no benchmark wrote it.
    """
    try:
        results = json.loads(path.read_text())
        of_bench = {"gpu", "torch", "triton", "commit"} <= set(results["environment"])
    except (OSError, ValueError, TypeError, KeyError):
        of_bench = False
    if not of_bench:
        raise UserError(f"{path} is no results file of bench; put it back as it was, or measure it anew")
    return results


def has_columns(results: dict, columns: Collection[str]) -> bool:
    """Whether there are rows, of a benchmark that fills those columns."""
    return all(set(columns) <= set(row) for row in results.get("rows", [{}]))


def check_same(then: dict, now: dict, file: Path, remedy: str, any_commit: bool = False) -> None:
    """Refuses to add to results that were measured on another machine, with other versions or at another commit.

    Raises:
        UserError: they were; it names what differs and the remedy.
    """
    for key in ("gpu", "driver", "torch", "triton", *([] if any_commit else ["commit"])):
        if then.get(key) != now[key]:
            raise UserError(f"{file} has {key} {then.get(key)}, not {now[key]}; {remedy}")


def begin(out: Path | None, add: bool, columns: Collection[str]) -> dict:
    """Results without rows; or, to `add` to, what the file holds, whose rows each tell their commit: only rows that are
    measured together are ever compared.

    Raises:
        UserError: they cannot be read, lack the `columns` of this benchmark's rows, or were measured on another machine
            or with other versions.
    """
    here = environment()
    if not (add and out and out.is_file()):
        return {"environment": here, "rows": []}
    results = read_results(out)
    if not has_columns(results, columns):
        raise UserError(f"{out} holds rows of another benchmark; name another file by --out")
    then = results["environment"]
    check_same(then, here, out, "without --add all is measured anew", any_commit=True)
    rows = [{"commit": then["commit"]} | row for row in results["rows"]]
    return results | {"environment": here, "rows": rows}


def _triton() -> str | None:
    """Triton's version; None where there is none, as it is for Linux alone."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _output(command: list[str]) -> str:
    """What a command prints, or nothing where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""
