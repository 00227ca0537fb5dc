"""The `lather` command: lists and runs its subcommands, and turns their errors into exit statuses.

An error that the user can correct is one line on standard error and exit status 2. A run that SIGTERM ends early saves a checkpoint and
exits with 0; after SIGINT it also saves and exits with 130.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from lather.commands import COMMANDS
from lather.errors import UserError
from lather.files import NO_SPACE, reason
from lather.lines import fit
from lather.version import describe_version

USAGE = """\
usage: lather COMMAND ...

  train CONFIG [--FIELD VALUE ...]   train, or resume, the run that a TOML file describes; --help shows the fields that are changed most
  data make FOLDER SOURCE            make a data set of text, JSONL, Parquet, chats or token files; also show, check
  generate RUN --prompt TEXT         continue texts with a trained model, answer messages, or talk with it (--chat)
  eval RUN [DATA ...]                loss, perplexity and bits per byte on held-out sets; --tasks of lm-evaluation-harness
  import FOLDER RUN                  make a run of a Hugging Face folder (config.json, safetensors)
  export RUN FOLDER                  write a run's model as a Hugging Face folder, or its adapters for PEFT
  plot RUN [RUN ...]                 draw loss over steps and over seconds, and the time that the optimizer takes
  report RUN                         a page of a run: curves, experts' loads, memory, schedule, configuration, changes
  doctor                             check versions, devices, disk and memory, and with --nproc N clocks and links of ranks
  plan CONFIG --world N              the memory that each rank will need
  profile CONFIG                     the activations that each layer keeps between forward and backward
  bench BENCHMARK                    run a benchmark (in a checkout); --help lists them
  completion bash | zsh | fish       print a script with which the shell completes commands and options

  -h, --help    --version            each command has a --help of its own
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack characters of a sample
    try:
        status = _dispatch(arguments)
        print(end="", flush=True)  # raises here, and not while Python exits
        return status
    except UserError as error:
        print(f"lather: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has closed the pipe, as in `lather ... | head`
        from lather.console import discard_output

        discard_output()
        return 0
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        file = error.filename or "a file"
        print(f"lather: stopped: {file} cannot be written ({reason(error, Path(file))}): make room, then start again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        print(fit(USAGE), end="")
        return 0
    if arguments == ["--version"]:
        print(describe_version())
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        given = f"unknown command {arguments[0]!r}" if arguments else "no command given"
        raise UserError(f"{given}: use one of {', '.join(COMMANDS)}, or --help")
    name, *rest = arguments
    module = importlib.import_module(f"lather.commands.{COMMANDS[name]}")
    return getattr(module, f"{name}_command")(rest) or 0
