"""The folder of a run, and the name of the configuration in it."""

from __future__ import annotations

from pathlib import Path

CONFIGURATION = "config.toml"


def run_folder(path: Path) -> Path:
    """Return the folder of the run that `path` names: itself, or that of the config.toml that it
    is."""
    return path.parent if path.name == CONFIGURATION and path.is_file() else path
