"""Messages of the command line about arguments that do not fit: one line that is complete and no
longer than it needs to be."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated

import pytest

from lather.argument import Argument
from lather.commands.options import CommandOption, options_of_command
from lather.commands.parsing import parse_arguments
from lather.commands.plan import PlanArguments
from lather.config.config import Config
from lather.config.optim import optim_config
from lather.config.suggestions import NAMES, nearest_fields
from lather.config.toml_file import values_of_config
from lather.errors import UserError, require
from lather.models.families import FAMILIES
from lather.models.rotary import YarnConfig
from lather.optim.rules import RULES


@dataclass(frozen=True)
class Section:
    rate: float = 1.0

    def __post_init__(self) -> None:
        require(self.rate > 0, "section.rate", self.rate, "greater than 0")


@dataclass(frozen=True)
class Arguments:
    place: Annotated[str, Argument(positional=True, metavar="PLACE")]
    """Where."""
    rounds: int = 5
    """How often."""
    section: Section = field(default_factory=Section)

    def __post_init__(self) -> None:
        require(self.rounds >= 5, "--rounds", self.rounds, "at least 5")


@pytest.fixture(params=["utf-8", "ascii"])
def _encoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the output's encoding one that can show the box's lines, or ASCII, for which the box is
    drawn in ASCII."""
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=request.param))


@pytest.mark.usefixtures("_encoding")
@pytest.mark.parametrize("columns", ["40", "200"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["here", "--rounds", "1"], "--rounds = 1 is not valid: it must be at least 5"),
        (
            ["here", "--section.rate", "-1"],
            "section.rate = -1.0 is not valid: it must be greater than 0",
        ),
        (
            ["here", "--rounds", "x"],
            "--rounds = 'x' is not valid: it must be an integer",
        ),
        ([], "PLACE is missing: Where; lather x --help shows what it takes"),
        (["here", "--round", "7"], "unknown option --round; did you mean --rounds?"),
        (
            ["here", "--section.rate-of-the-whole-and-of-parts", "7"],
            "unknown option --section.rate-of-the-whole-and-of-parts; lather x --help shows what "
            "it takes",
        ),
    ],
    ids=str,
)
def test_messages(
    columns: str, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(UserError) as raised:
        parse_arguments(Arguments, "lather x", arguments)
    assert str(raised.value) == expected


def test_a_check_of_a_section_and_of_the_whole() -> None:
    for arguments, expected in {
        ("--rounds", "1"): "--rounds = 1",
        ("--section.rate", "0"): "section.rate = 0.0",
    }.items():
        with pytest.raises(UserError) as raised:
            parse_arguments(Arguments, "lather x", ["here", *arguments])
        assert str(raised.value).startswith(expected)


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


def test_options_are_those_that_the_parser_takes() -> None:
    """There is one option of each kind: in a section, with a dash, a switch, an option of a rule,
    an option of the command itself."""
    found = {flag for option in options_of_command(PlanArguments) for flag in option.flags}
    arguments = [
        "--train.batch-size",
        "16",
        "--data.no-packed-attention",
        "--optim.weight-decay",
        "0.1",
        "--world",
        "2",
    ]
    flags = [argument for argument in arguments if argument.startswith("--")]
    assert set(flags) <= found
    assert "--model.rope-scaling" not in found  # a section that is left out has no options
    parsed = parse_arguments(PlanArguments, "lather plan", arguments)
    assert (parsed.world, parsed.config.train.batch_size) == (2, 16)
