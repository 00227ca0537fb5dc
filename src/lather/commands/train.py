"""`lather train CONFIG [--nproc N] [overrides]`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from lather.commands.with_config import parse_with_config
from lather.config.config import Config
from lather.config.ranks import check_parallel
from lather.console import command_console, is_live
from lather.durations import duration
from lather.engine.qk_clip import check_qk_clip
from lather.engine.step import pick_device
from lather.engine.trained_parameters import check_finetuning
from lather.errors import ConfigError, UserError
from lather.lines import fit, rule
from lather.output import surviving_output
from lather.parallel.launch.lifeline import UNWIND_SECONDS
from lather.parallel.launch.requests import Requests, receiving_signals, stop_signals
from lather.parallel.launch.start import GroupOptions, run_ranks, take_nproc
from lather.parallel.launch.world import World
from lather.parallel.mesh import Mesh
from lather.train.display import LiveDisplay, PlainDisplay
from lather.train.diverged import DivergedError
from lather.train.loop import train
from lather.train.outcome import RunOutcome
from lather.train.requests import RunRequests
from lather.train.run_config import (
    check_data_is_named,
    configuration_file,
    run_of,
)

ABOUT = """\
Train, or resume, the run that a TOML file describes, for example

  lather train configs/quickstart.toml --train.steps 500

With --init-from FOLDER the file may be left out: the model is then the folder's.
A run's folder, or the config.toml in it, resumes that run.

  --nproc N  Start N ranks on this machine, or with "gpu" one for each CUDA device, and let them \
share the work as [parallel] says. torchrun and srun start ranks on several machines, without \
--nproc."""

STOPPING_NOTE = "stopping: the step is finished and saved first; Ctrl-C again ends at once"
ENDED_NOTE = b"\nlather: ended at once, not saved; the last checkpoint, if any, can be resumed\n"


def train_command(arguments: list[str], started: float | None = None) -> int:
    """Train or resume the run that a TOML file describes, in this process or in several."""
    # a command knows it from before torch was imported
    started = time.monotonic() if started is None else started
    world = World.of_environment(os.environ)
    with surviving_output():
        try:
            config, nproc = read_arguments(arguments, world)
            check_config(config, world.size if world else nproc or 1)
            options = GroupOptions(pick_device(config.train.device), config.parallel.timeout)
            _check_data(arguments, config)
            return run_ranks(run_worker, (config, started), world, nproc, options)
        except UserError:
            if world is None or world.local_rank == 0:
                raise
            # Local rank 0 prints the error; if another rank exited first, torchrun would end rank 0
            # before it does.
            time.sleep(UNWIND_SECONDS)
            return 2


def check_config(config: Config, world_size: int) -> None:
    """Raise ConfigError unless `world_size` ranks can run `config`."""
    check_parallel(config, world_size)
    check_finetuning(config)
    check_qk_clip(config)


def read_arguments(arguments: list[str], world: World | None = None) -> tuple[Config, int | None]:
    """Return the configuration of the command line, and `--nproc`."""
    arguments, nproc = take_nproc(arguments, world)
    without_file = not arguments or arguments[0].startswith("-")
    enough = ("-h", "--help", "--init-from", "--init_from")
    if without_file and not any(word.startswith(enough) for word in arguments):
        raise ConfigError(
            "lather train needs a configuration first, or weights to start from: lather train "
            "configs/quickstart.toml, lather train --init-from FOLDER_OR_RUN"
        )
    config, _ = parse_with_config(Config, "train", arguments, ABOUT, needs_file=False)
    return config, nproc


def _check_data(arguments: list[str], config: Config) -> None:
    """Raise ConfigError if an imported run would be trained without data."""
    rest, _ = take_nproc(arguments)
    file = None if rest[0].startswith("-") else configuration_file(rest[0], "train")
    run = run_of(file) if file else None
    if run:
        check_data_is_named(run, arguments, config)


def run_worker(config: Config, started: float, world: World) -> int:
    """Run one rank of the training; only rank 0 prints. Returns the exit status, which is the same
    on all ranks. `started`: when the command started, in seconds of `time.monotonic`."""
    check_parallel(config, world.size)
    device = world.device(pick_device(config.train.device))
    mesh = Mesh.build(config.parallel, device)
    requests, shown = world.requests or Requests(), _display(config, world)

    def ask(number: signal.Signals) -> None:
        requests.add(number)
        if number == signal.SIGINT and isinstance(shown, LiveDisplay):
            # in a thread: the handler may have interrupted the display, which holds a lock then
            threading.Thread(target=shown.note, args=(STOPPING_NOTE,), daemon=True).start()

    of_run = RunRequests(lambda: requests.stop is not None, lambda: requests.save, started)
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(surviving_output())
        if world.requests is None:
            cleanup.enter_context(stop_signals(ask, _say_ended))
            cleanup.enter_context(receiving_signals())
        try:
            with shown as display:
                outcome = train(config, display, of_run, mesh)
        except DivergedError as error:
            if world.rank == 0:
                print(f"lather: stopped: {error}", file=sys.stderr)
            return 1
        if world.rank == 0:
            _report(config, outcome)
        return 130 if not outcome.finished and requests.stop == signal.SIGINT else 0


def _say_ended() -> None:
    """Say that a repeated signal ends the run. This writes to the descriptor, because a signal may
    interrupt a print."""
    with contextlib.suppress(OSError):
        os.write(2, ENDED_NOTE)


def _display(config: Config, world: World) -> LiveDisplay | PlainDisplay:
    """Make the display of a rank; that of all but the first prints nothing."""
    console, plain = command_console(), PlainDisplay(config.log.every)
    plain.is_silent = world.rank != 0
    return LiveDisplay(console) if world.rank == 0 and is_live(console) else plain


def _report(config: Config, outcome: RunOutcome) -> None:
    """Print the result of a run that has ended, and its files."""
    if not outcome.finished:
        limit = f" because the {config.train.minutes:g} minutes of train.minutes are nearly over"
        why = limit if outcome.out_of_time else ""
        saved = f"saved {outcome.checkpoint}; the same command resumes from there"
        print(fit(f"stopped at step {outcome.step}{why}; {saved}"))
        return
    if outcome.sample:
        print(f"\n{rule('sample')}\n{outcome.sample}\n{rule()}")
    losses = outcome.validation_losses
    if losses and losses[0] is not None and losses[-1] is not None:
        both = f"{losses[0]:.4f} before, {losses[-1]:.4f} after"
        spent = f"{outcome.step} steps in {duration(outcome.seconds)} of training"
        print(fit(f"validation loss   {both} {spent}"))
    if outcome.average_loss is not None:
        print(
            fit(f"averaged weights  {outcome.average_loss:.4f} (lather export --weights average)")
        )
    run_dir = Path(config.run_dir)
    for name, path in {
        "metrics": run_dir / "metrics.jsonl",
        "picture": run_dir / "loss.png",
        "report": run_dir / "report.html",
        "checkpoint": outcome.checkpoint,
        "configuration": run_dir / "config.toml",
    }.items():
        if path.exists():
            print(f"{name:<17} {path}")
