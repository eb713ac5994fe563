"""UserError, the exception for mistakes that a user can fix, and what a program prints."""

import errno
import io
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from hydra.core.override_parser.types import Quote, QuotedString


class UserError(Exception):
    """Bad input, described in one sentence that names the value and the remedy.

    Entry points print the sentence without a traceback and exit with status 2. Other exceptions are bugs and keep their
    traceback.
    """


def check_choice(key: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a setting that is not one of `choices`."""
    if value not in list(choices):  # a dict cannot look up a value without a hash, such as a list
        raise UserError(f"{key}={value} is unknown; choose one of {', '.join(map(str, choices))}")


def check_range(key: str, value: float | None, low: float, high: float | None = None) -> None:
    """Refuse a number that is below `low`, above `high`, infinite or NaN. None is accepted."""
    if value is not None and not (low <= value < math.inf and (high is None or value <= high)):
        upper = "" if high is None else f" and at most {high}"
        number = "" if math.isfinite(value) else "a finite number of "
        raise UserError(f"{key}={value} is out of range; give {number}at least {low}{upper}")


def check_rate(key: str, value: float) -> None:
    """Refuse a number that is not in [0, 1)."""
    if not 0 <= value < 1:
        raise UserError(f"{key}={value} is out of range; give at least 0 and below 1")


class _Output(io.FileIO):
    """A standard stream that discards output after its reader (such as `head`) or its terminal has ended."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)
        self.ended = (errno.EPIPE, errno.EIO) if self.isatty() else (errno.EPIPE,)

    def write(self, data: memoryview) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self.ended:
                raise
            return len(data)


def guard_output() -> None:
    """Let stdout and stderr escape characters that they cannot encode, and outlive their readers.

    They write each line at once, also to a file, so that the lines of several programs in one log keep their order.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream and stream is getattr(sys, f"__{name}__"):  # not replaced by a test, closed, or guarded already
            buffer = io.BufferedWriter(_Output(stream.fileno()))
            options = {"line_buffering": True, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", **options))


def as_text(value: object) -> str:
    """Return a value in the quotes that make it a text for Hydra."""
    return QuotedString(str(value), Quote.double).with_quotes()


def assigned(key: str, value: object) -> str:
    """Return key=value for a command line in a shell, with quotes if Hydra or the shell needs them."""
    if value is None:
        return f"{key}=null"
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    if re.fullmatch(r"[\w./:@%+-]+", str(value), re.ASCII):
        return f"{key}={value}"
    return shlex.quote(f"{key}={as_text(value)}")


def values_in(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of a command line by their keys. An argument without a value has an empty one."""
    return dict(argument.lstrip("+").partition("=")[::2] for argument in arguments)


def refuse(sentence: str) -> NoReturn:
    """Print the sentence in one line on stderr, and end the program with status 2."""
    print(f"error: {' '.join(sentence.splitlines())}", file=sys.stderr)
    sys.exit(2)


def problem_of(error: UserError) -> str:
    """Return the sentence of an error without its remedy, for a program that gives another remedy."""
    return str(error).rpartition("; ")[0] or str(error)


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether host or GPU memory ran out."""
    return isinstance(error, MemoryError) or is_out_of_gpu_memory(error) or "DefaultCPUAllocator" in str(error)


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Return whether GPU memory ran out. Triton, CUDA and cuBLAS have no class for it, so this reads their messages.

    torch's class is compared by name, because importing torch takes seconds.
    """
    of_library = isinstance(error, RuntimeError) and re.search(r"out of memory|ALLOC_FAILED", str(error), re.IGNORECASE)
    return type(error).__name__ == "OutOfMemoryError" or bool(of_library)
