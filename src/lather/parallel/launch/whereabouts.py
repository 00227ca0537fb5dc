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

VARIABLES = {
    ("loop.py", "_train_step"): ("step", "number"),
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
        if not place and "torch" not in file.parts:
            place = f"{file.name}, line {frame.f_lineno}, in {function}"
    return Whereabouts(", ".join([*running, place]), waits=bool(frames) and _waits(frames[0]))


def _waits(innermost: FrameType) -> bool:
    """Return whether a function waits for another rank: it is one of torch's collectives, or calls
    `wait`."""
    file = innermost.f_code.co_filename
    line = linecache.getline(file, innermost.f_lineno)
    return {"torch", "distributed"} <= {*Path(file).parts} or ".wait(" in line
