"""The folder of a run, the name of the configuration in it, and the check of its format."""

from __future__ import annotations

import tomllib
from pathlib import Path

from lather.files import read_text
from lather.formats import RUN

CONFIGURATION = "config.toml"
PROVENANCE = "provenance.json"


def run_folder(path: Path) -> Path:
    """Return the folder of the run that `path` names: itself, or that of the config.toml that it
    is."""
    return path.parent if path.name == CONFIGURATION and path.is_file() else path


def check_format(run: Path) -> None:
    """Raise RunError if the folder holds a run of another format than that which is read.

    A config.toml without a number, beside neither checkpoints nor the record of a start, is a
    configuration that somebody wrote there.
    """
    try:
        number = tomllib.loads(read_text(run / CONFIGURATION)).get("format")
    except (OSError, ValueError):
        return  # who reads the configuration says why it cannot be read
    is_a_run = (run / PROVENANCE).exists() or any(run.glob("checkpoints/step-*"))
    if number is not None or is_a_run:
        RUN.check(1 if number is None else number, run)
