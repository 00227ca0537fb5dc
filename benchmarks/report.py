"""Writes the rows of benchmarks: JSON with commit, hardware and versions, in a file that appears
whole."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import lather
from benchmarks.check import CheckError
from lather.device import is_gpu
from lather.doctor.rates import processor_name
from lather.errors import UserError
from lather.version import find_commit

Row = dict[str, Any]


def environment(device: torch.device, peers: Sequence[str]) -> Row:
    """The part that all rows of a run share: commit, hardware, versions."""
    return {
        **_commit(),
        "hardware": {
            "cpu": processor_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name(device) if is_gpu(device) else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lather": lather.__version__,
            **{peer: _version(peer) for peer in peers},
        },
    }


def _commit() -> Row:
    """The commit, and whether the measured code differs from it (`dirty`). Both are null if the
    commit is not known."""
    commit, _, dirty = (find_commit() or "").partition("-")
    return {"commit": commit or None, "dirty": bool(dirty) if commit else None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class RowFile:
    """A file of rows: they are written beside it as they come, and take the place of the last run's
    file at the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.aside = path, path.with_suffix(".partial.jsonl")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.aside.write_text("")
        except OSError as error:
            raise UserError(
                f"{path.parent}: cannot be written ({error.strerror}): give another --out"
            ) from None

    def write(self, rows: Iterable[Row]) -> None:
        with self.aside.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def finish(self) -> None:
        os.replace(self.aside, self.path)

    def discard(self) -> None:
        self.aside.unlink()


def gather(rows: Iterable[Row], common: Row, file: RowFile, console: Console) -> list[Row]:
    """Write the rows as they come, each with `common`, and return them. If a check fails, say so,
    leave no file and return none."""
    written: list[Row] = []
    try:
        for row in rows:
            written.append({**common, **row})
            file.write(written[-1:])
    except CheckError as error:
        file.discard()
        console.print(f"check failed, nothing is reported: {error}", style="red", highlight=False)
        return []
    file.finish()
    return written
