"""`--help` of commands that take a configuration: a short page, `--help all`, and `--help SECTION`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from lather.commands.options import CommandOption, options_of_command
from lather.commands.parsing import ONE_OF_SEVERAL
from lather.config.config import Config
from lather.config.optim import as_help_shows_it
from lather.errors import UserError

SECTIONS = tuple(one.name for one in fields(Config) if is_dataclass(getattr(Config(), one.name)))
ALL = "all"
INDENT = (0, 0, 0, 2)
OFTEN = (
    "run_dir",
    "init_from",
    "fork_from",
    "data.source",
    "data.path",
    "data.tokenizer",
    "optim.name",
    "optim.lr",
    "optim.weight_decay",
    "optim.schedule",
    "optim.warmup_steps",
    "train.steps",
    "train.batch_size",
    "train.micro_batch_size",
    "train.sequence_length",
    "train.recompute",
    "train.precision",
    "parallel.pp",
    "parallel.ep",
    "checkpoint.every",
)
"""The fields of a configuration that are changed most."""


def take_help(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without -h, --help and what follows; None: no help is asked for, and empty: the short page.

    Raises UserError for a section that there is not.
    """
    rest = list(arguments)
    place = next((place for place, one in enumerate(rest) if one in ("-h", "--help") or one.startswith("--help=")), None)
    if place is None:
        return rest, None
    option, _, topic = rest.pop(place).partition("=")
    if not topic and place < len(rest) and not rest[place].startswith("-") and not Path(rest[place]).is_file():
        topic = rest.pop(place)
    if topic and topic not in (*SECTIONS, ALL):
        raise UserError(f"{option} {topic}: there is no such section: use one of {', '.join(SECTIONS)}, or {ALL}")
    return rest, topic


def show_help(command: str, about: str, default: Any, topic: str) -> None:
    """Print the page for the arguments `default`, a `Config` or a dataclass with one. `about`: what the short page begins with."""
    config = default if isinstance(default, Config) else default.config
    config = replace(config, optim=as_help_shows_it(config.optim))
    default = config if isinstance(default, Config) else replace(default, config=config)
    if topic:
        shown = default if topic == ALL else _only(config, topic)
        tyro.cli(type(shown), prog=f"lather {command} CONFIG", args=["--help"], default=shown, config=ONE_OF_SEVERAL)
    console = Console(highlight=False, markup=False)
    console.print(f"usage: lather {command} CONFIG [OPTIONS]\n\n{about}")
    options = list(options_of_command(type(default), default))
    own = [option for option in options if not isinstance(default, Config) and option.name in {one.name for one in fields(default)}]
    if own:
        console.print("\nOptions of this command")
        console.print(_table(own))
    else:
        console.print("\nFields of the configuration that are changed most; each overrides the file")
        by_name = {option.name: option for option in options}
        console.print(_table([by_name[name] for name in OFTEN if name in by_name]))
    console.print("\nAll fields of the configuration, by section; each overrides the file")
    console.print(_sections(config))


def _only(config: Config, section: str) -> Any:
    """A dataclass with this section alone, under its name."""
    value = getattr(config, section)
    cls = make_dataclass("Section", [(section, type(value), field(default=value))])
    cls.__doc__ = f"Section [{section}] of a configuration."
    return cls()


def _table(options: Sequence[CommandOption]) -> Padding:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(ratio=2, overflow="fold")
    table.add_column(ratio=3)
    for option in options:
        text = option.text.partition(". ")[0].rstrip(".")
        table.add_row(f"{option.flags[0]} {option.metavar}", f"{text} [{option.default}]" if option.default else text)
    return Padding(table, INDENT)


def _sections(config: Config) -> Padding:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in SECTIONS:
        about = (type(getattr(config, name)).__doc__ or "").strip().partition("\n")[0].partition(". ")[0]
        table.add_row(f"--help {name}", about)
    table.add_row(f"--help {ALL}", "Every option of every section.")
    return Padding(table, INDENT)
