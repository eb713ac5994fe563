"""Ending a run when the user or the machine asks for it."""

import signal
from types import FrameType
from typing import Self


class StopRequest:
    """Context in which the first SIGINT or SIGTERM only sets `signal`; a second one acts as it usually does."""

    def __init__(self):
        self.signal: signal.Signals | None = None

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
