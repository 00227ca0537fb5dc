"""A checkpoint that stays while it is read, of a run that may be training and deleting older ones meanwhile.

Its files get a second name (a hard link) in a folder `.held-*` of the run directory, which goes when the reading is done: what the run
deletes is then gone for the run alone. A folder that a killed reader has left is known by its lock, which nobody holds any more; the next
reader clears it. Where nothing can be linked (a read-only disk, a file system without links) the checkpoint is read where it is.
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
"""A folder that is no older, seconds, is left alone: whoever has made it may be about to lock it."""
ATTEMPTS = 100
"""A run deletes a checkpoint when it has made another: what was chosen may be gone, but not many times in a row."""


@contextlib.contextmanager
def held_checkpoint(run: Path, choose: Callable[[], Path]) -> Iterator[Path]:
    """The checkpoint of the run that `choose` names, in a place where it stays until the block ends. `choose` may be asked again.

    Raises what `choose` raises; errors of the block that name the place name the checkpoint instead.
    """
    _clear_abandoned(run)
    try:
        holder, lock = _hold(run)
    except OSError:
        yield choose()
        return
    try:
        chosen, held = _link(holder, choose)
        try:
            yield held
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(held), str(chosen))) from None
    finally:
        shutil.rmtree(holder, ignore_errors=True)
        os.close(lock)


def _hold(run: Path) -> tuple[Path, int]:
    """A new folder in the run directory, and the descriptor that holds its lock."""
    holder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=run))
    lock = -1
    try:
        lock = os.open(holder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        if lock >= 0:
            os.close(lock)
        shutil.rmtree(holder, ignore_errors=True)
        raise
    return holder, lock


def _link(holder: Path, choose: Callable[[], Path]) -> tuple[Path, Path]:
    """The checkpoint, and its second place; twice its own where there are no links."""
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
    raise CheckpointError(f"{chosen}: was deleted by its run before it could be read: make checkpoint.keep_last larger")


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
