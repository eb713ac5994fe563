"""Ending a run when the user or the machine asks for it."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Self

from trainer.distributed.world import ALONE, World

SHOW_CURSOR = "\x1b[?25h"  # a live progress line hides it


class StopRequest:
    """Context in which the first SIGINT or SIGTERM only sets `signal`, so that the run can save and end.

    After it, SIGINT ends the process at once. A second SIGTERM changes nothing, because launchers often send it twice.
    SIGTERM after SIGINT ends the process: torchrun sends it after a second Ctrl-C. SIGHUP counts like SIGTERM unless it
    is ignored (nohup). SIGUSR1 and SIGUSR2 count if they have a handler: submitit sends them before a job's time is
    over.
    """

    def __init__(self, world: World = ALONE):
        self.signal: signal.Signals | None = None
        self._world = world

    def __enter__(self) -> Self:
        handled = [number for number in (signal.SIGUSR1, signal.SIGUSR2) if callable(signal.getsignal(number))]
        hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
        numbers = signal.SIGINT, signal.SIGTERM, *hangup, *handled
        self._handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def is_requested(self) -> bool:
        """Return whether any process got a signal. All processes call this together, and then all have the signal."""
        number = self._world.largest(0 if self.signal is None else int(self.signal))
        if number and self.signal is None:
            self._heed(number)
        return bool(number)  # A signal that arrives now counts at the next call: the other processes do not know of it.

    def end_process(self) -> None:
        """After a signal, exit with 128 plus its number. After SIGUSR1 and SIGUSR2, call the original handler:
        submitit's handler puts the job back into the queue."""
        if self.signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            sys.exit(128 + self.signal)
        elif self.signal is not None:
            self._handlers[self.signal](self.signal, None)

    def _heed(self, number: int) -> None:
        self.signal = signal.Signals(number)
        for end_at_once in (signal.SIGINT, signal.SIGTERM) if number == signal.SIGINT else (signal.SIGINT,):
            signal.signal(end_at_once, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            return
        self._heed(number)
        cursor = SHOW_CURSOR if os.isatty(2) else ""
        told = f"{cursor}\n{self.signal.name}: saving after this step; Ctrl-C ends the run at once, without saving\n"
        with suppress(OSError):  # the terminal may be closed
            os.write(2, told.encode())  # not print, which the signal may have interrupted
