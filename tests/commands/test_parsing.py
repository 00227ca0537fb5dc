"""The road from a command line or a TOML file to typed fields: options and their words, values of
each type, messages, and names that are meant by unknown ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from lather.argument import Argument
from lather.cli import main
from lather.commands.options import CommandOption, options_of_command
from lather.commands.parsing import parse_arguments, read_line, values_of_line
from lather.commands.plan import PlanArguments
from lather.commands.train import read_arguments
from lather.config.config import Config
from lather.config.fields import Word, convert
from lather.config.optim import optim_config
from lather.config.suggestions import NAMES, nearest_fields
from lather.config.toml_file import config_from_mapping, values_of_config
from lather.errors import ConfigError, UserError, as_toml, require
from lather.models.families import FAMILIES
from lather.models.rotary import YarnConfig
from lather.optim.options import at_least
from lather.optim.rules import RULES

QUICKSTART = str(Path(__file__).parents[2] / "configs/quickstart.toml")


@dataclass(frozen=True)
class Section:
    rate: float = 1.0

    def __post_init__(self) -> None:
        require(self.rate > 0, "section.rate", self.rate, "greater than 0")


@dataclass(frozen=True)
class Arguments:
    place: Annotated[str, Argument(positional=True, metavar="PLACE")]
    """Where."""
    rounds: Annotated[int, at_least(5)] = 5
    """How often."""
    section: Section = field(default_factory=Section)


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("here --rounds 1", "--rounds = 1 is not valid: it must be an integer >= 5"),
        ("here --section.rate -1", "section.rate = -1.0 is not valid: it must be greater than 0"),
        ("here --rounds x", "--rounds = 'x' is not valid: it must be an integer"),
        ("", "PLACE is missing: Where; lather x --help shows what it takes"),
        ("here --round 7", "unknown option --round; did you mean --rounds?"),
        ("here --quite 7", "unknown option --quite; lather x --help shows what it takes"),
        ("here --section 7", "unknown option --section; it is a section: give its fields, such as "
         "--section.rate"),
    ],
)  # fmt: skip
def test_messages(line: str, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_arguments(Arguments, "lather x", line.split())
    assert str(raised.value) == expected


def test_an_error_names_the_file_where_the_value_is_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[train]\nsteps = 0\n")
    message = "train.steps = 0 is not valid: it must be an integer >= 1"
    for line, expected in (
        (f"train {file} --seed 3", f"{file}: {message}"),
        (f"plan {file} --out steps.png", f"{file}: {message}"),
        (f"train {QUICKSTART} --train.steps 0", message),
    ):
        assert main(line.split()) == 2
        assert capsys.readouterr().err == f"lather: error: {expected}\n"
    assert read_arguments([str(file), "--train.steps", "5"])[0].train.steps == 5


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
                message = ""
                try:
                    config_from_mapping({"optim": {"name": rule, **mapping}})
                except ConfigError as error:
                    message = str(error)
                assert not re.search(PYTHON, message), message


# --- values ---------------------------------------------------------------------------------------


def test_a_line_is_divided_at_its_options() -> None:
    options = [("--x", ["1", "-2"]), ("--y", ["3", "4"]), ("--z", [])]
    line = "a --x 1 -2 --y=3 4 --z -- --y=3"
    assert read_line(line.split()) == [("", ["a"]), *options, ("", ["--y=3"])]


def test_what_follows_the_values_of_an_option_is_an_argument_by_its_place() -> None:
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


@pytest.mark.parametrize(
    ("word", "hint", "value"),
    [
        ("3", int | None, 3),
        ("None", int | None, None),
        ("None", str, "None"),
        ("3", float, 3.0),
        ("true", bool | None, True),
        ("0.5", float | str, 0.5),
        ("spectral", float | str, "spectral"),
        ("fp32", Literal["fp32", "bf16"] | None, "fp32"),
        ("a/b", Path | None, Path("a/b")),
        ("folder", int, "an integer"),
        ("yes", bool | None, "true or false"),
        ("x", int | float, "an integer or a number"),
    ],
)
def test_a_word_is_read_as_what_the_field_holds(word: str, hint: Any, value: object) -> None:
    read: object
    try:
        read = convert(Word(word, "--x"), hint, "x")
    except ConfigError as error:
        read = str(error).removeprefix(f"--x = '{word}' is not valid: it must be ")
    assert (type(read), read) == (type(value), value)


def test_options_of_a_command_and_of_its_configuration() -> None:
    """There is one option of each kind: in a section, with a dash, a switch, an option of a rule,
    an option of the command itself."""
    line = "--train.batch-size 16 --data.no-packed-attention --optim.weight-decay 0.1 --world 2"
    parsed = parse_arguments(PlanArguments, "lather plan", line.split())
    config = parsed.config
    assert (parsed.world, config.train.batch_size, config.optim.rule.weight_decay) == (2, 16, 0.1)


def test_the_command_line_may_choose_the_model_family(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[train]\nsteps = 5\n")
    arguments = ["--model.model-type", "qwen3_moe", "--model.mlp-only-layers", "0"]
    assert read_arguments([str(file), *arguments])[0].model.model_type == "qwen3_moe"


# --- names that are meant -------------------------------------------------------------------------

MEANT = {
    "optim.learning_rate": ["optim.lr"],
    "learning_rate": ["optim.lr"],
    "train.lr": ["optim.lr"],
    "optim.rset.lr": ["optim.rest.lr"],
    "train.weight_decay": ["optim.weight_decay"],
    "adam_beta1": ["optim.rest.betas"],
    "beta1": ["optim.momentum"],
    "optim.beta1": ["optim.momentum"],
    "optim.rest.beta1": ["optim.rest.betas"],
    "train.rope_factr": [],
    "model.rope_scaling.fctor": ["model.rope_scaling.factor"],
    "model.rope_scaling_factor": ["model.rope_scaling.factor"],
    "parallel.tp": [],
    "optim.ns_steps": ["optim.steps"],
    "trian.setps": ["train.steps"],
    "train.warmup_step": ["optim.warmup_steps"],
    "per_device_train_batch_size": ["train.micro_batch_size"],
    "batch_size": ["train.batch_size"],
    "train.max_steps": ["train.steps"],
    "num_steps": ["train.steps"],
    "max_seq_len": ["train.sequence_length"],
    "data.tokeniser": ["data.tokenizer"],
    "worl": ["world"],
    "surprise": [],
}


def test_what_an_unknown_option_may_mean() -> None:
    options = {option.name: option for option in options_of_command(PlanArguments)}
    assert {name: nearest_fields(name, options) for name in MEANT} == MEANT
    of_tokens = {"sequence_length", "max_sequences", "tokens", "batch_size"}
    assert nearest_fields("max_seq_len", of_tokens) == ["sequence_length"]


def test_names_of_other_trainers_lead_to_fields_that_exist_or_to_a_reason() -> None:
    known = {option.name for option in all_options()}
    ends = {name.rpartition(".")[2] for name in known if name.startswith("optim.")}
    for row in NAMES:
        assert row.field in known | ends or (row.note and not row.field), row
        for name in row.names.split():
            meant = nearest_fields(name, known)
            assert any(row.means(field) for field in meant) or not row.field, (name, meant)
        for name in re.findall(r"\b[a-z]+\.[a-z_]+\b", row.note.replace("docs/memory.md", "")):
            assert name in known or name == "model.rope_scaling", name


def test_a_name_without_a_field_stands_nowhere_else() -> None:
    without_field = {name for row in NAMES if not row.field for name in row.names.split()}
    assert not without_field & {name for row in NAMES if row.field for name in row.names.split()}


def all_options() -> Iterator[CommandOption]:
    for family in FAMILIES.values():
        for rule in RULES:
            model = replace(family.config(), rope_scaling=YarnConfig())
            config = Config(model=model, optim=optim_config(rule))
            yield from options_of_command(Config, values_of_config(config))
