"""`lather sweep CONFIG --vary FIELD=VALUE,VALUE ... [--seeds N] [--jobs N] [overrides]`: trains a
grid of runs and says which is best."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from lather.argument import Argument
from lather.checkpoint.folder import find_checkpoint, step_of
from lather.commands.parsing import Line, name_of_option, read_line
from lather.commands.train import check_config
from lather.commands.with_config import parse_with_config
from lather.config.config import Config
from lather.config.fields import fields_of
from lather.config.toml_file import folder_of, read_values
from lather.console import command_console
from lather.data.dataset import DataSet
from lather.data.hub_files import pinned_data
from lather.engine.step import pick_device
from lather.errors import ConfigError, DataError, UserError, require
from lather.files import lock_folder
from lather.hub import CONFIG_FILE
from lather.output import surviving_output
from lather.parallel.launch.world import World
from lather.sweep.grid import LEFT_OUT, GridRun, Values, grid, read_varied, words_for, words_of
from lather.sweep.record import (
    SweepData,
    SweepFolder,
    check_same,
    check_same_data,
    origin_of,
)
from lather.sweep.results import AVERAGES, Weights
from lather.sweep.work import SweepWork
from lather.train.initial_weights import find_weights
from lather.train.run_config import configuration_file
from lather.train.run_dir import open_run_data
from lather.train.start import fork_source, is_fork_of


@dataclass(frozen=True)
class SweepArguments:
    """Train every combination of the values of --vary with every seed, each as a run in a folder of
    its own, and show their validation losses, best first. The same command goes on after a stop or
    a kill; with further values or seeds it adds their runs."""

    config: Annotated[Config, Argument(inline=True)] = field(default_factory=Config)
    vary: Annotated[tuple[str, ...], Argument(repeated=True, metavar="FIELD=VALUE,VALUE")] = ()
    """Field of the configuration and its values, such as optim.lr=5e-3,1e-2. May be given several
    times, for several fields."""
    seeds: int = 1
    """Runs of each combination, with the seeds from --seed on; two or more give intervals."""
    jobs: int = 1
    """Runs at a time. They divide the cores; GPUs are given to them in turn."""
    nproc: int = 1
    """Ranks of each run on this machine."""
    weights: Weights = "raw"
    """Weights whose validation losses count: raw, or the averages of runs that have
    train.average_timescale."""
    out: Path | None = None
    """Folder of the sweep. Left out: runs/sweeps/NAME for a configuration NAME.toml."""

    def __post_init__(self) -> None:
        require(self.seeds >= 1, "--seeds", self.seeds, "at least 1")
        require(self.jobs >= 1, "--jobs", self.jobs, "at least 1")
        require(self.nproc >= 1, "--nproc", self.nproc, "at least 1")


OWN = tuple(set(fields_of(SweepArguments)) - {"config"})


def sweep_command(arguments: list[str]) -> int:
    """Make the runs that are missing, and show the results. Returns 1 if a run has not come to its
    end, 130 if the sweep was stopped."""
    line = read_line(arguments)
    if not arguments or arguments[0].startswith("-") or "--help" in dict(line):
        parse_with_config(SweepArguments, "sweep", arguments)  # shows the help, or refuses
    if World.of_environment(os.environ) is not None:
        raise ConfigError(
            "lather sweep starts the ranks of its runs itself: call it without torchrun or srun, "
            "and give --nproc"
        )
    varied = _varied(line)
    named = {name for name, values in varied.items() if len(values) > 1}
    parse = partial(_parse, arguments, _values_of_file(arguments[0], line), named)
    options, name = parse({name: values[0] for name, values in varied.items()})
    folder = SweepFolder(options.out or Path("runs/sweeps") / name)
    listed = folder.runs(list(varied))
    data = listed[0].config.data if listed else None

    def configure(values: Values) -> Config:
        nonlocal data  # a source on a hub has one commit in all runs
        config = parse(values)[0].config
        data = pinned_data(config.data, data)
        same = (run.config for run in listed if _start_alike(run.config, config, values))
        return _with_pinned_start(replace(config, data=data), next(same, None))

    chosen = grid(varied, options.seeds, configure)
    for run in listed:
        check_same(folder.path, run, replace(configure(run.values), seed=run.config.seed))
    runs = list({run.key: run for run in (*listed, *chosen)}.values())
    keys = [run.key for run in chosen]
    for run in runs:
        is_known = options.weights == "raw" or run.config.train.average_timescale > 0
        judged = f"raw, or all runs must have {AVERAGES}, such as 0.1: {run.key} has none"
        require(is_known, "--weights", options.weights, judged)
    work = SweepWork(
        folder, runs, keys, options.jobs, options.nproc, command_console(), weights=options.weights
    )
    wanted = work.wanted()
    opened = _check(folder, list(wanted.values()), options)
    check_same_data(folder, listed, opened)
    taken = {key: opened[origin_of(run.config)] for key, run in wanted.items()}
    work.data_paths = {key: each.folders for key, each in taken.items()}
    identities = folder.data() | {key: each.identities for key, each in taken.items()}
    with lock_folder(folder.path, str(folder.path), "--out"), surviving_output():
        if folder.runs(list(varied)) != listed:
            raise UserError(f"{folder.path}: another sweep has just added runs: start again")
        folder.list_runs(runs, identities)
        finished = work.work()
    return int(bool(work.failures)) if finished else 130


def _varied(line: Line) -> dict[str, list[str]]:
    """Read the values of --vary. Raises ConfigError for a field that cannot be varied, or that has
    a value beside."""
    varied = read_varied([words[0] for option, words in line if option == "--vary" and words])
    for option, _ in line:
        name = name_of_option(option)
        if name in varied:
            raise ConfigError(f"{option} and --vary {name} are both given: leave one of them out")
        if name == "run_dir":
            raise ConfigError(f"{option}: {LEFT_OUT[name]}: give --out")
    for name in varied:
        if name in OWN:
            raise ConfigError(f"--vary {name}: not a field of the configuration")
    return varied


def _values_of_file(file: str, line: Line) -> dict[str, Any]:
    """Return the values of the configuration file into which those of the command line fit."""
    named = {name_of_option(option): "".join(words) for option, words in line if option}
    return read_values(configuration_file(file, "sweep"), named)


def _parse(
    arguments: list[str], base: Mapping[str, Any], named: Collection[str], values: Values
) -> tuple[SweepArguments, str]:
    """Return the arguments with these values of the fields that are varied, and the name of the
    configuration. Raises ConfigError, which says the values of the fields `named`."""
    try:
        words = words_of(values, base)
        return parse_with_config(SweepArguments, "sweep", [*arguments, *words])
    except UserError as error:
        told = words_for({name: values[name] for name in values if name in named})
        raise ConfigError(f"{error} (with {told})" if told else str(error)) from None


def _start_alike(listed: Config, config: Config, varied: Collection[str]) -> bool:
    """Return whether a configuration may mean the checkpoints of a listed run, as far as they are
    varied."""
    fields = [name for name in ("init_from", "fork_from") if name in varied]
    pairs = [(getattr(listed, field), getattr(config, field)) for field in fields]
    return all(before == name or is_fork_of(before, name) for before, name in pairs)


def _with_pinned_start(config: Config, listed: Config | None) -> Config:
    """Return the configuration with the checkpoints that `init_from` and `fork_from` mean at the
    first start of the sweep: those of a run that is `listed` already, or else those of today. Their
    runs may save others while the sweep trains."""

    def pinned(name: str, before: str) -> str:
        if name and (name == before or is_fork_of(before, name)):
            return before
        if not name or (folder_of(name) / CONFIG_FILE).is_file():  # that of Hugging Face
            return name
        try:
            run, checkpoint = find_checkpoint(name)
        except UserError:  # a model of a hub, or it will be refused
            return name
        return f"{run}@{step_of(checkpoint)}"

    before = listed or Config()
    return replace(
        config,
        init_from=pinned(config.init_from, before.init_from),
        fork_from=pinned(config.fork_from, before.fork_from),
    )


def _check(
    folder: SweepFolder, runs: Sequence[GridRun], options: SweepArguments
) -> dict[str, SweepData]:
    """Return the data sets of these runs, by their origin. Raises UserError for anything that would
    be refused when one of the runs starts."""
    opened: dict[str, SweepData] = {}
    checked = set()
    for run in runs:
        config = replace(run.config, run_dir=str(folder.run_dir(run)))
        pick_device(config.train.device)
        try:
            check_config(config, options.nproc)
            if config.fork_from and options.seeds > 1:
                require(False, "--seeds", options.seeds, "1 with fork_from, which fixes the seed")
            fork_source(folder.run_dir(run), config)
            if config.init_from:
                find_weights(config)
            origin = origin_of(config)
            if (origin, config.train.sequence_length) not in checked:
                opened[origin] = _open_data(config)
            checked.add((origin, config.train.sequence_length))
        except UserError as error:
            raise ConfigError(f"{error} (in run {run.key})") from None
    return opened


def _open_data(config: Config) -> SweepData:
    """Open the data sets of a run. Raises DataError if they do not fit it."""
    data = open_run_data(config, print)
    if not data.held_out:
        raise DataError("a sweep compares validation losses, and the data hold none out")
    held_out = [DataSet(Path(folder)) for folder in config.data.validation.values()]
    identities = [*data.identities.values(), *(each.manifest.identity for each in held_out)]
    # a data set may be there twice, with a weight each time
    return SweepData(config.data.path or tuple(data.identities), identities)
