"""Keeps a checkpoint readable while its run may be training and deleting older checkpoints.

Its files are hard-linked into a folder `.held-*` of the run directory, which is removed after
reading: if the run deletes the checkpoint, the links remain. A folder left by a killed reader is
recognized by its lock, which no process holds any more; the next reader removes it. Where files
cannot be linked (a read-only disk, a file system without links) the checkpoint is read in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lather.errors import CheckpointError

PREFIX = ".held-"
YOUNG = 60.0
"""Seconds for which a new folder is not removed: its creator may be about to lock it."""
ATTEMPTS = 100
"""Maximal number of attempts: a run may delete the chosen checkpoint because it has saved another,
but not many times in a row."""


@contextlib.contextmanager
def held_checkpoint(run: Path, choose: Callable[[], Path]) -> Iterator[Path]:
    """Yield the checkpoint that `choose` returns, in a place where it stays until the block ends.
    `choose` may be called again.

    Raises what `choose` raises. Errors of the block that name the temporary place name the
    checkpoint instead.
    """
    _clear_abandoned(run)
    with contextlib.ExitStack() as cleanup:
        holder = _hold(run, cleanup)
        chosen, held = (None, choose()) if holder is None else _link(holder, choose)
        try:
            yield held
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(held), str(chosen or held))) from None


def _hold(run: Path, cleanup: contextlib.ExitStack) -> Path | None:
    """Create a folder in the run directory and lock it until the stack is closed; None if that is
    not possible."""
    try:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=run, ignore_cleanup_errors=True)
        holder = Path(cleanup.enter_context(folder))
        lock = os.open(holder, os.O_RDONLY)
        cleanup.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return None
    return holder


def _link(holder: Path, choose: Callable[[], Path]) -> tuple[Path, Path]:
    """Return the checkpoint and the folder with its links; the checkpoint twice if files cannot be
    linked."""
    for _ in range(ATTEMPTS):
        chosen = choose()
        held = holder / chosen.name
        try:
            held.mkdir()
            for file in chosen.iterdir():
                os.link(file, held / file.name)
            return chosen, held
        except FileNotFoundError:
            shutil.rmtree(held, ignore_errors=True)
        except OSError:
            return chosen, chosen
    raise CheckpointError(
        f"{chosen}: was deleted by its run before it could be read: make checkpoint.keep_last "
        "larger"
    )


def _clear_abandoned(run: Path) -> None:
    for folder in run.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < YOUNG:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
