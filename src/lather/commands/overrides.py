"""The configuration that command-line options override. The rules are read from the options first: which options exist depends on the
rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar

from lather.commands.help import show_help, take_help
from lather.commands.parsing import parse_arguments
from lather.config.config import Config
from lather.config.optim import KINDS, RuleOptimConfig
from lather.config.rule_fields import owners, rule_named
from lather.config.toml_file import config_from_mapping, load_config, with_model
from lather.errors import ConfigError

A = TypeVar("A")

RULE_OPTIONS = {"--optim.name": "name", **{f"--optim.{kind}.rule": f"{kind}.rule" for kind in KINDS}}
"""Options that choose rules, and their names in `load_config`."""


def read_config(file: Path | None, arguments: list[str]) -> Config:
    """Read the file's configuration, or the default one, with the rules and the initial model that `arguments` choose.

    Raises ConfigError for an unknown rule, and for an option of a rule that is not used.
    """
    given = dict(_options(arguments))
    rules = {name: given[option] for option, name in RULE_OPTIONS.items() if given.get(option)}
    for option, name in RULE_OPTIONS.items():
        if name in rules:
            rule_named(rules[name], option)
    init_from = given.get("--init-from", "")
    if file:
        config = load_config(file, rules, given.get("--run-dir", ""), init_from, given.get("--fork-from", ""))
    else:
        config = config_from_mapping(with_model({"optim": _sections(rules)}, init_from, given.get("--run-dir", "")))
    assert isinstance(config.optim, RuleOptimConfig)
    for option in given:
        _refuse_option_of_another_rule(option, config.optim)
    return config


def parse_with_config(cls: Callable[[Config], A], command: str, arguments: list[str]) -> tuple[A, str]:
    """Parse the arguments of a command that takes a configuration file first. `cls` is a dataclass whose first field is the configuration.

    Returns the parsed arguments, and the file's name without its suffix. Raises UserError if the arguments are not valid, and SystemExit
    after showing the help that they ask for.
    """
    arguments, topic = take_help(arguments)
    file = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if file is None and topic is None:
        raise ConfigError(f"lather {command} needs a configuration first: lather {command} configs/quickstart.toml")
    arguments = arguments[1:] if file else arguments
    default = cls(read_config(Path(file) if file else None, arguments))
    if topic is not None:
        show_help(command, " ".join((cls.__doc__ or "").split()), default, topic)
        raise SystemExit(0)
    return parse_arguments(type(default), f"lather {command} CONFIG", arguments, default=default), Path(file or "").stem


def _options(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yield every option with its value."""
    for argument, following in itertools.pairwise([*arguments, ""]):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            yield name.replace("_", "-"), value if equals else following


def _sections(rules: dict[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, rule in rules.items():
        kind, dot, key = name.partition(".")
        found[kind] = {key: rule} if dot else rule
    return found


def _refuse_option_of_another_rule(option: str, optim: RuleOptimConfig) -> None:
    parts = option.removeprefix("--").split(".")
    if parts[0] != "optim" or len(parts) not in (2, 3) or (len(parts) == 3 and parts[1] not in KINDS):
        return
    section: object = optim.section(parts[1]) if len(parts) == 3 else optim
    assert is_dataclass(section)
    key = parts[-1].replace("-", "_")
    known = {one.name for one in fields(section)}
    if not {key, key.removeprefix("no_")} & known and (
        whose := owners(key.removeprefix("no_"), optim.rules[parts[1] if len(parts) == 3 else ""])
    ):
        raise ConfigError(f"{option}: {whose}")
