"""Requests that signals make of a run: to save a checkpoint and go on, or to save one and end.

SIGUSR1 saves. SIGTERM, SIGINT (Ctrl-C), SIGUSR2 (SLURM's --signal=USR2@SECONDS) and SIGHUP (the
terminal is gone) end the run after the step. A SIGHUP that was ignored when the process started, as
nohup arranges, stays ignored.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

SAVING = signal.SIGUSR1
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
HELD = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a run holds back until it can obey them: a batch system sends them at any time, and
they would end a process that has no handler yet."""


@dataclass
class Requests:
    """The requests that have reached a rank."""

    stop: signal.Signals | None = None
    """The first signal that asked the run to end."""
    save: float = 0.0
    """When a checkpoint was last asked for, in seconds of `time.monotonic`; 0: never."""

    def add(self, number: int) -> None:
        if number == SAVING:
            self.save = time.monotonic()
        else:
            self.stop = self.stop or signal.Signals(number)


def obeyed() -> tuple[signal.Signals, ...]:
    """Return the signals that make requests of this process."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return (SAVING, *(number for number in STOPPING if number not in ignored))


@contextlib.contextmanager
def stop_signals(
    ask: Callable[[signal.Signals], object], end: Callable[[], object] | None = None
) -> Iterator[None]:
    """Pass each SIGUSR1 that comes during the block to `ask`, and of every signal in `STOPPING` the
    first; none of these ends the process. A second signal of the same kind calls `end`, and then
    acts as before the block. (A batch system may send SIGUSR2 and, minutes later, SIGTERM.)"""
    asked: set[int] = set()

    def receive(number: int, frame: FrameType | None) -> None:
        if number == SAVING or number not in asked:
            asked.add(number)
            ask(signal.Signals(number))
            return
        if end is not None:
            end()
        restore()
        signal.raise_signal(number)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, receive) for number in obeyed()}
    try:
        yield
    finally:
        restore()


def hold_signals() -> None:
    """Hold back the signals of `HELD` from now on, in this thread and in the threads and processes
    that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


@contextlib.contextmanager
def receiving_signals() -> Iterator[None]:
    """Receive in the block the signals of `HELD`, also those that came before it."""
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
