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


def test_all_unknown_names_of_a_file_and_of_the_command_line_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        'epochs = 3\n[train]\nstepz = 5\n[optim]\nname = "soap"\nmomentum = 0.9\n'
        "[optim.rset]\nlr = 1.0\n[model.rope_scaling]\ntype = 'yarn'\n"
    )
    error = error_of(capsys, str(file), "--bf16", "--train.stepz", "3", "--optim.momentum", "0.9")
    assert error.startswith(
        f"{file}: 5 unknown keys: 'epochs': did you mean 'train.steps'? (an epoch"
    )
    for part in (
        "'train.stepz': did you mean 'train.steps'?; 'optim.momentum': momentum is an option of "
        "muon",
        "'optim.rset': did you mean 'optim.rest'?; 'model.rope_scaling.type': [model.rope_scaling] "
        "is",
        "; and 3 unknown options: --bf16: did you mean --train.precision? (with the value 'fp32', "
        "'bf16'",
        "; --train.stepz: did you mean --train.steps?; --optim.momentum: momentum is an option of "
        "muon",
    ):
        assert part in error, error


def test_unknown_names_are_told_before_values_that_are_not_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that is misspelt may be why a value does not fit."""
    file = tmp_path / "my.toml"
    file.write_text("[trian]\nsteps = 5\n[train]\nstepz = 5\nbatch_size = 'x'\n")
    assert error_of(capsys, str(file)).startswith(f"{file}: 2 unknown keys: 'trian': did you mean")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model.rope-scaling.fctor 4", "did you mean --model.rope-scaling.factor?"),
        ("--model.rope-scaling.type yarn", "is always YaRN, and needs no type"),
        (
            "--model.rope-scaling yarn",
            "it is a section: give its fields, such as --model.rope-scaling.",
        ),
        ("--epochs 3", "did you mean --train.steps? (an epoch has as many steps as"),
        ("--gradient-clip 1", "did you mean --train.max-grad-norm?"),
        ("--parallel.tp 2", "the trainer has no tensor parallelism"),
        ("--optim.beta1 0.9", "did you mean --optim.momentum?"),
        (
            "--optim.rest.beta1 0.9",
            "did you mean --optim.rest.betas? (two numbers, of which this is",
        ),
        ("--fsdp full_shard", "parameters are always sharded"),
        ("--warmup_ratio 0.1", "did you mean --optim.warmup-steps? (the ratio times train.steps)"),
        ("--train.seed 3", "did you mean --seed?"),
        ("--train.weight_decay 0.1", "did you mean --optim.weight-decay?"),
        (
            "--model.mlp-only-layers 0",
            "it is a key of model_type 'qwen3_moe', not of 'deepseek_v2'",
        ),
        ("--data.path", "--data.path needs at least one folder of a data set"),
        ("--xyzzy 3", "unknown option --xyzzy; lather train CONFIG --help all shows all options"),
        ("--train.steps x", "--train.steps = 'x' is not valid: it must be an integer"),
        ("--train.steps 1.5", "--train.steps = '1.5' is not valid: it must be an integer"),
        ("--train.steps", "--train.steps needs an integer"),
        ("--optim.lr fast", "--optim.lr = 'fast' is not valid: it must be a number"),
        ("--optim.rest.betas 0.9", "--optim.rest.betas needs 2 values, each of them a number"),
        (
            "--train.compile True",
            "--train.compile True: a switch takes no value: give --train.compile or",
        ),
        (
            "--train.no-compile=1",
            "a switch takes no value: give --train.compile or --train.no-compile",
        ),
        ("--train.precision fp8", "'fp8' is not valid: it must be one of 'fp32', 'bf16', 'fp64'"),
        (
            "--train.recompute attention router",
            "'router' is not valid: it must be one of 'attention'",
        ),
        ("--data.weights 1 a", "--data.weights = 'a' is not valid: it must be a number"),
        ("--train.steps 1 2", "no option takes this: 2; lather train CONFIG --help"),
    ],
)
def test_one_mistake(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, QUICKSTART, *arguments.split())


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


def test_contradictions_between_options_speak_toml() -> None:
    for optim, message in (
        (
            {"use_eigh": True, "refresh_method": "qr"},
            "optim.use_eigh = true contradicts refresh_method = 'qr'",
        ),
        (
            {"betas": [0.9, 1.5]},
            "optim.betas = [0.9, 1.5] is not valid: give two numbers in [0, 1)",
        ),
        ({"rest": {"betas": [0.9, 1.5]}}, "optim.rest.betas = [0.9, 1.5] is not valid"),
        (
            {"state_dtype": "x"},
            "float32, float64, bfloat16, 'moments=bfloat16' or 'bases=bfloat16'",
        ),
        ({"state_dtype": "moments=int8"}, "optim.state_dtype = 'moments=int8' is not valid"),
    ):
        with pytest.raises(ConfigError) as error:
            config_from_mapping({"optim": {"name": "soap", **optim}})
        assert message in str(error.value)
