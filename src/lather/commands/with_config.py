"""Commands that take a configuration: the file, the options that override it, and `--help`.

`--optim.lr 0.1` becomes a field in five steps. `read_line` divides the command line at its options.
`read_values` reads the file, with the rules and the model family that the command line chooses.
`options_of_command` lists the options: the fields of the dataclasses for these rules and this
family. `values_of_line` gives each option its words, under the dotted name `optim.lr`, and
`with_overrides` puts them in the place of the file's values. `build` converts each value once, to
the type of its field, and makes the dataclasses, which check ranges. A value of the file in whose
place the command line puts another is not looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lather.commands.help import ALL, SECTIONS, about, show_configuration, show_short
from lather.commands.options import options_of_command
from lather.commands.parsing import Line, name_of_option, read_line, unknown_options, values_of_line
from lather.config.config import Config
from lather.config.context_length import with_overrides
from lather.config.fields import build, section_at
from lather.config.toml_file import (
    describe_unknown,
    naming,
    owner_of,
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
    file = arguments[0] if arguments and not arguments[0].startswith("-") else None
    line, topic = take_help(read_line(arguments[1:] if file else arguments))
    if file is None and topic is None and needs_file:
        raise ConfigError(
            f"lather {command} needs a configuration first: lather {command} "
            "configs/quickstart.toml"
        )
    path = configuration_file(file, command) if file else None
    named = {
        name_of_option(option): words if len(words) > 1 else "".join(words)
        for option, words in line
        if option
    }
    with naming(path, named):
        values = _values_of_file(path, named)
        options = list(options_of_command(cls, values))
        _refuse_unknown(file, values, [] if topic is not None else unknown_options(line, options))
        if topic is None:
            overrides = values_of_line(line, options, f"lather {command} CONFIG")
            return build(cls, with_overrides(values, overrides)), (path or Path()).stem
    if topic:
        show_configuration(command, options, values, topic)
    else:
        added = [option for option in options if option.section is cls is not Config]
        show_short(command, text or about(cls), added, options, values)
    raise SystemExit(0)


def _values_of_file(path: Path | None, named: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """Return the values of the file into which those of the command line fit, of which `named` has
    the words. The file in a run's folder means that run, where it is now."""
    run = run_of(path) if path else None
    if run is None:
        return read_values(path, named)
    return values_for(values_of_config(current_config(run)), named)


def _refuse_unknown(
    file: str | None, values: Mapping[str, Any], options: Collection[tuple[str, str]]
) -> None:
    """Raise UserError that names all unknown keys of the file and all unknown options."""
    messages = []
    if keys := [(repr(name), hint) for name, hint in unknown_keys(values)]:
        messages.append(f"{file}: {describe_unknown(keys, 'key')}")
    if options:
        hints = [(option, _owner(option, values) or hint) for option, hint in options]
        if len(hints) == 1 and not hints[0][1]:
            hints = [(hints[0][0], "lather train CONFIG --help all shows all options")]
        messages.append(describe_unknown(hints, "option"))
    if messages:
        raise UserError("; and ".join(messages))


def _owner(option: str, values: Mapping[str, Any]) -> str:
    """Say which other model families or rules have an option; empty: none."""
    section, _, key = name_of_option(option).rpartition(".")
    return owner_of(key, section_at(Config, section, values))


def take_help(line: Line) -> tuple[Line, str | None]:
    """Return the command line without its request for help, and the section that is asked for;
    None: no help is asked for, and empty: the short page.

    Raises UserError for a section that there is not.
    """
    requests = [words for option, words in line if option == "--help"]
    rest = [(option, words) for option, words in line if option != "--help"]
    topic = requests[0][0] if requests and requests[0] else ""
    if topic not in (*SECTIONS, ALL, ""):
        raise UserError(
            f"--help {topic}: there is no such section: use one of {', '.join(SECTIONS)}, or {ALL}"
        )
    return rest, topic if requests else None
