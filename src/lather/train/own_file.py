"""The config.toml that a run has written into its own folder, given to a command: it means that
run, wherever the run is now.

Relative paths in the file begin at the folder in which the run was started. That is the current
folder if the file's `run_dir` leads from there to the run; otherwise it is found by taking
`run_dir` off the end of the run's own path. If the run was renamed, copied or moved by itself, they
begin at the current folder if something that it reads is there, else at the nearest folder above
the run where something is. Whether it is the same, the checksums of the data sets tell.
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

STARTED = (PROVENANCE, ".lock")
"""Files by which a folder with a config.toml is known to be a run, besides its checkpoints."""


def configuration_file(argument: str, command: str) -> Path:
    """Return the configuration file that `argument` names: the file itself, or the own one of a
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
    """Return the folder of the run whose own configuration `file` is, also where the path leads
    through links; None for any other file."""
    # as it was given first: the folder of runs may be a link
    for path in (
        file,
        Path(os.path.realpath(file)),
    ):
        folder = path.parent
        known = any((folder / name).exists() for name in STARTED) or list_checkpoints(
            folder / "checkpoints"
        )
        if path.name == CONFIGURATION and path.is_file() and known:
            return folder if folder.name not in ("", "..") else Path(os.path.abspath(folder))
    return None


def load_own(run: Path) -> Config:
    """Read the configuration of a run as it applies where the run is now. Raises ConfigError and
    RunError as `load_run` does."""
    return at_home(load_run(run), run)


def at_home(config: Config, run: Path) -> Config:
    """Return the configuration that the run's own file holds, with the run's folder as `run_dir`,
    with paths that lead from the current folder, and without the limit of `train.minutes`, which
    was that of an earlier launch."""
    config = replace(config, train=replace(config.train, minutes=0.0))
    is_here, is_absolute = _is_same(Path(config.run_dir), run), os.path.isabs(config.run_dir)
    base = _base(config, run)
    if is_here and (not is_absolute or base == Path.cwd()):
        return config
    run_dir = config.run_dir if is_here else os.path.abspath(run)
    return replace(_from(base, config), run_dir=run_dir)


def describe_own(file: Path, run: Path, config: Config) -> str:
    """Say in one line which run a command trains that was given the run's own file: empty if the
    file says the same.

    `config`: the configuration of the command.
    """
    target = Path(config.run_dir)
    if not _is_same(target, run):
        is_plain = (
            not (target / CONFIGURATION).exists() and not config.init_from and not config.fork_from
        )
        more = (
            f"; to continue the training of {run}, leave out --run-dir, or add --fork-from {run}"
            if is_plain
            else ""
        )
        return f"the run in {target}, with the configuration of {run}{more}"
    written = load_run(run)
    if _is_same(Path(written.run_dir), run):
        return ""
    where = f"; relative paths in it begin at {_base(written, run)}" if _inputs(written) else ""
    return (
        f"{file} is the configuration of the run in {run}, although it "
        f"names run_dir = {written.run_dir!r}{where}"
    )


def check_data_is_named(run: Path, arguments: Sequence[str], config: Config) -> None:
    """Raise ConfigError if the command would train an imported run in its own folder on the default
    text, which nobody has named.

    `arguments`: the command line; `config`: its configuration.
    """
    is_imported = bool(list_checkpoints(run / "checkpoints")) and not (run / PROVENANCE).exists()
    is_default = not config.data.path and config.data.source == DataConfig().source
    is_named = not is_default or any(one.startswith("--data.source") for one in arguments)
    if is_imported and not is_named and _is_same(Path(config.run_dir), run):
        raise ConfigError(
            f"{run} was imported, and its configuration names no data: give --data.path or "
            "--data.source to train it in its own folder, "
            f"or also --init-from {run} --run-dir NEW to keep it as it is"
        )


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _base(config: Config, run: Path) -> Path:
    """Return the folder at which relative paths of a run's own configuration begin."""
    here, places = Path.cwd(), [Path(os.path.abspath(run)), run.resolve()]
    parts = Path(os.path.normpath(config.run_dir)).parts
    if not os.path.isabs(config.run_dir) and _is_same(Path(config.run_dir), run):
        return here
    begun = [
        Path(*place.parts[: -len(parts)])
        for place in places
        if parts and place.parts[-len(parts) :] == parts
    ]
    # not the root, where a folder data may be anybody's
    above = [folder for place in places for folder in place.parents[:-1]]
    inputs = _inputs(config) or [config.data.cache_dir]
    folders = (*begun, here, *above)
    return next(
        (folder for folder in folders if any((folder / path).exists() for path in inputs)), here
    )


def _inputs(config: Config) -> list[str]:
    """Return the relative paths that the configuration reads."""
    data, first = config.data, config.init_from
    paths = [
        *data.path,
        *data.validation.values(),
        data.source,
        data.tokenizer,
        str(folder_of(first)) if first else "",
    ]
    special = data.source == DataConfig().source or data.source.startswith(("package:", "hf:"))
    return [
        path
        for path in paths
        if path and not os.path.isabs(path) and not (special and path == data.source)
    ]


def _from(folder: Path, config: Config) -> Config:
    """Return the configuration with those relative paths made absolute that lead to something from
    `folder`."""

    def found(path: str) -> str:
        return str(folder / path) if path and (folder / path).exists() else path

    data, first = config.data, config.init_from
    return replace(
        config,
        init_from=str(folder / first) if first and (folder / folder_of(first)).exists() else first,
        data=replace(
            data,
            path=tuple(map(found, data.path)),
            validation={name: found(path) for name, path in data.validation.items()},
            source=found(data.source),
            tokenizer=found(data.tokenizer),
            cache_dir=found(data.cache_dir),
        ),
    )
