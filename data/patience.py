"""Calls that may hang, cut short."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What `call` returns or raises; a TimeoutError where it takes longer, when it is left to itself.

    Clients of the network have time-outs for each attempt at each address at best, which add up to minutes.
    """
    outcome: dict = {}

    def run() -> None:
        try:
            outcome["result"] = call()
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if "error" in outcome:
        raise outcome["error"]
    if "result" not in outcome:
        raise TimeoutError(f"nothing arrived within {seconds:g} s")
    return outcome["result"]
