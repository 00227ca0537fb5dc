"""Commands that take a configuration: the file, the options that override it, and `--help` as a
short page, of everything or of a section.

The rules are read from the options first: which options exist depends on the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lather.commands.checking import options_of_line, unknown_options
from lather.commands.options import CommandOption, options_of_command
from lather.commands.parsing import parse_arguments
from lather.config.config import Config
from lather.config.optim import KINDS, as_help_shows_it
from lather.config.rule_fields import owners, rule_named
from lather.config.run_folder import check_format
from lather.config.toml_file import Unknown, describe_unknown, families_with, load_config
from lather.console import with_breaks
from lather.errors import ConfigError, UserError
from lather.lines import fit
from lather.train.own_file import at_home, configuration_file, run_of

A = TypeVar("A")

RULE_OPTIONS = {
    "--optim.name": "name",
    **{f"--optim.{kind}.rule": f"{kind}.rule" for kind in KINDS},
}
"""Options that choose rules, and their names in `load_config`."""
SECTIONS = tuple(one.name for one in fields(Config) if is_dataclass(getattr(Config(), one.name)))
ALL = "all"
INDENT = (0, 0, 0, 2)
NAMES_SHARE = 0.4
"""Share of the width that names of options and their values may take; they are broken between
values."""
OFTEN = (
    *("run_dir", "init_from", "fork_from", "data.source", "data.path", "data.tokenizer"),
    *("optim.name", "optim.lr", "optim.weight_decay", "optim.schedule", "optim.warmup_steps"),
    *(
        "train.steps",
        "train.batch_size",
        "train.micro_batch_size",
        "train.sequence_length",
        "train.recompute",
        "train.precision",
    ),
    *("parallel.pp", "parallel.ep", "checkpoint.every"),
)
"""The fields of a configuration that are changed most."""


def read_config(
    file: Path | None,
    arguments: list[str],
    unknown: list[Unknown] | None = None,
) -> Config:
    """Read the file's configuration, or the default one, with the rules and the initial model that
    `arguments` choose, and without the file's alternatives to what they give. `unknown` takes the
    keys that there are not. A run's own file means that run, where it is now.

    Raises ConfigError for an unknown rule, RunError for a run of another format.
    """
    line = options_of_line(arguments)
    given = {name.replace("_", "-"): " ".join(values[:1]) for name, values in line}
    rules = {name: given[option] for option, name in RULE_OPTIONS.items() if given.get(option)}
    for option, name in RULE_OPTIONS.items():
        if name in rules:
            rule_named(rules[name], option)
    run = run_of(file) if file else None
    if run is not None:
        check_format(run)
    run_dir = given.get("--run-dir", "") or str(run or "")
    init_from, names = given.get("--init-from", ""), [_field_of(option) for option in given]
    config = load_config(file, rules, run_dir, init_from, given=names, unknown=unknown)
    return at_home(config, run) if run else config


def parse_with_config(
    cls: Callable[[Config], A],
    command: str,
    arguments: list[str],
    about: str = "",
    needs_file: bool = True,
) -> tuple[A, str]:
    """Parse the arguments of a command that takes a configuration file first. `cls` makes the
    arguments' defaults from the file's configuration, such as a dataclass whose first field it is.
    The short page of help begins with `about`, or else with its docstring.

    Returns the parsed arguments, and the file's name without its suffix. Raises UserError if the
    arguments are not valid, and SystemExit after showing the help that they ask for.
    """
    arguments, topic = take_help(arguments)
    file = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if file is None and topic is None and needs_file:
        raise ConfigError(
            f"lather {command} needs a configuration first: lather {command} "
            "configs/quickstart.toml"
        )
    path = configuration_file(arguments.pop(0), command) if file else None
    unknown: list[Unknown] = []
    default = cls(read_config(path, arguments, unknown))
    _refuse_unknown(f"{file}: ", unknown, () if topic is not None else arguments, default)
    if topic is not None:
        show_help(command, about or " ".join((cls.__doc__ or "").split()), default, topic)
        raise SystemExit(0)
    return parse_arguments(type(default), f"lather {command} CONFIG", arguments, default=default), (
        path or Path()
    ).stem


def _field_of(option: str) -> str:
    """Return the dotted name of the field that an option gives: `data.packed_attention` for
    --data.no-packed-attention."""
    section, dot, last = option.removeprefix("--").replace("-", "_").rpartition(".")
    return f"{section}{dot}{last.removeprefix('no_')}"


def _refuse_unknown(
    file: str,
    keys: Sequence[Unknown],
    arguments: Sequence[str],
    default: Any,
) -> None:
    """Raise ConfigError that names all keys of the file and options of `arguments` that there are
    not."""
    config = default if isinstance(default, Config) else default.config
    unknown = unknown_options(arguments, list(options_of_command(type(default), default)))
    options = [(name, _owner(name, config) or text) for name, text in unknown]
    more = "lather train CONFIG --help all shows all options"
    if len(options) == 1 and not options[0][1]:
        options = [(options[0][0], more)]
    said = [f"{file}{describe_unknown(keys)}"] if keys else []
    said += [describe_unknown(options, "option")] if options else []
    if said:
        raise ConfigError("; and ".join(said))


def _owner(option: str, config: Config) -> str:
    """Return who has an option of `[model]` or `[optim]` that the family or the rules there do not
    have; empty if nobody has."""
    parts = option.removeprefix("--").replace("-", "_").split(".")
    if parts[0] == "model" and len(parts) == 2:
        return families_with(parts[-1].removeprefix("no_"), config.model.model_type)
    kind = parts[1] if len(parts) == 3 else ""
    if parts[0] != "optim" or len(parts) not in (2, 3) or (kind and kind not in KINDS):
        return ""
    return owners(parts[-1].removeprefix("no_"), config.optim.rules[kind])


def take_help(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without -h, --help and what follows; None: no help is asked for, and empty: the
    short page.

    Raises UserError for a section that there is not.
    """
    rest = list(arguments)
    place = next(
        (
            place
            for place, one in enumerate(rest)
            if one in ("-h", "--help") or one.startswith("--help=")
        ),
        None,
    )
    if place is None:
        return rest, None
    option, _, topic = rest.pop(place).partition("=")
    if (
        not topic
        and place < len(rest)
        and not rest[place].startswith("-")
        and not Path(rest[place]).is_file()
    ):
        topic = rest.pop(place)
    if topic and topic not in (*SECTIONS, ALL):
        raise UserError(
            f"{option} {topic}: there is no such section: use one of {', '.join(SECTIONS)}, or "
            f"{ALL}"
        )
    return rest, topic


def show_help(command: str, about: str, default: Any, topic: str) -> None:
    """Print the page for the arguments `default`, a `Config` or a dataclass with one. `about`: what
    the short page begins with."""
    config = default if isinstance(default, Config) else default.config
    config = replace(config, optim=as_help_shows_it(config.optim))
    default = config if isinstance(default, Config) else replace(default, config=config)
    if topic:
        shown = default if topic == ALL else _only(config, topic)
        parse_arguments(type(shown), f"lather {command} CONFIG", ["--help"], default=shown)
    console = Console(highlight=False, markup=False)
    console.print(f"usage: lather {command} CONFIG [OPTIONS]\n")
    print(fit(about, console.width))
    options = list(options_of_command(type(default), default))
    own = [
        option
        for option in options
        if not isinstance(default, Config) and option.name in {one.name for one in fields(default)}
    ]
    if own:
        console.print("\nOptions of this command")
        console.print(_table(own, console.width))
    else:
        console.print(
            "\nFields of the configuration that are changed most; each overrides the file"
        )
        by_name = {option.name: option for option in options}
        console.print(_table([by_name[name] for name in OFTEN if name in by_name], console.width))
    console.print("\nAll fields of the configuration, by section; each overrides the file")
    console.print(_sections(config))


def _only(config: Config, section: str) -> Any:
    """A dataclass with this section alone, under its name."""
    value = getattr(config, section)
    cls = make_dataclass("Section", [(section, type(value), field(default=value))])
    cls.__doc__ = f"Section [{section}] of a configuration."
    return cls()


def _table(options: Sequence[CommandOption], width: int) -> Padding:
    most = int(NAMES_SHARE * width)
    names = [
        with_breaks(Text(f"{option.flags[0]} {option.metavar}"), most, ",") for option in options
    ]
    longest = max(len(line) for name in names for line in name.plain.split("\n"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(
        width=max(min(longest, most), *(len(word) for name in names for word in name.plain.split()))
    )
    table.add_column(ratio=1)
    for name, option in zip(names, options, strict=True):
        text = option.text.partition(". ")[0].rstrip(".")
        table.add_row(name, f"{text} [{option.default}]" if option.default else text)
    return Padding(table, INDENT)


def _sections(config: Config) -> Padding:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in SECTIONS:
        about = (
            (type(getattr(config, name)).__doc__ or "")
            .strip()
            .partition("\n")[0]
            .partition(". ")[0]
        )
        table.add_row(f"--help {name}", about)
    table.add_row(f"--help {ALL}", "Every option of every section.")
    return Padding(table, INDENT)
