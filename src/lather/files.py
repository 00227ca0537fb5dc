"""Files that are whole or absent, whatever ends the process."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have the file's contents, or the folder's entries, on disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_aside(path: Path, text: str) -> None:
    """Replace the file in one go."""
    aside = path.with_name(f".tmp-{path.name}")
    aside.write_text(text, "utf-8")
    sync(aside)
    aside.rename(path)
    sync(path.parent)
