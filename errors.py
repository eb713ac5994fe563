"""UserError, the exception for mistakes that a user can fix, and how a program prints it."""

import math
import re
import sys
from collections.abc import Iterable
from typing import NoReturn


class UserError(Exception):
    """Bad input, described in one sentence that names the value and the remedy.

    Entry points print the sentence without a traceback and exit with status 2. Other exceptions are bugs and keep their
    traceback.
    """


def check_choice(key: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a setting that is not one of `choices`."""
    if value not in choices:
        raise UserError(f"{key}={value} is unknown; choose one of {', '.join(choices)}")


def check_range(key: str, value: float | None, low: float, high: float | None = None) -> None:
    """Refuse a number that is below `low`, above `high`, infinite or NaN. None is accepted."""
    if value is not None and not (low <= value < math.inf and (high is None or value <= high)):
        upper = "" if high is None else f" and at most {high}"
        raise UserError(f"{key}={value} must be at least {low}{upper}")


def refuse(sentence: str) -> NoReturn:
    """Print the sentence in one line on stderr, and end the program with status 2."""
    print(f"error: {' '.join(sentence.splitlines())}", file=sys.stderr)
    sys.exit(2)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def two_sentences(error: BaseException) -> str:
    """Return the first two sentences of an error's message. torch's out-of-memory errors have many more."""
    return ". ".join(first_line(error).split(". ")[:2]).rstrip(".")


def described(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def is_of_memory(error: BaseException) -> bool:
    """Return whether host or GPU memory ran out."""
    return isinstance(error, MemoryError) or is_of_gpu_memory(error) or "DefaultCPUAllocator" in str(error)


def is_of_gpu_memory(error: BaseException) -> bool:
    """Return whether GPU memory ran out. Triton, CUDA and cuBLAS have no class for it, so this reads their messages.

    torch's class is compared by name, because importing torch takes seconds.
    """
    of_library = isinstance(error, RuntimeError) and re.search(r"out of memory|ALLOC_FAILED", str(error), re.IGNORECASE)
    return type(error).__name__ == "OutOfMemoryError" or bool(of_library)
