"""`lather train CONFIG [overrides]`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from rich.console import Console

from lather.commands.parsing import parse_arguments
from lather.errors import ConfigError
from lather.train.config import Config
from lather.train.config_file import load_config
from lather.train.display import LiveDisplay, PlainDisplay
from lather.train.loop import DivergedError, StopSignal, train


def train_command(arguments: list[str]) -> int:
    """Train, or resume, the run that a TOML file describes."""
    file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if file is None and not {"-h", "--help"} & set(arguments):
        raise ConfigError("lather train needs a configuration first: lather train configs/quickstart.toml")
    config = parse_arguments(Config, "lather train CONFIG", arguments, default=load_config(Path(file)) if file else Config())

    console = Console()
    display = LiveDisplay(console) if console.is_terminal else PlainDisplay(config.log.every)
    with StopSignal() as stop:
        try:
            with display:
                outcome = train(config, display, lambda: stop.received is not None)
        except DivergedError as error:
            print(f"lather: stopped: {error}", file=sys.stderr)
            return 1
        if not outcome.finished:
            print(f"stopped at step {outcome.step}; saved {outcome.checkpoint}; the same command goes on from there")
            return 130 if stop.received == signal.SIGINT else 0
    first, last = outcome.first_validation_loss, outcome.last_validation_loss
    if outcome.sample:
        print(f"\n--- sample {'-' * 69}\n{outcome.sample}\n{'-' * 80}")
    if first is not None and last is not None:
        print(f"validation loss   {first:.4f} before, {last:.4f} after {outcome.step} steps in {outcome.seconds:.0f} s of training")
    run_dir = Path(config.run_dir)
    for name, path in {
        "metrics": run_dir / "metrics.jsonl",
        "picture": run_dir / "loss.png",
        "checkpoint": outcome.checkpoint,
        "configuration": run_dir / "config.toml",
    }.items():
        if path.exists():
            print(f"{name:<17} {path}")
    return 0
