"""`lather completion bash | zsh | fish`: a script with which a shell completes commands, options
and their values.

The script, which shtab makes, holds all names, so that a completion starts no Python. It has the
options of all rules and model families.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Iterator
from importlib import import_module

from lather.argument import Argument
from lather.commands import COMMANDS
from lather.commands.bench import BENCHMARKS
from lather.commands.help import ALL, SECTIONS
from lather.commands.options import CommandOption, options_of_command
from lather.config.config import Config
from lather.config.optim import KINDS
from lather.errors import UserError
from lather.lines import fit
from lather.models.families import FAMILIES
from lather.optim.rules import RULES

USAGE = """\
usage: lather completion SHELL

Print a script with which the shell completes lather's commands and options. To have it in every
shell that you start:

  lather completion bash > ~/.local/share/bash-completion/completions/lather
  lather completion zsh > ~/.zfunc/_lather        (fpath names ~/.zfunc before compinit)
  lather completion fish > ~/.config/fish/completions/lather.fish
"""
NAMES = {
    "optim.name": tuple(RULES),
    **{f"optim.{kind}.rule": tuple(RULES) for kind in KINDS},
    "model.model_type": tuple(FAMILIES),
}
"""Values of fields whose type does not say them."""
WITH_CONFIG = ("train", "plan", "profile")
FOLLOWING = {
    "data": ("make", "show", "check"),
    "bench": tuple(BENCHMARKS),
    "completion": ("bash", "zsh", "fish"),
}
"""The words that follow a command."""


def completion_command(arguments: list[str]) -> None:
    """Print the script with which a shell completes Lather's commands and options."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(fit(USAGE), end="")
        return
    (shell, *rest), shells = arguments, FOLLOWING["completion"]
    if shell not in shells or rest:
        raise UserError(
            f"lather completion {' '.join(arguments)}: give one shell of {', '.join(shells)}"
        )
    import shtab

    print(shtab.complete(_parser(), shell))


def options_of(command: str) -> Iterator[CommandOption]:
    """The options of a command, of all rules and families."""
    words = command.split()
    cls = getattr(
        import_module(f"lather.commands.{COMMANDS[words[0]]}"),
        f"{words[-1].capitalize()}Arguments",
        None,
    )
    if cls is not None:
        yield from options_of_command(cls)
    if command in WITH_CONFIG:
        yield CommandOption("help", str, argument=Argument(description="Show help, of a section"))
        for rule in RULES:
            yield from options_of_command(Config, {"optim": {"name": rule}})
        for family in FAMILIES.values():
            yield from options_of_command(family.config, prefix="model.")
    if command == "train":
        yield CommandOption(
            "nproc",
            int,
            argument=Argument(description="Ranks that are started on this machine"),
        )


def _values(option: CommandOption) -> tuple[str, ...]:
    return (
        (*SECTIONS, ALL) if option.name == "help" else NAMES.get(option.name, tuple(option.choices))
    )


def _parser() -> ArgumentParser:
    """Return a parser with all commands and options, which only serves to make the scripts."""
    parser = ArgumentParser("lather")
    parser.add_argument("--version", action="store_true", help="Show the version")
    commands = parser.add_subparsers()
    for command in COMMANDS:
        own = commands.add_parser(command, help=command, add_help=command not in WITH_CONFIG)
        if command == "data":
            actions = own.add_subparsers()
            for name in FOLLOWING[command]:
                _add_options(actions.add_parser(name, help=name), f"data {name}")
        else:
            _add_options(own, command)
    return parser


def _add_options(parser: ArgumentParser, command: str) -> None:
    if words := FOLLOWING.get(command):
        parser.add_argument("what", choices=words)
    else:
        _complete_files(parser.add_argument("paths", nargs="*"))
    options = {flag: option for option in options_of(command) for flag in option.flags}
    for flag, option in options.items():
        text = option.text.partition(". ")[0].replace("%", "%%")
        if not option.metavar:
            parser.add_argument(flag, dest=flag, action="store_true", help=text)
        elif words := _values(option):
            parser.add_argument(flag, dest=flag, choices=words, help=text)
        else:
            _complete_files(parser.add_argument(flag, dest=flag, help=text))


def _complete_files(argument: Action) -> None:
    import shtab

    argument.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads this
