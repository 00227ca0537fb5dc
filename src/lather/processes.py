"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End this process, which multiprocessing has started, once its parent is gone: the kernel
    closes the parent's end of a pipe then.

    A thread waits for that beside whatever this process does, and ends it also in the middle of a
    collective operation.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(
            target=_end_after, args=(parent.sentinel,), name="lather-parent", daemon=True
        ).start()


@contextlib.contextmanager
def without_signals() -> Iterator[None]:
    """Start processes in the block that never receive SIGUSR1, SIGUSR2 and SIGHUP: a batch system
    or a terminal sends these to all processes of a job, and they are for its run."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
