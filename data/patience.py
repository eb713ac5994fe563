"""A time limit for calls that may hang."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return call(), or raise TimeoutError after `seconds`. The call then goes on in a daemon thread."""
    outcome: Future = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return outcome.result(timeout=seconds)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:g} s") from error
