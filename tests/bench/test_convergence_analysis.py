"""The conclusions from rows, on rows whose conclusions are known."""

import math
from typing import Any

import pytest

from benchmarks.convergence.analysis import Findings, steps_to
from benchmarks.convergence.tables import markdown_table
from lather.sweep.intervals import Mean


def row(contestant: str, seed: int, losses: list[float], setting: str = "small") -> dict[str, Any]:
    """Make the row of a run with a validation every 10 steps."""
    curve = [[10 * index, loss] for index, loss in enumerate(losses)]
    steps = 10 * (len(losses) - 1)
    return {
        "setting": setting,
        "contestant": contestant,
        "seed": seed,
        "final": losses[-1],
        "validation": curve,
        "steps": steps,
        "rates": [1e-2, 2e-2],
    }


def cost(contestant: str, optimizer_ms: float) -> dict[str, Any]:
    ms = {"gradient_ms": {"median": 50.0}, "optimizer_ms": {"median": optimizer_ms}}
    return {
        "setting": "small",
        "contestant": contestant,
        "state_bytes": 800,
        "parameters": 100,
        **ms,
    }


def test_the_interval_is_students() -> None:
    """By hand, 1, 2, 3 have mean 2, standard deviation 1, standard error 1 / sqrt 3, and t is 4.303
    at two degrees of freedom."""
    mean = Mean.of([1.0, 2.0, 3.0])
    assert (mean.value, mean.count) == (2.0, 3)
    assert mean.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert Mean.of([1.0, 3.0]).half_width == pytest.approx(12.706)
    assert math.isnan(Mean.of([1.0]).half_width)
    assert Mean.of([1.0]).text(2) == "1.00"
    assert mean.text(1, signed=True) == "+2.0 ± 2.5"
    with pytest.raises(ValueError, match="at least one"):
        Mean.of([])


@pytest.mark.parametrize(
    ("loss", "steps"),
    [(5.0, 0.0), (4.0, 5.0), (3.0, 10.0), (2.5, 15.0), (2.0, 20.0), (1.0, math.inf)],
)
def test_steps_to_a_loss(loss: float, steps: float) -> None:
    """The curve is straight between points; if it rises again, the first time at the loss
    counts."""
    assert steps_to(row("a", 0, [5.0, 3.0, 2.0, 2.5]), loss) == steps


def test_comparisons_are_in_pairs() -> None:
    """Seeds differ by far more than contestants, so that only pairs show the difference."""
    rows = [row("muon", seed, [9.0, 5.0, 3.0 + seed]) for seed in (1, 2, 3)]
    rows += [row("adamw", seed, [9.0, 6.0, 4.0 + seed + 0.01 * seed]) for seed in (1, 2, 3)]
    findings = Findings(rows, [cost("muon", 25.0), cost("adamw", 0.0)])
    difference = findings.difference("small", "muon", "adamw")
    assert difference is not None
    assert difference.value == pytest.approx(-1.02)
    assert difference.half_width < 0.05 < findings.final("small", "muon").half_width
    assert findings.contestants("small") == ["muon", "adamw"]
    steps = findings.steps_ratio("small", "muon", "adamw")
    # seeds 1, 2, 3: from 5 down to 3 + seed in ten steps, to 4 + 1.01 seed (for seeds 1 and above
    # at 5 or more: before step 10)
    expected = [10 * (9 - (4 + 1.01 * seed)) / 4 for seed in (1, 2, 3)]
    assert steps is not None
    assert steps.value == pytest.approx(sum(expected) / 3 / 20)
    seconds = findings.seconds_ratio("small", "muon", "adamw")
    assert seconds is not None
    assert seconds.value == pytest.approx(steps.value * 75 / 50)


def test_what_is_not_there() -> None:
    findings = Findings([row("muon", 1, [9.0, 5.0]), row("adamw", 2, [9.0, 6.0])])
    assert findings.difference("small", "muon", "adamw") is None
    assert findings.cost("small", "muon") is None
    assert findings.seconds_ratio("small", "muon", "adamw") is None


def test_a_run_that_diverged_is_last() -> None:
    diverged = {**row("wild", 1, [9.0, 8.0]), "final": None}
    findings = Findings([diverged, row("adamw", 1, [9.0, 6.0])])
    assert findings.contestants("small") == ["adamw", "wild"]
    assert math.isinf(findings.final("small", "wild").value)


def test_the_table() -> None:
    rows = [row("muon", 1, [9.0, 4.0, 4.0]), row("adamw", 1, [9.0, 7.0, 6.0])]
    table = markdown_table(
        Findings(rows, [cost("muon", 25.0), cost("adamw", 5.0)]), "small", ["adamw"]
    )
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert lines[2] == ["`muon`", "0.01 / 0.02", "4.000", "-2.000", "0.30", "0.41", "25.0", "8.0"]
    assert lines[3] == ["`adamw`", "0.01 / 0.02", "6.000", "", "", "", "5.0", "8.0"]


def test_the_agreement_of_routing_at_the_end_and_percents() -> None:
    """The agreement is the mean over layers and then seeds; of runs without it the cell is
    empty."""
    rows = [row("muon", 1, [9.0, 4.0]), row("muon", 2, [9.0, 5.0])]
    for seed, layers in ((1, [1.0, 0.98]), (2, [1.0, 0.96])):
        agreement = [[0, [1.0, 0.5]], [10, layers]]
        rows.append(row("fp8", seed, [9.0, 4.04 + seed - 1]) | {"routing_agreement": agreement})
    findings = Findings(rows)
    assert findings.agreement("small", "muon") is None
    agreement = findings.agreement("small", "fp8")
    assert agreement is not None
    assert agreement.value == pytest.approx((0.99 + 0.98) / 2)
    percent = findings.percent_above("small", "fp8", "muon")
    assert percent is not None
    assert percent.value == pytest.approx((1.0 + 0.8) / 2)
    head, _, muon, fp8 = markdown_table(findings, "small", ["muon"]).splitlines()
    assert head.endswith("| choices as in bf16 |")
    assert muon.endswith("|  |")
    assert fp8.endswith("| 0.9850 ± 0.0635 |")


def test_a_loss_that_is_not_reached_by_every_seed() -> None:
    rows = [row("adamw", seed, [9.0, 7.0, 5.0]) for seed in (1, 2)]
    rows += [row("soap", 1, [9.0, 8.0, 6.0]), row("soap", 2, [9.0, 8.0, 4.0])]
    assert (
        markdown_table(Findings(rows), "small", ["adamw"]).splitlines()[-1].split(" | ")[4]
        == "in 1 of 2 seeds"
    )


def test_the_table_of_runs_that_were_validated_at_the_end_alone() -> None:
    rows = [row("muon", 1, [9.0, 4.0]), row("adamw", 1, [9.0, 6.0])]
    assert markdown_table(Findings(rows), "small", ["adamw"]).splitlines()[0].count("|") == 5
