"""What the command lines of the benchmarks take, for argparse."""

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """A file to write: what cannot be written is refused before anything is measured."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        reason = "Permission denied" if there.is_dir() else "Not a directory"
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({reason}: {there}); name another file")
    return path


def positive(text: str) -> int:
    """An integer of 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def sizes(text: str) -> tuple[int, ...]:
    """Integers of 1 or more, separated by commas."""
    return tuple(map(positive, text.split(",")))
