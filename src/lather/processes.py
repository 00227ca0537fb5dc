"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End this process, which multiprocessing has started, once its parent is gone: the kernel closes the parent's end of a pipe then.

    A thread waits for that beside whatever this process does, and ends it also in the middle of a collective operation.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="lather-parent", daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
