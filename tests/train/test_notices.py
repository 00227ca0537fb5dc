"""Notices of a run: collapsed experts are told once, a transient after the start is not; and so are
steps and held-out sets in which nothing is learned."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from changing_runs import Shown
from lather.config.config import Config
from lather.models.families import FAMILIES
from lather.models.lora import LoraConfig
from lather.train import notices
from lather.train.loop import train
from lather.train.notices import SETTLED, WINDOW, ExpertWatch, uneven_blocks

EVEN = torch.tensor([[100, 100, 100, 100], [120, 90, 110, 80]])
DEAD = torch.tensor([[100, 100, 100, 100], [200, 4, 100, 96]])


def collapses(counts: list[torch.Tensor], steps: int = 300, start: int = 0) -> dict[int, str]:
    """Return the sentences of a watch by the step of each."""
    watch = ExpertWatch(2, steps)
    sentences = {step: watch.collapse(step, x_LE) for step, x_LE in enumerate(counts, start + 1)}
    return {step: sentence for step, sentence in sentences.items() if sentence}


@pytest.mark.parametrize(
    ("steps", "start", "first"),
    [(300, 0, SETTLED + 2 * WINDOW), (300, 200, 200 + 2 * WINDOW), (80, 0, 80)],
    ids=["random weights", "resumed", "half of a short run"],
)
def test_collapse_is_found_after_two_windows(steps: int, start: int, first: int) -> None:
    found = collapses([DEAD] * 100, steps, start)
    assert min(found) == first
    assert found[first] == (
        f"the experts of MoE block 1 have collapsed: in steps {first - 19} to {first} their loads "
        "are between 0.04 and 2.00 of an even one"
    )


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
def test_other_loads_are_no_collapse(counts: list[torch.Tensor]) -> None:
    assert collapses(counts) == {}


@pytest.mark.parametrize(
    ("load", "num_experts_per_tok", "is_uneven"),
    [
        ([1.0, 1.0], 1, False),
        ([0.09, 1.91], 1, True),
        ([0.11, 1.89], 1, False),
        ([3.1, *[0.7] * 7], 2, True),  # an expert of eight can have 4
        ([2.9, *[0.73] * 7], 2, False),
        ([7.9, *[0.94] * 127], 8, False),  # an expert of 128 can have 16
        ([8.1, *[0.94] * 127], 8, True),
        ([*[0.0] * 7, *[1.06] * 121], 8, False),  # of many experts, a few may be unused
        ([*[0.0] * 8, *[1.07] * 120], 8, True),
    ],
)
def test_uneven_loads(load: list[float], num_experts_per_tok: int, is_uneven: bool) -> None:
    assert uneven_blocks(torch.tensor([load]), num_experts_per_tok) == ({0} if is_uneven else set())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_default_coefficient_is_strong_in_a_small_model(model_type: str) -> None:
    """Measured with models of four MoE blocks and eight experts, two for each token. Families whose
    configuration has no coefficient have no balance loss, as in transformers."""
    config = FAMILIES[model_type].config(num_hidden_layers=4)
    num_dense = sum(map(config.is_dense, range(4)))
    if {field.name for field in fields(config)} & set(config.balance_fields):
        assert 0.01 <= replace(config, num_hidden_layers=4 + num_dense).balance_loss_coef <= 0.015
    else:
        assert config.balance_loss_coef == 0


@pytest.mark.parametrize(("old", "new"), [(0.001, "0.015 (now 0.001)"), (0.02, "0.06 (now 0.02)")])
def test_a_run_tells_of_a_collapse_once_with_a_stronger_coefficient(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, old: float, new: str
) -> None:
    """An even load passes for a collapse here."""
    constants: dict[str, Any] = {"WINDOW": 2, "SETTLED": 2, "LEAST_ROWS": 1, "LEAST_LOAD": 1.5}
    for name, value in constants.items():
        monkeypatch.setattr(notices, name, value)
    shown = Shown()
    train(make_config(train={"steps": 10}, moe={"balance_coefficient": old}), shown)
    (note,) = [note for note in shown.notes if "collapsed" in note]
    assert note.startswith("note: the experts of MoE block 0 have collapsed: in steps 5 to 6 ")
    assert f"--moe.balance-coefficient {new}" in note


@pytest.mark.parametrize(
    ("weights", "optim", "is_told"),
    [
        ("bfloat16", {"weight_rounding": "nearest"}, True),
        ("bfloat16", {"experts": {"weight_rounding": "nearest"}}, True),
        ("bfloat16", {}, False),
        ("float32", {"weight_rounding": "nearest"}, False),
    ],
)
def test_a_run_that_loses_small_changes_says_so(
    make_config: Callable[..., Config], weights: str, optim: dict[str, Any], is_told: bool
) -> None:
    shown = Shown()
    loop = {"steps": 1, "precision": "bf16", "weight_dtype": weights}
    train(make_config(train=loop, optim=optim), shown)
    told = [note for note in shown.notes if "'nearest' loses the changes of bf16" in note]
    assert len(told) == is_told


NEAREST = {"weight_rounding": "nearest"}


@pytest.mark.parametrize(
    ("rank", "trainable", "optim", "tied", "is_told"),
    [
        (4, ("lm_head*",), NEAREST, False, True),
        (4, (), NEAREST, False, False),
        (0, (), {"rest": NEAREST}, False, True),
        (0, (), {"rest": NEAREST}, True, False),
        (0, ("*norm*",), NEAREST, False, False),
    ],
    ids=["adapters and a head", "adapters", "an untied head", "a tied head", "norms"],
)
def test_only_trained_weights_in_bf16_lose_changes(
    make_config: Callable[..., Config],
    rank: int,
    trainable: tuple[str, ...],
    optim: dict[str, Any],
    tied: bool,
    is_told: bool,
) -> None:
    loop = {"precision": "bf16", "weight_dtype": "bfloat16", "trainable": trainable}
    config = make_config(train=loop, optim=optim)
    model = replace(config.model, tie_word_embeddings=tied)
    config = replace(config, model=model, lora=LoraConfig(rank))
    assert notices._loses_small_changes(config) == is_told
