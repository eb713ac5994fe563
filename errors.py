"""The one exception for mistakes a user can mend, and how a program ends by it."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class UserError(Exception):
    """Bad input, in one sentence that names the thing and the remedy.

    Entry points print it without a traceback and exit with status 2; anything else that is raised is a bug and keeps
    its traceback.
    """


def refuse(sentence: str) -> NoReturn:
    """Ends the program with a sentence, in one line whatever it quotes, and status 2."""
    print(f"error: {' '.join(sentence.splitlines())}", file=sys.stderr)
    sys.exit(2)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def two_sentences(error: BaseException) -> str:
    """The first two of what an error says: where the GPU's memory ran out torch goes on at length."""
    return ". ".join(first_line(error).split(". ")[:2]).rstrip(".")


def described(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {first_line(error)}"


def interrupted() -> NoReturn:
    """Ends the program after Ctrl-C, with the status that shells give it."""
    print("interrupted", file=sys.stderr)
    sys.exit(130)


def before_imports() -> None:
    """From here to after_imports Ctrl-C ends the program at once, and raises nothing: amid the imports of torch, which
    take seconds, an exception is told at length, or swallowed."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(*_) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(130)


def after_imports() -> None:
    """Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_of_memory(error: BaseException) -> bool:
    """Whether a machine's memory, or its GPU's, ran out."""
    return isinstance(error, MemoryError) or is_of_gpu_memory(error) or "DefaultCPUAllocator" in str(error)


def is_of_gpu_memory(error: BaseException) -> bool:
    """Whether a GPU's memory ran out: by torch's class for it, which takes seconds to import and so is known by its
    name, or by what Triton, CUDA or cuBLAS say."""
    told = isinstance(error, RuntimeError) and re.search(r"out of memory|ALLOC_FAILED", str(error), re.IGNORECASE)
    return type(error).__name__ == "OutOfMemoryError" or bool(told)


@contextmanager
def refusing() -> Iterator[None]:
    """Around what an entry point does: a UserError ends the program as it asks for, and Ctrl-C without a traceback."""
    after_imports()
    try:
        yield
    except UserError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        interrupted()
