"""What the command line says of arguments that do not fit: one line that is complete and no longer than it needs to be."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Annotated

import pytest
import tyro

from lather.commands.parsing import parse_arguments
from lather.errors import UserError, require


@dataclass(frozen=True)
class Section:
    rate: float = 1.0

    def __post_init__(self) -> None:
        require(self.rate > 0, "section.rate", self.rate, "greater than 0")


@dataclass(frozen=True)
class Arguments:
    place: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLACE")]
    """Where."""
    rounds: int = 5
    """How often."""
    section: Section = field(default_factory=Section)

    def __post_init__(self) -> None:
        require(self.rounds >= 5, "--rounds", self.rounds, "at least 5")


@pytest.fixture(params=["utf-8", "ascii"])
def _encoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The box is drawn in ASCII where the output cannot show lines."""
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=request.param))


@pytest.mark.usefixtures("_encoding")
@pytest.mark.parametrize("columns", ["60", "200"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["here", "--rounds", "1"], "--rounds = 1 is not valid: it must be at least 5"),
        (["here", "--section.rate", "-1"], "section.rate = -1.0 is not valid: it must be greater than 0"),
        (
            ["here", "--rounds", "x"],
            "Error parsing --rounds: invalid literal for int() with base 10: 'x'; lather x --help shows what it takes",
        ),
        ([], "Missing from lather x: PLACE Where. (required); lather x --help shows what it takes"),
        (["here", "--round", "7"], "Unrecognized options: --round, 7; did you mean --rounds?"),
    ],
    ids=str,
)
def test_messages(columns: str, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(UserError) as raised:
        parse_arguments(Arguments, "lather x", arguments)
    assert str(raised.value) == expected


def test_a_check_of_a_section_and_of_the_whole_when_there_are_defaults() -> None:
    for arguments, expected in {("--rounds", "1"): "--rounds = 1", ("--section.rate", "0"): "section.rate = 0.0"}.items():
        with pytest.raises(UserError) as raised:
            parse_arguments(Arguments, "lather x", ["here", *arguments], default=Arguments("there"))
        assert str(raised.value).startswith(expected)
