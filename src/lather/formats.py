"""The formats of runs, checkpoints, data sets and sweeps.

Each format has a number, which Lather writes into the folder. It reads the number that it writes,
and no other. A change with which folders that were written before cannot be read, or would be read
otherwise, raises the number, and names the last commit that reads the number before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lather.errors import CheckpointError, DataError, RunError, UserError


@dataclass(frozen=True)
class Format:
    """The format of one kind of folder."""

    noun: str
    error: type[UserError]
    """Error that refuses another format."""
    number: int
    """Number that is written and read."""
    readers: Mapping[int, str]
    """Commit that reads each earlier number."""

    def check(self, number: object, place: Path) -> None:
        """Raise `error` unless `number`, which the folder or file `place` has, is that of the
        format."""
        if number == self.number:
            return
        if not isinstance(number, int) or number < 1:
            raise self.error(
                f"{place}: damaged: the format of a {self.noun} is {number!r}, and must be "
                f"{self.number}: restore it"
            )
        remedy = (
            "use the Lather that wrote it, or a newer one"
            if number > self.number
            else f"make a new one, or use git checkout {self.readers[number]}, which reads it"
        )
        raise self.error(
            f"{place}: a {self.noun} of format {number}; this Lather reads format {self.number}: "
            f"{remedy}"
        )


RUN = Format("run", RunError, 3, {1: "997cd98", 2: "e76cf6d"})
"""Runs of format 1 have no number; in those of format 2 the rest inherits `optim.keep_norm`."""
CHECKPOINT = Format("checkpoint", CheckpointError, 3, {1: "33c12d5", 2: "d5aa885"})
DATA_SET = Format("data set", DataError, 3, {1: "997cd98", 2: "997cd98"})
SWEEP = Format("sweep", RunError, 1, {})
