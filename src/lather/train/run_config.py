"""The configuration that a run has written into its folder, as it applies where the run is now.

The file, or the folder, given to a command means that run. Relative paths in it begin at the folder
in which the run was started: the current folder if `run_dir` leads from there to the run, or else
the path of the run without `run_dir` at its end. In a run that was moved or renamed they begin at
the current folder. The checksums of the data sets tell whether the data are the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lather.checkpoint.folder import find_checkpoint, list_checkpoints, step_of
from lather.config.config import Config
from lather.config.run_folder import CONFIGURATION, PROVENANCE
from lather.config.toml_file import folder_of, load_run
from lather.data.config import DataConfig
from lather.errors import ConfigError, UserError


def configuration_file(argument: str, command: str) -> Path:
    """Return the configuration file that `argument` names: the file itself, or the config.toml of a
    run's folder.

    Raises ConfigError for another folder, and for a checkpoint.
    """
    path = Path(argument)
    if path.is_file() or (path / CONFIGURATION).is_file():
        return path if path.is_file() else path / CONFIGURATION
    try:
        run, checkpoint = find_checkpoint(argument)
    except UserError:
        if path.is_dir():
            raise ConfigError(
                f"{argument}: cannot be read (a folder without {CONFIGURATION}): give a TOML file, "
                "or the folder of a run"
            ) from None
        return path
    raise ConfigError(
        f"{argument}: a checkpoint, not a configuration: lather {command} {run} takes the run with "
        "its newest one; "
        f"lather train {run} --fork-from {run}@{step_of(checkpoint)} --run-dir NEW continues from "
        "this one in another folder"
    )


def run_of(file: Path) -> Path | None:
    """Return the folder of the run that has written `file`, also where the path leads through
    links; None for any other file."""
    # first by the path itself: the folder of runs may be a link
    for path in (file, Path(os.path.realpath(file))):
        folder = path.parent
        is_run = any((folder / name).exists() for name in (PROVENANCE, ".lock", "checkpoints"))
        if is_run and path.name == CONFIGURATION and path.is_file():
            return folder if folder.name not in ("", "..") else Path(os.path.abspath(folder))
    return None


def current_config(run: Path) -> Config:
    """Read the configuration of a run, with the run's folder as `run_dir`, with paths that lead
    from the current folder, and without the limit of `train.minutes`, which was that of an earlier
    launch. Raises ConfigError and RunError as `load_run` does."""
    config = load_run(run)
    config = replace(config, train=replace(config.train, minutes=0.0))
    if _is_same(Path(config.run_dir), run):
        return config
    config = _with_paths_from(_start_folder(config, run), config)
    return replace(config, run_dir=os.path.abspath(run))


def check_data_is_named(run: Path, arguments: Sequence[str], config: Config) -> None:
    """Raise ConfigError if the command would train an imported run in its folder on the default
    text, which nobody has named.

    `arguments`: the command line; `config`: its configuration.
    """
    is_imported = bool(list_checkpoints(run / "checkpoints")) and not (run / PROVENANCE).exists()
    is_default = not config.data.path and config.data.source == DataConfig().source
    is_named = not is_default or any(word.startswith("--data.source") for word in arguments)
    if is_imported and not is_named and _is_same(Path(config.run_dir), run):
        raise ConfigError(
            f"{run} was imported, and its configuration names no data: give --data.path or "
            "--data.source to train it in its own folder, "
            f"or also --init-from {run} --run-dir NEW to keep it as it is"
        )


def _is_same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()


def _start_folder(config: Config, run: Path) -> Path:
    """Return the folder at which relative paths of a run's configuration begin."""
    parts = Path(os.path.normpath(config.run_dir)).parts
    for place in (Path(os.path.abspath(run)), run.resolve()):
        if place.parts[-len(parts) :] == parts:
            return Path(*place.parts[: -len(parts)])
    return Path.cwd()


def _with_paths_from(folder: Path, config: Config) -> Config:
    """Return the configuration with those relative paths made absolute that lead to something from
    `folder`."""

    def absolute(path: str) -> str:
        return str(folder / path) if path and (folder / path).exists() else path

    data, weights = config.data, config.init_from
    has_weights = weights and (folder / folder_of(weights)).exists()
    return replace(
        config,
        init_from=str(folder / weights) if has_weights else weights,
        data=replace(
            data,
            path=tuple(map(absolute, data.path)),
            validation={name: absolute(path) for name, path in data.validation.items()},
            source=absolute(data.source),
            tokenizer=absolute(data.tokenizer),
            cache_dir=absolute(data.cache_dir),
        ),
    )
