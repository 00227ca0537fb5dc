"""`lather completion bash | zsh | fish`: a script with which a shell completes commands, options
and their values.

The script, which shtab makes, holds all names, so that a completion starts no Python. It has the
options of all rules and model families.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from importlib import import_module

from lather.argument import Argument
from lather.commands import COMMANDS
from lather.commands.bench import BENCHMARKS
from lather.commands.help import ALL, SECTIONS
from lather.commands.options import CommandOption, options_of_command
from lather.config.config import Config
from lather.config.kind_config import KINDS
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
VALUES = {
    "help": (*SECTIONS, ALL),
    "optim.name": tuple(RULES),
    **{f"optim.{kind}.rule": tuple(RULES) for kind in KINDS},
    "model.model_type": tuple(FAMILIES),
}
"""Values of options whose type does not say them."""
WITH_CONFIG = ("train", "sweep", "plan", "profile")
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

    parser = ArgumentParser("lather")
    parser.add_argument("--version", action="store_true", help="Show the version")
    commands = parser.add_subparsers()
    for command in COMMANDS:
        inner = commands.add_parser(command, help=command, add_help=command not in WITH_CONFIG)
        if command == "data":
            actions = inner.add_subparsers()
            for name in FOLLOWING[command]:
                _add_options(actions.add_parser(name, help=name), f"data {name}", shtab.FILE)
        else:
            _add_options(inner, command, shtab.FILE)
    print(shtab.complete(parser, shell))


def options_of(command: str) -> Iterator[CommandOption]:
    """Yield the options of a command, of all rules and families."""
    words = command.split()
    module = import_module(f"lather.commands.{COMMANDS[words[0]]}")
    if cls := getattr(module, f"{words[-1].capitalize()}Arguments", None):
        yield from options_of_command(cls)
    if command in WITH_CONFIG:
        yield _option("help", str, "Show help, of a section")
        for rule in RULES:
            yield from options_of_command(Config, {"optim": {"name": rule}})
        for family in FAMILIES.values():
            yield from options_of_command(family.config, prefix="model.")
    if command == "train":
        yield _option("nproc", int, "Ranks that are started on this machine")


def _option(name: str, hint: type, description: str) -> CommandOption:
    return CommandOption(name, hint, argument=Argument(description=description))


def _add_options(parser: ArgumentParser, command: str, files: object) -> None:
    """Add the options of a command, and the words or `files` that follow it, to a parser, which
    only serves to make the script."""
    if words := FOLLOWING.get(command):
        parser.add_argument("what", choices=words)
    else:
        parser.add_argument("paths", nargs="*").complete = files  # type: ignore[attr-defined]
    options = {flag: option for option in options_of(command) for flag in option.flags}
    for flag, option in options.items():
        text = option.text.partition(". ")[0].replace("%", "%%")
        if not option.metavar:
            parser.add_argument(flag, dest=flag, action="store_true", help=text)
        elif words := VALUES.get(option.name, option.choices):
            parser.add_argument(flag, dest=flag, choices=words, help=text)
        else:
            action = parser.add_argument(flag, dest=flag, help=text)
            action.complete = files  # type: ignore[attr-defined]  # shtab reads this
