"""A queue of processes, some at a time, in a folder that one queue has for itself.

The parent starts processes and looks at how they end; a signal that ends the parent ends them
first. Which jobs are left is asked again and again, so that it may follow from those that are done.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from lather.parallel.launch.requests import SAVING, obeyed

J = TypeVar("J")
POLL_SECONDS = 0.2


@dataclass
class ProcessQueue(Generic[J]):
    """Keeps `workers` processes at work."""

    workers: int
    wanted: Callable[[], Mapping[str, J]]
    """Returns the jobs that are not done, by key, in their order; also those that run."""
    start: Callable[[J, int], BaseProcess]
    """Starts the process of a job in one of the places 0 to `workers` - 1."""
    ended: Callable[[J, int | None], None]
    """Is told the exit status of a job's process; the job is not wanted any more, or started
    again."""
    watch: Callable[[], None] = lambda: None
    """Is called several times a second."""
    running: dict[str, tuple[J, int, BaseProcess]] = field(default_factory=dict)
    """Jobs with their places and processes."""

    def work(self, seconds: float = math.inf) -> bool:
        """Start jobs until none is wanted, or for about `seconds`; return whether none is."""
        end = time.monotonic() + seconds
        with _signals_as_interrupts():
            try:
                while wanted := self.wanted():
                    if time.monotonic() > end:
                        return False
                    self._start(wanted)
                    self.watch()
                    time.sleep(POLL_SECONDS)
                    self._collect()
            finally:
                self._stop()
        return True

    def _start(self, wanted: Mapping[str, J]) -> None:
        for key, job in wanted.items():
            free = set(range(self.workers)) - {place for _, place, _ in self.running.values()}
            if not free:
                return
            if key not in self.running:
                place = min(free)
                self.running[key] = job, place, self.start(job, place)

    def _collect(self) -> None:
        for key, (job, _, process) in [*self.running.items()]:
            if not process.is_alive():
                process.join()
                del self.running[key]
                self.ended(job, process.exitcode)

    def _stop(self) -> None:
        """Have the processes save and end; a second signal kills them."""
        processes = [process for _, _, process in self.running.values()]
        try:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()
        except KeyboardInterrupt:
            for process in processes:
                process.kill()
            raise
        self.running.clear()


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Let every signal that ends a run interrupt the block as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    numbers = [number for number in obeyed() if number not in (SAVING, signal.SIGINT)]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
