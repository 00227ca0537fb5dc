"""`lather completion bash | zsh | fish`: a script with which a shell completes commands, options
and their values.

The script holds all names, so that a completion starts no Python. Options of all rules and model
families are in it. `completion.bash` is its form for bash and zsh.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.resources import files

from lather.argument import Argument
from lather.commands import COMMANDS
from lather.commands.bench import BENCHMARKS
from lather.commands.help import ALL, SECTIONS
from lather.commands.options import CommandOption, options_of_command
from lather.config.config import Config
from lather.config.optim import KINDS
from lather.errors import UserError
from lather.files import read_text
from lather.lines import fit
from lather.models.families import FAMILIES
from lather.optim.rules import RULES

USAGE = """\
usage: lather completion SHELL

Print a script with which the shell completes lather's commands and options. To have it in every
shell that you start:

  lather completion bash > ~/.local/share/bash-completion/completions/lather
  lather completion zsh >> ~/.zshrc
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
FIRST = " ".join((*COMMANDS, "--help", "--version"))
"""The words that follow `lather`."""

ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


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
    commands = (*COMMANDS, *(f"data {name}" for name in FOLLOWING["data"]))
    options = {
        command: {option.name: option for option in options_of(command)} for command in commands
    }
    print(
        _fish(options) if shell == "fish" else (ZSH if shell == "zsh" else "") + _bash(options),
        end="",
    )


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
        yield CommandOption(
            "help", str, argument=Argument(describe=lambda: "Show help, of a section")
        )
        for rule in RULES:
            yield from options_of_command(Config, {"optim": {"name": rule}})
        for family in FAMILIES.values():
            yield from options_of_command(family.config, prefix="model.")
    if command == "train":
        yield CommandOption(
            "nproc",
            int,
            argument=Argument(describe=lambda: "Ranks that are started on this machine"),
        )


def _values(option: CommandOption) -> tuple[str, ...]:
    return (
        (*SECTIONS, ALL) if option.name == "help" else NAMES.get(option.name, tuple(option.choices))
    )


def _bash(options: dict[str, dict[str, CommandOption]]) -> str:
    values: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for command, own in options.items():
        values[FOLLOWING.get(command, ())].append(f"{command} {command}")
        for option in own.values():
            values[_values(option)] += [f"{command} {flag}" for flag in option.flags]
    del values[()]
    flags = {
        command: dict.fromkeys(
            [*(flag for option in own.values() for flag in option.flags), "--help"]
        )
        for command, own in options.items()
    }
    script = read_text(files("lather.commands").joinpath("completion.bash"))
    script = script.replace("@commands@", shlex.quote(FIRST))
    script = script.replace(
        "@values@", "\n".join(_case(places, words) for words, places in values.items())
    )
    return script.replace(
        "@options@", "\n".join(_case([command], own) for command, own in flags.items())
    )


def _case(patterns: Iterable[str], words: Iterable[str]) -> str:
    return f"{'|'.join(map(shlex.quote, patterns))}) words={shlex.quote(' '.join(words))} ;;"


def _fish(options: dict[str, dict[str, CommandOption]]) -> str:
    lines = [f"complete -c lather -n __fish_use_subcommand -f -a {shlex.quote(FIRST)}"]
    for command, own in options.items():
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
        for word in FOLLOWING.get(command, ()):
            lines.append(
                f"complete -c lather -n {shlex.quote(f'__fish_seen_subcommand_from {command}')} -a "
                f"{word}"
            )
        for option in own.values():
            value = (
                f"-x -a {shlex.quote(' '.join(words))}"
                if (words := _values(option))
                else "-r"
                if option.metavar
                else ""
            )
            text = shlex.quote(option.text.partition(". ")[0])
            lines += [
                f"complete -c lather -n {shlex.quote(seen)} -l {flag[2:]} {value} -d {text}"
                for flag in option.flags
            ]
    return "\n".join(lines) + "\n"
