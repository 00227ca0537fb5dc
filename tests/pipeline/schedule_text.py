"""Writes a schedule's table as text, and reads it back, for tests that change it by hand."""

from __future__ import annotations

import re

from lather.pipeline.schedule import Action, Schedule


def to_text(table: Schedule) -> str:
    """Write a line with the sizes; then, for every rank, its actions in order."""
    lines = [
        f"{table.num_ranks} ranks, {table.num_stages} stages, {table.num_micro_batches} "
        "micro-batches"
    ]
    lines += [
        f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(table.ranks)
    ]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Schedule:
    """Return the table that `to_text` wrote. Raises ValueError for a table that is not one."""
    head, *rest = re.split(r"^rank \d+:", text, flags=re.MULTILINE)
    sizes = re.fullmatch(r"(\d+) ranks, (\d+) stages, (\d+) micro-batches\s*", head)
    assert sizes is not None
    assert int(sizes[1]) == len(rest)
    return Schedule(
        int(sizes[2]),
        int(sizes[3]),
        tuple(tuple(map(Action.from_text, line.split())) for line in rest),
    )
