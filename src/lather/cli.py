"""The `lather` command: lists and runs its subcommands, and turns their errors into exit statuses.

An error that the user can correct is one line on standard error and exit status 2. A run that a
signal ends early saves a checkpoint and exits with 0, or after SIGINT with 130.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lather.allocator import allocator_variables
from lather.commands import COMMANDS
from lather.cores import waiting_variables
from lather.errors import UserError
from lather.files import OF_WRITES, reason, remedy_of
from lather.lines import fit
from lather.output import discard_output, settle_output
from lather.parallel.launch.requests import hold_signals
from lather.version import describe_version

USAGE = """\
usage: lather COMMAND ...

  train CONFIG [--FIELD VALUE ...]   train or resume the run that a TOML file describes
  sweep CONFIG --vary FIELD=V1,V2    train a grid of runs, and say which is best
  data make FOLDER SOURCE            make a data set of texts, chats or tokens; show or check it
  generate RUN --prompt TEXT         continue texts, answer messages, or talk with a model (--chat)
  eval RUN [DATA ...]                loss and bits per byte on held-out sets; --tasks of lm-eval
  score RUN ROWS OUT                 log-probabilities and routing of rows of tokens
  import FOLDER RUN                  make a run of a Hugging Face folder (config.json, safetensors)
  export RUN FOLDER                  write a Hugging Face folder, or adapters for PEFT
  plot RUN [RUN ...]                 draw loss over steps and seconds, and the optimizer's time
  report RUN                         a page of a run: curves, loads, memory, schedule, changes
  doctor                             check versions, devices, disk, memory, links of ranks
  plan CONFIG --world N              the memory that each rank will need
  profile CONFIG                     activations that each layer keeps between forward and backward
  bench BENCHMARK                    run a benchmark (in a checkout); --help lists them
  completion bash | zsh | fish       print a script that completes commands and options in the shell

  -h, --help    --version            each command has a --help of its own
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    started = time.monotonic()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and arguments[:1] == ["train"]:
        hold_signals()  # until the run can obey them, and while this process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # the terminal's encoding may lack characters of a sample
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _dispatch(arguments, started)
        if sys.stdout is not None:  # it was not closed before this process started
            sys.stdout.flush()  # raises here, and not while Python exits
        return status
    except UserError as error:
        _complain(f"error: {' '.join(str(error).split())}")
        return 2
    except BrokenPipeError:  # the reader has closed the pipe, as in `lather ... | head`
        discard_output()
        return 0
    except OSError as error:
        if not (remedy := remedy_of(error)):
            raise
        _complain(f"stopped: {_trouble(error)}: {remedy}, then start again")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        settle_output()  # Python would end with 120 if it could not


def _trouble(error: OSError) -> str:
    """Say which file cannot be used, and why."""
    file = error.filename or "a file"
    verb = "written" if error.errno in OF_WRITES else "read or written"
    return f"{file} cannot be {verb} ({reason(error, Path(file))})"


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # the disk below standard error may be the full one
        print(f"lather: {text}", file=sys.stderr)


def _dispatch(arguments: list[str], started: float) -> int:
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(fit(USAGE), end="")
        return 0
    if arguments == ["--version"]:
        print(describe_version())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        raise UserError(
            f"{f'unknown command {name!r}' if name else 'no command given'}: "
            f"{f'did you mean {near[0]}? ' if near else ''}use one of {', '.join(COMMANDS)}, or "
            "--help"
        )
    if "torch" not in sys.modules:  # OpenMP reads them once, when torch is imported
        os.environ |= waiting_variables(os.environ) | allocator_variables(os.environ)
    module = importlib.import_module(f"lather.commands.{COMMANDS[name]}")
    if name == "train":
        return int(module.train_command(rest, started))
    return getattr(module, f"{name}_command")(rest) or 0
