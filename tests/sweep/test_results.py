"""The rows of a sweep: their order, the best of them, and what is said about them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from lather.config.config import Config
from lather.sweep.grid import GridRun
from lather.sweep.picture import draw
from lather.sweep.record import origin_of
from lather.sweep.results import RunResult, SweepRow, best_of, notes_on, rows_of


def rows(losses: Mapping[tuple[tuple[str, str], ...], list[float | None]]) -> list[SweepRow]:
    """Rows of these values, each with the losses of its seeds; None: not there yet."""
    runs = {
        GridRun(dict(values), Config(seed=seed)).key: (
            GridRun(dict(values), Config(seed=seed)),
            loss,
        )
        for values, each in losses.items()
        for seed, loss in enumerate(each)
    }
    results = {key: RunResult(loss) for key, (_, loss) in runs.items() if loss is not None}
    return rows_of([run for run, _ in runs.values()], results)


def over(name: str, losses: Mapping[str, list[float | None]]) -> list[SweepRow]:
    return rows({((name, value),): each for value, each in losses.items()})


def test_the_best_row_is_complete_and_has_not_diverged() -> None:
    found = over(
        "optim.lr",
        {
            "1": [3.0, 3.2],
            "2": [2.0, None],
            "3": [1.0, math.inf],
            "4": [3.0, 3.1],
            "5": [None, None],
        },
    )
    assert [row.values["optim.lr"] for row in found] == ["2", "4", "1", "3", "5"]
    best = best_of(found)
    assert best is not None
    assert best.values == {"optim.lr": "4"}
    assert best_of(over("optim.lr", {"1": [math.inf], "2": [None]})) is None


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({"1": [3.0], "2": [2.0], "10": [math.inf]}, "The best optim.lr, 2, lies between others."),
        (
            {"1": [3.0], "2": [2.0], "10": [1.0]},
            "at the edge of its values: extend them with higher",
        ),
        (
            {"1": [1.0], "2": [2.0], "10": [3.0]},
            "at the edge of its values: extend them with lower",
        ),
    ],
)
def test_the_place_of_the_best_number_is_said(
    losses: dict[str, list[float | None]], said: str
) -> None:
    (note,) = notes_on(over("optim.lr", losses))
    assert said in note


def test_the_place_is_among_rows_that_are_equal_otherwise() -> None:
    """The rate of another rule does not make the best rate an inner one."""
    found = rows(
        {
            (("optim.lr", "1"), ("optim.name", "muon")): [3.0],
            (("optim.lr", "2"), ("optim.name", "muon")): [2.0],
            (("optim.lr", "4"), ("optim.name", "soap")): [2.5],
        }
    )
    (note,) = notes_on(found)
    assert "The best optim.lr, 2, is at the edge" in note


def test_equal_losses_have_no_best_at_an_edge() -> None:
    (note,) = notes_on(over("optim.lr", {"1": [2.0], "2": [3.0], "4": [2.0]}))
    assert note == "The lowest loss is the same at optim.lr 1 and 4."


def test_averages_that_do_not_count_are_told() -> None:
    found = over("train.average_timescale", {"0.1": [2.0], "0.2": [2.0]})
    (note,) = notes_on(found)
    assert "are of the raw weights: add --weights average" in note
    (note,) = notes_on(found, "average")
    assert "is the same at train.average_timescale 0.1 and 0.2" in note
    (note,) = notes_on(over("train.average_timescale", {"0": [2.0], "0.2": [2.0]}))
    assert note.endswith("add --weights average and leave 0 out")


def test_how_data_are_used_does_not_make_other_data_sets() -> None:
    config = Config()
    changes: list[tuple[dict[str, Any], bool]] = [
        ({"packed_attention": False}, True),
        ({"source": "texts"}, False),
    ]
    for change, is_same in changes:
        other = replace(config, data=replace(config.data, **change))
        assert (origin_of(other) == origin_of(config)) == is_same


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.sequence_length", "are of different tokens: do not compare them"),
        ("data.source", "are of different tokens: do not compare them"),
        ("train.batch_size", "have trained on more or fewer tokens"),
        ("train.first_batch_size", "have trained on more or fewer tokens"),
        ("train.batch_growth_steps", "have trained on more or fewer tokens"),
    ],
)
def test_rows_that_cannot_be_compared_are_named(name: str, said: str) -> None:
    assert said in [*notes_on(over(name, {"8": [3.0], "16": [2.0]}))][-1]
    assert not [*notes_on(over(name, {"8": [3.0]}))]


@pytest.mark.parametrize("values", [["1e-3", "1e-2", "1"], ["muon", "soap", "x$y"], ["1e-3"]])
def test_pictures_of_numbers_of_words_and_of_one_row(values: list[str], tmp_path: Path) -> None:
    found = over("optim.lr", {value: [3.0, 2.5, 2.0] for value in values})
    draw([*found, *over("optim.lr", {"5": [math.inf]})], tmp_path / "sweep.png", "loss")
    assert imread(tmp_path / "sweep.png").shape[1] > 500
