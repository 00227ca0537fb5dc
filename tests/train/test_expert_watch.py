"""Collapsed experts are noticed, once, and a transient after the start or a narrow text is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from changing_runs import Shown
from lather.config.config import Config, LoopConfig, MoEConfig
from lather.config.toml_file import config_to_toml
from lather.models.families import FAMILIES
from lather.train import expert_watch, loop, notices
from lather.train.expert_watch import (
    SETTLED,
    WINDOW,
    ExpertWatch,
    collapsed_blocks,
    describe,
    remedy,
)
from lather.train.report import collapses

EVEN = torch.tensor([[100, 100, 100, 100], [120, 90, 110, 80]])
DEAD = torch.tensor([[100, 100, 100, 100], [200, 4, 100, 96]])


def first_word(
    counts: list[torch.Tensor], steps: int = 300, *, is_trained: bool = False, start: int = 0
) -> Any:
    """Return the step at which the watch speaks, and what it says."""
    watch = ExpertWatch(2, steps, is_trained=is_trained)
    said = [
        (step, found)
        for step, one in enumerate(counts, start + 1)
        if (found := watch.saw(step, one)) is not None
    ]
    assert len(said) <= 1
    return said[0] if said else None


def test_collapse_is_told_once_after_two_windows() -> None:
    step, (block, least, most) = first_word([DEAD] * 300)
    assert step == SETTLED + 2 * WINDOW
    assert block == 1
    assert (least, most) == pytest.approx((0.04, 2.0))


def test_a_resumed_run_is_watched_from_its_step_on() -> None:
    assert first_word([DEAD] * 100, start=200)[0] == 200 + 2 * WINDOW


@pytest.mark.parametrize(
    "counts",
    [
        [EVEN] * 300,
        [DEAD] * 79 + [EVEN] * 221,  # a transient
        ([DEAD] * 20 + [EVEN] * 20) * 7,  # one window at a time
        [DEAD // 100] * 300,  # too few rows to say anything
        [torch.zeros(0, 0, dtype=torch.int64)] * 300,  # a model without experts
    ],
    ids=["even", "transient", "now and then", "few rows", "dense"],
)
def test_other_loads_are_not_told(counts: list[torch.Tensor]) -> None:
    assert first_word(counts) is None


def test_half_of_a_short_run_counts() -> None:
    assert first_word([DEAD] * 80, steps=80)[0] == 80


def test_blocks_of_trained_weights_that_are_uneven_from_the_start_are_excused() -> None:
    assert first_word([DEAD] * 300, is_trained=True) is None
    other = torch.tensor([[390, 10, 0, 0], [200, 4, 100, 96]])
    step, (block, *_) = first_word([DEAD] * WINDOW + [other] * 100, is_trained=True)
    assert (step, block) == (3 * WINDOW, 0)


@pytest.mark.parametrize(
    ("load", "num_experts_per_tok", "expected"),
    [
        ([[1.0, 1.0]], 1, []),
        ([[0.09, 1.91]], 1, [0]),
        ([[0.11, 1.89]], 1, []),
        ([[3.1, *[0.7] * 7]], 2, [0]),  # an expert of eight can have 4
        ([[2.9, *[0.73] * 7]], 2, []),
        ([[7.9, *[0.94] * 127]], 8, []),  # an expert of 128 can have 16
        ([[8.1, *[0.94] * 127]], 8, [0]),
        ([[*[0.0] * 7, *[1.06] * 121]], 8, []),  # of many experts, a few may be unused
        ([[*[0.0] * 8, *[1.07] * 120]], 8, [0]),
    ],
)
def test_what_is_uneven(
    load: list[list[float]], num_experts_per_tok: int, expected: list[int]
) -> None:
    assert (
        collapsed_blocks(torch.tensor(load, dtype=torch.float64), num_experts_per_tok) == expected
    )


def test_the_remedy_is_stronger_than_what_there_is() -> None:
    assert "--moe.balance-coefficient 0.015 (now 0.0005)" in remedy(0.0005)
    assert "--moe.balance-coefficient 0.045 (now 0.015)" in remedy(0.015)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_default_coefficient_is_strong_in_a_small_model(model_type: str) -> None:
    """Measured with models of four MoE blocks and eight experts, two for each token."""
    config = FAMILIES[model_type].config(num_hidden_layers=4)
    assert 0.01 <= config.balance_loss_coef <= 0.015


def test_a_run_says_it_once(
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    display = Shown()
    for module in (expert_watch, notices):
        monkeypatch.setattr(module, "WINDOW", 2)
    for name, value in {"SETTLED": 2, "LEAST_ROWS": 1, "LEAST_LOAD": 1.5}.items():
        monkeypatch.setattr(expert_watch, name, value)  # an even load passes for a collapse
    changes = {"train": {"steps": 12}, "moe": {"balance_coefficient": 0.001}}
    loop.train(make_config(**changes), display)
    (note,) = [note for note in display.notes if "collapsed" in note]
    assert note.startswith(
        "note: the experts of MoE block 0 have collapsed: in steps 5 to 6 their loads"
    )
    assert note.endswith(remedy(0.001))
    assert "\n" not in note


def test_the_report_says_it(tmp_path: Path) -> None:
    config = Config(
        run_dir=str(tmp_path), train=LoopConfig(steps=300), moe=MoEConfig(balance_coefficient=0.001)
    )
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    rows = [{"step": step, "expert_load": [[1.0, 1.0], [1.98, 0.02]]} for step in (50, 100, 200)]
    sentence = f"{describe(1, [200], 0.02, 1.98)}; {remedy(0.001)}"
    assert collapses(rows, tmp_path) == [["", sentence]]
    assert collapses(rows[:1], tmp_path) == []
    assert collapses([*rows, {"step": 300, "expert_load": [[1.0, 1.0]] * 2}], tmp_path) == []
