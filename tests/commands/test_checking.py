"""Command lines and files with several mistakes, values that are not of an option's type, and names
of other trainers: all unknown names in one message, in the words of TOML and of the command
line."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from lather.argument import Argument
from lather.cli import main
from lather.commands.options import CommandOption
from lather.commands.parsing import read_line, values_of_line
from lather.commands.train import _read
from lather.config.fields import Word, convert
from lather.config.optim import optim_config
from lather.config.toml_file import config_from_mapping
from lather.errors import ConfigError, UserError, as_toml
from lather.models.rotary import YarnConfig

QUICKSTART = str(Path(__file__).parents[2] / "configs/quickstart.toml")


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error.removeprefix("lather: error: ").rstrip("\n")


def test_an_error_names_the_file_where_the_value_is_the_file_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[train]\nsteps = 0\n")
    message = "train.steps = 0 is not valid: it must be at least 1"
    assert error_of(capsys, str(file), "--seed", "3") == f"{file}: {message}"
    assert main(["plan", str(file), "--out", "steps.png"]) == 2
    assert capsys.readouterr().err == f"lather: error: {file}: {message}\n"
    assert error_of(capsys, QUICKSTART, "--train.steps", "0") == message
    assert error_of(capsys, QUICKSTART, "--train.micro-batch-size", "3").startswith("train.batch")
    assert _read([str(file), "--train.steps", "5"])[0].train.steps == 5


def test_the_command_line_may_choose_the_model_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[train]\nsteps = 5\n")
    arguments = ["--model.model-type", "qwen3_moe", "--model.mlp-only-layers", "0"]
    assert _read([str(file), *arguments])[0].model.model_type == "qwen3_moe"
    message = "model.model_type = 'x' is not valid: it must be one of 'deepseek_v2', 'qwen3_moe'"
    assert error_of(capsys, str(file), "--model.model-type", "x").startswith(message)


def test_options_with_their_values() -> None:
    line = ["a", "--x", "1", "-2", "--y=3", "4", "--z"]
    options = [("--x", ["1", "-2"]), ("--y", ["3", "4"]), ("--z", [])]
    assert read_line(line) == [("", ["a"]), *options, ("", [])]
    assert read_line(["b", "--x", "1", "--", "--y=3"]) == [
        ("", ["b"]),
        ("--x", ["1"]),
        ("", ["--y=3"]),
    ]


def test_what_follows_the_values_of_an_option_is_an_argument_without_one() -> None:
    options = [
        CommandOption("x", int | None),
        CommandOption("pair", tuple[float, float]),
        CommandOption("sets", dict[str, str]),
        CommandOption("named", str, argument=Argument(repeated=True)),
        CommandOption("flag", bool),
        CommandOption("folder", Path, argument=Argument(positional=True)),
    ]

    def read(line: str) -> dict[str, Any]:
        return values_of_line(read_line(line.split()), options, "lather x")

    assert read("--x 3 there") == {"x": "3", "folder": "there"}
    assert read("--no-flag there --x None") == {"flag": False, "x": "None", "folder": "there"}
    assert read("--pair 1 2 --sets a b c d") == {"pair": ["1", "2"], "sets": {"a": "b", "c": "d"}}
    assert read("-- --there") == {"folder": "--there"}
    with pytest.raises(UserError, match=r"^--sets needs pairs of a name and a value; .* no value$"):
        read("--sets a b c")
    with pytest.raises(UserError, match=r"^no option takes this: twice; lather x --help shows"):
        read("there --x 1 twice")


def test_a_word_is_read_as_what_the_field_holds() -> None:
    for word, hint, value in (
        ("3", int | None, 3),
        ("None", int | None, None),
        ("None", str, "None"),
        ("3", float, 3.0),
        ("true", bool | None, True),
        ("0.5", float | str, 0.5),
        ("spectral", float | str, "spectral"),
        ("fp32", Literal["fp32", "bf16"] | None, "fp32"),
        ("a/b", Path | None, Path("a/b")),
    ):
        converted = convert(Word(word, "--x"), hint, "x")
        assert (type(converted), converted) == (type(value), value), word
    for word, hint, values in (
        ("folder", int, "an integer"),
        ("yes", bool | None, "true or false"),
        ("x", int | float, "an integer or a number"),
    ):
        with pytest.raises(UserError, match=f"^--x = '{word}' is not valid: it must be {values}$"):
            convert(Word(word, "--x"), hint, "x")


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
