"""The place in the code where a rank's main thread is, as another thread of the rank sees it: for
the message on a rank that makes no progress.

The step and the action of the pipeline are read from variables of the functions that run them, so
that nothing has to be written down while training.
"""

from __future__ import annotations

import linecache
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

STEP = ("loop.py", "_train_step")
VARIABLES = {
    STEP: ("step", "number"),
    ("executor.py", "run"): ("action",) * 2,
}
"""File and function -> the name of what it runs, and the variable that holds it."""


@dataclass(frozen=True)
class Whereabouts:
    """The place of a rank."""

    text: str
    """Step, action, file, line and function, as far as they are known."""
    waits: bool
    """Whether it waits for another rank."""


def whereabouts() -> Whereabouts:
    """Return the place of this process's main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list[FrameType]()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    running, place = list[str](), ""
    for frame in frames:
        file, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        name, variable = VARIABLES.get((file.name, function), ("", ""))
        if name and variable in frame.f_locals:
            running.insert(0, f"{name} {frame.f_locals[variable]}")
        if not place and "torch" not in file.parts and not _reads_devices(file):
            place = f"{file.name}, line {frame.f_lineno}, in {function}"
    return Whereabouts(", ".join([*running, place]), waits=bool(frames) and _waits(frames[0]))


def _waits(innermost: FrameType) -> bool:
    """Return whether a function waits for another rank: it is one of torch's collectives, calls
    `wait`, or waits for a GPU, whose queue may hold a collective."""
    file = Path(innermost.f_code.co_filename)
    line = linecache.getline(str(file), innermost.f_lineno)
    parts = {*file.parts}
    is_torch = "torch" in parts and not parts.isdisjoint(("distributed", "cuda"))
    return is_torch or _reads_devices(file) or ".wait(" in line


def _reads_devices(file: Path) -> bool:
    """Return whether this is the file by which values of devices are read."""
    return file.parts[-2:] == ("lather", "device.py")


class Standstill:
    """Notices that the main thread stays in one call of a training step, seen from another thread.

    Nothing says so where a rank waits for a GPU: NCCL's own watchdog ends the process without
    naming a rank."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long the call may take."""
        self._seconds = seconds
        self._call: tuple[int, int] | None = None
        self._since = 0.0

    def is_reached(self, now: float) -> bool:
        """Look at the main thread at the time `now`, in seconds; return whether it has been in the
        same call for too long."""
        frame = innermost = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and not _is_step(frame):
            frame = frame.f_back
        call = (id(innermost), innermost.f_lasti) if frame and innermost else None
        if call != self._call:
            self._call, self._since = call, now
        return call is not None and now - self._since >= self._seconds


def _is_step(frame: FrameType) -> bool:
    return (Path(frame.f_code.co_filename).name, frame.f_code.co_name) == STEP
