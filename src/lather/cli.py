"""The `lather` command: train, generate, plot, bench.

Every error that the user can put right is one line on standard error and exit status 2. A run that SIGTERM ends early has saved and exits
with 0; SIGINT saves too and exits with 130.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
from rich.console import Console

import lather
from lather.errors import ConfigError, UserError, require
from lather.train.checkpoint import list_checkpoints, load_checkpoint
from lather.train.config import Config, load_config
from lather.train.display import LiveDisplay, PlainDisplay
from lather.train.loop import DivergedError, StopSignal, build_model, sample_text, train
from lather.train.step import pick_device

A = TypeVar("A")

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

USAGE = """\
usage: lather COMMAND ...

  train CONFIG [--FIELD VALUE ...]   train, or resume, the run that a TOML file describes; --help shows every field
  generate RUN --prompt TEXT         continue a text with a trained model
  plot RUN [RUN ...]                 draw loss over steps and over seconds, and the time that the optimizer takes
  bench optimizer                    measure SOAP against heavyball and pytorch_optimizer (extra `bench`)

  -h, --help    --version            each command has a --help of its own
"""


@dataclass(frozen=True)
class GenerateArguments:
    """Continue a text with the newest checkpoint of a run."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory."""
    prompt: str
    """Text to continue."""
    tokens: int = 200
    """Most tokens to add."""
    temperature: float = 0.7
    """Spread of the choice; 0 always takes the most likely token."""
    top_k: int = 50
    """Choose among this many most likely tokens; 0: among all."""
    seed: int = 0
    """Fixes the choice."""


@dataclass(frozen=True)
class PlotArguments:
    """Draw one picture of one or more runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = field()
    """Run directories."""
    out: Path | None = None
    """File to write, PNG; left out: loss.png of a single run, comparison.png here for several."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a sample may hold what the terminal's encoding does not
    try:
        return _dispatch(arguments)
    except UserError as error:
        print(f"lather: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `lather ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        print(
            f"lather: stopped: {error.filename or 'a file'} cannot be written ({error.strerror}): make room, then start again",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str]) -> int:
    commands = {"train": train_command, "generate": generate_command, "plot": plot_command, "bench": bench_command}
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if arguments == ["--version"]:
        print(lather.__version__)
        return 0
    if not arguments or arguments[0] not in commands:
        given = f"unknown command {arguments[0]!r}" if arguments else "no command given"
        raise UserError(f"{given}: use one of {', '.join(commands)}, or --help")
    return commands[arguments[0]](arguments[1:])


def train_command(arguments: list[str]) -> int:
    """`lather train CONFIG [overrides]`."""
    file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if file is None and not {"-h", "--help"} & set(arguments):
        raise ConfigError("lather train needs a configuration first: lather train configs/quickstart.toml")
    config = _parse(Config, "lather train CONFIG", arguments, default=load_config(Path(file)) if file else Config())

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


def generate_command(arguments: list[str]) -> int:
    """`lather generate RUN --prompt TEXT`."""
    parsed = _parse(GenerateArguments, "lather generate", arguments)
    require(parsed.tokens >= 1, "--tokens", parsed.tokens, "at least 1")
    require(parsed.temperature == 0 or parsed.temperature >= 1e-3, "--temperature", parsed.temperature, "0 or at least 0.001")
    require(0 <= parsed.seed < 2**64, "--seed", parsed.seed, "at least 0 and below 2**64")
    require(parsed.top_k >= 0, "--top-k", parsed.top_k, "at least 0")
    config_file = parsed.run / "config.toml"
    if not config_file.exists():
        raise UserError(f"{parsed.run}: not a run (it has no config.toml): give the run_dir of a training run")
    config = load_config(config_file)

    checkpoints = list_checkpoints(parsed.run / "checkpoints")
    if not checkpoints:
        raise UserError(f"{parsed.run / 'checkpoints'}: no checkpoint yet: let the run train first")
    model = build_model(config, pick_device("auto"))
    load_checkpoint(checkpoints[-1], model)
    text = sample_text(
        model,
        config,
        parsed.run,
        parsed.prompt,
        parsed.tokens,
        seed=parsed.seed,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
    )
    print(text)
    return 0


def plot_command(arguments: list[str]) -> int:
    """`lather plot RUN [RUN ...]`."""
    parsed = _parse(PlotArguments, "lather plot", arguments)
    if not parsed.runs:
        raise UserError("lather plot needs at least one run: lather plot runs/quickstart")
    for run in parsed.runs:
        if not (run / "metrics.jsonl").is_file():
            raise UserError(f"{run}: not a run (it has no metrics.jsonl): give the run_dir of a training run")

    from lather.train.plot import draw  # matplotlib takes a second to import

    out = parsed.out or (parsed.runs[0] / "loss.png" if len(parsed.runs) == 1 else Path("comparison.png"))
    draw(parsed.runs, out)
    print(out)
    return 0


def bench_command(arguments: list[str]) -> int:
    """`lather bench optimizer [options]`."""
    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: lather bench optimizer [OPTIONS]\n\n  lather bench optimizer --help shows the options")
        return 0
    if not arguments or arguments[0] != "optimizer":
        given = f"unknown benchmark {arguments[0]!r}" if arguments else "no benchmark given"
        raise UserError(f"{given}: use lather bench optimizer")
    from lather.bench.optimizer import OptimizerBenchmark, run  # brings matplotlib

    return run(_parse(OptimizerBenchmark, "lather bench optimizer", arguments[1:]))


def _parse(cls: type[A], prog: str, arguments: list[str], default: A | None = None) -> A:
    """tyro's parsing, with its boxed errors put on one line."""
    boxed = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxed):
            if default is None:
                return tyro.cli(cls, prog=prog, args=arguments)
            return tyro.cli(cls, prog=prog, args=arguments, default=default)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise UserError(_one_line(boxed.getvalue(), prog)) from None


def _one_line(box: str, prog: str) -> str:
    """The message of tyro's boxed error, and the first option that it suggests.

    A box is groups of lines between rules. Where the output is not UTF-8 it is drawn in ASCII, and its title is a group of its own.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ ") for line in plain.splitlines() if line.strip() and line[0] not in "╭╰"]
    groups: list[list[str]] = [[]]
    for line in lines:
        if set(line) <= {"─", "-"}:
            groups.append([])
        else:
            groups[-1].append(line)
    message, *rest = groups if box.startswith("╭") else groups[1:] or [[]]
    text = re.sub(r"^Error parsing (\w+): (?=\1\.)", "", " ".join(message))
    if rest and rest[0][0].startswith("Perhaps you meant") and len(rest[0]) > 1:
        text += f"; did you mean {rest[0][1].split()[0]}?"
    elif "is not valid" not in text:
        text += f"; {prog} --help shows what it takes"
    return text
