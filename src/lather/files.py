"""Files that are replaced atomically, and files of rows with one JSON object per line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lather.errors import RunError


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_aside(path: Path, text: str) -> None:
    """Replace the file atomically."""
    aside = path.with_name(f".tmp-{path.name}")
    aside.write_text(text, "utf-8")
    sync(aside)
    aside.rename(path)
    sync(path.parent)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file such as `metrics.jsonl`; an incomplete last line, left by a killed process, is skipped.

    Raises RunError, with file and line number, for any other line that is not a row.
    """
    if not path.exists():
        return []
    rows = []
    lines = path.read_text("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                row = json.loads(line)
                row["step"] = int(row["step"])
                rows.append(row)
        except (ValueError, KeyError, TypeError, OverflowError):
            if number < len(lines):
                raise RunError(
                    f"{path}, line {number}: not a row of metrics: restore the file, or start again in another run directory"
                ) from None
    return rows
