"""Ending a run when the user or the machine asks for it."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Self

SHOW_CURSOR = "\x1b[?25h"  # which a live progress line hides


class StopRequest:
    """Context in which the first SIGINT or SIGTERM only sets `signal`, so that the run can save and end.

    After it SIGINT ends the process at once, whatever it is at; SIGTERM changes nothing more, since launchers and
    schedulers may well send it twice, but does so too after SIGINT: torchrun makes it of a second Ctrl-C. SIGHUP, of a
    terminal that is closed, is as SIGTERM unless it is ignored, as nohup has it. SIGUSR1 and SIGUSR2 too wait for the
    run to save where somebody handles them, as submitit does before a job of Slurm's has used up its time.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None

    def __enter__(self) -> Self:
        handled = [number for number in (signal.SIGUSR1, signal.SIGUSR2) if callable(signal.getsignal(number))]
        hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
        numbers = signal.SIGINT, signal.SIGTERM, *hangup, *handled
        self._handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def end_process(self) -> None:
        """Ends it with 128 and the signal's number, or as the handler of SIGUSR1 and SIGUSR2 wants it: submitit's puts
        the job back into the queue and ends the first process, and the others are not to fail before it has.
        """
        if self.signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            sys.exit(128 + self.signal)
        self._handlers[self.signal](self.signal, None)

    def heed(self, number: int) -> None:
        """As if this process had got the signal, which another has."""
        self.signal = signal.Signals(number)
        for end_at_once in (signal.SIGINT, signal.SIGTERM) if number == signal.SIGINT else (signal.SIGINT,):
            signal.signal(end_at_once, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            return
        self.heed(number)
        cursor = SHOW_CURSOR if os.isatty(2) else ""
        told = f"{cursor}\n{self.signal.name}: saving after this step; Ctrl-C ends the run at once, without\n"
        with suppress(OSError):  # nobody reads it, when the terminal is closed
            os.write(2, told.encode())  # not by print, which the signal may have interrupted
