"""Command lines and files with several mistakes, values that are not of an option's type, and names
of other trainers: all unknown names in one message, in the words of TOML and of the command
line."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from lather.commands.checking import check_values, options_of_line
from lather.commands.options import CommandOption
from lather.config.optim import optim_config
from lather.config.toml_file import config_from_mapping
from lather.errors import ConfigError, UserError, as_toml
from lather.models.rotary import YarnConfig


def test_options_with_their_values() -> None:
    line = ["a", "--x", "1", "-2", "--y=3", "4", "--z"]
    assert list(options_of_line(line)) == [("--x", ["1", "-2"]), ("--y", ["3", "4"]), ("--z", [])]


def test_what_follows_the_values_of_an_option_is_not_looked_at() -> None:
    """It may be an argument without an option, such as a folder."""
    check_values(["--x", "3", "folder"], [CommandOption("x", int | None, "", "")])
    check_values(["--x", "None"], [CommandOption("x", int | None, "", "")])
    with pytest.raises(UserError, match=r"^--x = 'folder' is not valid: it must be an integer$"):
        check_values(["--x", "folder", "3"], [CommandOption("x", int | None, "", "")])


def test_values_as_toml() -> None:
    for value, text in (
        (None, "none"),
        (True, "true"),
        ("a", "'a'"),
        ("it's", '"it\'s"'),
        ("a\nb", '"a\\nb"'),
        (1e-8, "1e-08"),
        (float("inf"), "inf"),
        ((1, (2.0, "x")), "[1, [2.0, 'x']]"),
        ({"a": {"b": False}}, "{ a = { b = false } }"),
        ({}, "{}"),
        (Path("/a/b"), "/a/b"),
    ):
        assert as_toml(value) == text
    yarn = as_toml(YarnConfig(factor=4.0))
    assert yarn.startswith("{ factor = 4.0, original_max_position_embeddings = 4096, ")
    assert "mscale" not in yarn


PYTHON = r"\bTrue\b|\bFalse\b|\bNone\b|Config\(|<class|Path\(|torch\.|\(1, 2\)"
"""Python's forms of values, which do not belong into messages."""
ODD = [None, True, (1, 2), {"a": 1}, YarnConfig(), Path("/x"), 1.5, 3, "x", ["a"], float("nan")]


@pytest.mark.parametrize("rule", ["muon", "soap", "soap_muon", "adamw"])
def test_errors_about_options_of_rules_speak_toml(rule: str) -> None:
    for name in vars(optim_config(rule)):
        for odd in ODD:
            for mapping in ({name: odd}, {"rest": {"rule": rule, name: odd}}):
                with contextlib.suppress(ConfigError):
                    config_from_mapping({"optim": {"name": rule, **mapping}})
                    continue
                with pytest.raises(ConfigError) as error:
                    config_from_mapping({"optim": {"name": rule, **mapping}})
                assert not re.search(PYTHON, str(error.value)), str(error.value)
