"""Tells when the steps of a run have become several times slower than they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

import torch

from lather.cores import num_cores, other_programs

SLOWER = 3.0
"""Times the median of the steps before, from which on a step counts as slow."""
IN_A_ROW = 5
"""Slow steps in a row, so that a refresh, a checkpoint or a moment of other work is not told."""
COMPARED = 200
"""Steps at most whose median is taken."""


class Pace:
    """Watches the times of the steps of one launch, and tells once that they have become slow."""

    def __init__(self, note: Callable[[str], None], on_cpu: bool, ranks: int = 1) -> None:
        """`on_cpu`: the steps are computed on the CPU. `ranks`: ranks of the run."""
        self._note, self._on_cpu, self._ranks = note, on_cpu, ranks
        self._before: deque[float] = deque(maxlen=COMPARED)
        self._slow: list[float] = []
        self._is_told = False

    def begin(self) -> None:
        """Tell of other programs that want this run's cores at the start: all its steps are
        slow."""
        others = other_programs(self._ranks) if self._on_cpu else 0
        if others and others + self._ranks * torch.get_num_threads() > num_cores():
            self._note(f"{_programs(others)}: steps take longer than they would alone")

    def saw(self, seconds: float) -> None:
        """Take the time of a step."""
        if self._is_told:
            return
        usual = median(self._before) if len(self._before) >= IN_A_ROW else seconds
        if seconds <= SLOWER * usual:
            self._before.extend([*self._slow, seconds])
            self._slow = []
            return
        self._slow.append(seconds)
        if len(self._slow) == IN_A_ROW:
            self._is_told = True
            self._note(
                f"the last {IN_A_ROW} steps took {median(self._slow):.2g} s each, "
                f"{median(self._slow) / usual:.1f} times as long as those before ({usual:.2g} s): "
                + self._remedy()
            )

    def _remedy(self) -> str:
        if self._on_cpu and (others := other_programs(self._ranks)):
            return (
                f"{_programs(others)}: end them, or stop this run (Ctrl-C saves it) and start it "
                "again, which lets its threads wait less for each other"
            )
        return "lather doctor shows whether memory, disk, devices and links are well"


def _programs(others: int) -> str:
    """Say how many threads of other programs run, and how many cores they share with this one."""
    cores = num_cores()
    return (
        f"other programs run on this machine ({others}, with {cores} "
        f"core{'' if cores == 1 else 's'} for this run)"
    )
