"""The pages of `--help`: a page of a command's arguments, or, for commands that take a
configuration, a short page, a page of everything and a page of each section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lather.commands.options import CommandOption
from lather.config.config import Config
from lather.config.fields import fields_of, section_at
from lather.console import with_breaks
from lather.lines import fit

SECTIONS = tuple(name for name, field in fields_of(Config).items() if field.sections)
ALL = "all"
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


def show_arguments(prog: str, cls: type, options: Sequence[CommandOption]) -> None:
    """Print the page of a command: what it does, and all its arguments with their whole
    descriptions."""
    console = _console()
    places = "".join(f" {option.metavar}" for option in options if option.argument.positional)
    console.print(fit(f"usage: {prog}{places} [OPTIONS]\n", console.width))
    console.print(fit(about(cls), console.width))
    for title, is_positional in (("Arguments", True), ("Options", False)):
        chosen = [option for option in options if option.argument.positional is is_positional]
        if chosen:
            console.print(f"\n{title}")
            _describe(chosen, console)


def show_configuration(
    command: str, options: Sequence[CommandOption], values: Mapping[str, Any], topic: str
) -> None:
    """Print the page of a section of the configuration, or of everything. `values`: those of the
    configuration."""
    console = _console()
    console.print(f"usage: lather {command} CONFIG [OPTIONS]")
    if topic == ALL:
        console.print("\nOptions")
        _describe([option for option in options if "." not in option.name], console)
    for name in SECTIONS if topic == ALL else (topic,):
        _describe_section(name, section_of(name, values), options, console)


def _describe_section(
    name: str, cls: type, options: Sequence[CommandOption], console: Console
) -> None:
    """Print the options of a section, and below them those of the sections within it."""
    console.print(fit(f"\n[{name}] {about(cls)}", console.width))
    inside = [option for option in options if option.name.startswith(f"{name}.")]
    direct = name.count(".") + 1
    _describe([option for option in inside if option.name.count(".") == direct], console)
    for inner, field in fields_of(cls).items():
        if field.sections:
            _describe_section(f"{name}.{inner}", field.sections[0], inside, console)


def _describe(options: Sequence[CommandOption], console: Console, *, brief: bool = False) -> None:
    """Print options with their whole descriptions, or the first sentences of these."""
    for option in options:
        if not option.argument.hidden:
            name = Text(f"{', '.join(option.flags[: 1 if brief else 2])} {option.metavar}".strip())
            name = with_breaks(name, console.width - 4, ",")
            console.print(Padding(name, (0, 0, 0, 2), expand=False))
            text = option.text.partition(". ")[0].rstrip(".") if brief else option.text
            default = f" (default: {option.default})" if option.default else ""
            console.print(Padding(Text(f"{text}{default}"), (0, 0, 0, 6), expand=False))


def show_short(
    command: str,
    text: str,
    added: Sequence[CommandOption],
    options: Sequence[CommandOption],
    values: Mapping[str, Any],
) -> None:
    """Print the short page of a command that takes a configuration: `text`, the options that the
    command adds or else the fields that are changed most, and the sections."""
    console = _console()
    console.print(f"usage: lather {command} CONFIG [OPTIONS]\n")
    console.print(fit(text, console.width))
    if added:
        console.print("\nOptions of this command")
        _describe(added, console, brief=True)
    else:
        console.print(
            "\nFields of the configuration that are changed most; each overrides the file"
        )
        by_name = {option.name: option for option in options}
        _describe([by_name[name] for name in OFTEN if name in by_name], console, brief=True)
    console.print("\nAll fields of the configuration, by section; each overrides the file")
    table = Table.grid(padding=(0, 2, 0, 0))
    for name in SECTIONS:
        first = (section_of(name, values).__doc__ or "").strip().partition("\n")[0]
        table.add_row(f"--help {name}", first.partition(". ")[0])
    table.add_row(f"--help {ALL}", "Every option of every section.")
    console.print(Padding(table, (0, 0, 0, 2)))


def section_of(name: str, values: Mapping[str, Any]) -> type:
    """Return the class of a section of a configuration with these values."""
    section = section_at(Config, name, values)
    assert section is not None
    return section


def about(cls: type) -> str:
    """Return the docstring of a class as one paragraph."""
    return " ".join((cls.__doc__ or "").split())


def _console() -> Console:
    return Console(highlight=False, markup=False)
