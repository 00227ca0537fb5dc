"""Commands that take a configuration: the file, the options that override it, and `--help`.

The file and the command line become one mapping of names to values, from which the configuration is
built once. Which options exist depends on the rules and the model family in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from lather.commands.help import ALL, SECTIONS, about, section_of, show_configuration, show_short
from lather.commands.options import CommandOption, options_of_command
from lather.commands.parsing import (
    Line,
    field_of,
    read_line,
    unknown_options,
    values_of_line,
)
from lather.config.config import Config
from lather.config.fields import Word, build, merged
from lather.config.optim import KINDS
from lather.config.rule_fields import owners, rule_named
from lather.config.toml_file import (
    RULE_NAMES,
    Unknown,
    describe_unknown,
    families_with,
    naming,
    read_values,
    unknown_keys,
    values_for,
    values_of_config,
)
from lather.errors import ConfigError, UserError
from lather.train.run_config import configuration_file, current_config, run_of

A = TypeVar("A")


def parse_with_config(
    cls: type[A],
    command: str,
    arguments: list[str],
    text: str = "",
    needs_file: bool = True,
) -> tuple[A, str]:
    """Parse the arguments of a command that takes a configuration file first. `cls` is `Config`, or
    a dataclass with its fields among its options. The short page of help begins with `text`, or
    else with its docstring.

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
    line = read_line(arguments)
    values = _values_of_file(path, line)
    options = list(options_of_command(cls, values))
    keys = list(unknown_keys(Config, values))
    _refuse_unknown(f"{file}: ", keys, [] if topic is not None else line, options, values)
    if topic is not None:
        if topic:
            show_configuration(command, options, values, topic)
        else:
            own = [option for option in options if option.section is cls is not Config]
            show_short(command, text or about(cls), own, options, values)
        raise SystemExit(0)
    given = values_of_line(line, options, f"lather {command} CONFIG")
    with naming(path, given):
        return build(cls, merged(values, given)), (path or Path()).stem


def _values_of_file(path: Path | None, line: Line) -> dict[str, Any]:
    """Return the values of the file into which those of the command line fit. A run's own file
    means that run, where it is now.

    Raises ConfigError for an unknown rule, RunError for a run of another format.
    """
    given: dict[str, Any] = {}
    for option, words in line:
        if option and (words or not given.get(field_of(option))):
            given[field_of(option)] = Word(words[0] if words else "", option)
    for name in RULE_NAMES:
        if given.get(name):
            rule_named(given[name], given[name].option)
        else:
            given.pop(name, None)
    run = run_of(path) if path else None
    if run is None:
        return read_values(path, given)
    return values_for(values_of_config(current_config(run)), given)


def _refuse_unknown(
    file: str,
    keys: Sequence[Unknown],
    line: Line,
    options: Sequence[CommandOption],
    values: dict[str, Any],
) -> None:
    """Raise ConfigError that names all keys of the file and options of the command line that there
    are not."""
    unknown = [
        (name, _owner(name, values) or text) for name, text in unknown_options(line, options)
    ]
    if len(unknown) == 1 and not unknown[0][1]:
        unknown = [(unknown[0][0], "lather train CONFIG --help all shows all options")]
    messages = [f"{file}{describe_unknown(keys)}"] if keys else []
    messages += [describe_unknown(unknown, "option")] if unknown else []
    if messages:
        raise ConfigError("; and ".join(messages))


def _owner(option: str, values: dict[str, Any]) -> str:
    """Return who has an option of `[model]` or `[optim]` that the family or the rules there do not
    have; empty if nobody has it."""
    parts = field_of(option).split(".")
    if parts[0] == "model" and len(parts) == 2:
        return families_with(parts[-1], section_of("model", values).model_type)
    kind = parts[1] if len(parts) == 3 else ""
    if parts[0] != "optim" or len(parts) not in (2, 3) or (kind and kind not in KINDS):
        return ""
    return owners(parts[-1], section_of("optim", values).rules[kind])


def take_help(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without -h, --help and what follows; None: no help is asked for, and empty: the
    short page.

    Raises UserError for a section that there is not.
    """
    rest = list(arguments)
    asking = (n for n, word in enumerate(rest) if re.match(r"(-h|--help(=.*)?)$", word))
    place = next(asking, None)
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
