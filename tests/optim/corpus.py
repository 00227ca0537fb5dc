"""Files of recorded answers: an entry is lines of Python and, indented, what the last one gives.
Lines that begin with # are comments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

INDENT = "    "


class Recorded(NamedTuple):
    """An entry of a file."""

    setup: str
    call: str
    answer: str

    def __str__(self) -> str:
        return f"{self.setup} {self.call}".strip()


def entries(text: str) -> Iterator[Recorded]:
    """Yield the entries of a text. An entry that has no answer yet ends before a blank line."""
    for block in text.split("\n\n"):
        lines: list[str] = []
        for line in [*block.splitlines(), INDENT]:
            if line.startswith(INDENT) and lines:
                yield Recorded("\n".join(lines[:-1]), lines[-1], line.strip())
                lines = []
            elif not line.startswith(("#", INDENT)):
                lines.append(line)


def record(file: Path, answer_to: Callable[[Recorded], str]) -> None:
    """Write the answers of now into a file."""
    blocks = []
    for block in file.read_text("utf-8").rstrip("\n").split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("#")]
        for one in entries(block):
            lines += [*one.setup.splitlines(), one.call, INDENT + answer_to(one)]
        blocks.append("\n".join(lines))
    file.write_text("\n\n".join(blocks) + "\n", "utf-8")
