"""The bytes that each layer adds to a rank, and the partition by memory: from made-up bytes, and
against plans of all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from planned_configs import SIZES, config_of

from lather.config.config import Config
from lather.errors import ConfigError
from lather.memory.dry_rank import BUILDING
from lather.memory.dry_run import RankRun
from lather.memory.ledger import KINDS, Mark, MemoryTimeline
from lather.memory.plan import MemoryPlan, plan
from lather.memory.plan_report import describe_partition, to_json
from lather.memory.stage_bytes import (
    _rank_peaks,
    _Sample,
    _samples,
    block_kinds,
    memory_partition,
    phase_peaks,
)
from lather.memory.workers import Assumed
from lather.models.families import FAMILIES, build_model
from lather.pipeline.partition import uniform

LAYERS = 6


def deep_config(partition: str, **parallel: Any) -> Config:
    """Make sequences so long that most of a rank's bytes are activations; the first stage has
    activations of more chunks than the last."""
    config = config_of(
        "adamw", parallel={"pp": 2, "partition": partition, **parallel}, batch_size=4
    )
    model = FAMILIES["qwen3_moe"].config(**SIZES | {"num_hidden_layers": LAYERS})
    return replace(config, model=model, train=replace(config.train, sequence_length=256))


@pytest.fixture(scope="module")
def plans() -> dict[str, MemoryPlan]:
    return {name: plan(deep_config(name), 2, Assumed("cpu")) for name in ("uniform", "memory")}


def test_the_largest_rank_is_smaller_and_as_large_as_expected(plans: dict[str, MemoryPlan]) -> None:
    found = plans["memory"].partition
    assert found is not None
    assert sum(found.layers) == LAYERS
    assert found.layers != uniform(LAYERS, 4)
    assert [len(layers) for run in plans["memory"].ranks for layers in run.layers] == [
        found.layers[stage] for stage in (0, 3, 1, 2)
    ]
    assert plans["memory"].largest.peak < plans["uniform"].largest.peak
    assert plans["memory"].largest.peak == pytest.approx(found.largest, rel=0.01)
    assert plans["uniform"].largest.peak == pytest.approx(found.uniform_largest, rel=0.01)
    assert plans["uniform"].partition is None


def test_the_partition_is_shown_with_its_price(plans: dict[str, MemoryPlan]) -> None:
    found = plans["memory"]
    assert found.partition is not None
    bubble, uniform_bubble = found.bubble(), found.bubble(found.partition.uniform_layers)
    assert uniform_bubble > bubble > 0  # each rank has three layers, instead of two and four
    line = describe_partition(found, found.partition)
    assert " ".join(map(str, found.partition.layers)) in line
    assert f"bubble {bubble:.1%} instead of {uniform_bubble:.1%}" in line
    assert to_json(found)["partition"]["layers"] == found.partition.layers
    assert to_json(plans["uniform"])["partition"] is None


def test_nothing_is_searched_where_there_is_nothing_to_choose() -> None:
    assert memory_partition(deep_config("uniform"), 2, Assumed("cpu")) is None
    assert memory_partition(deep_config("memory", pp=1), 1, Assumed("cpu")) is None
    # four stages have four layers
    one_way = config_of("adamw", parallel={"pp": 2, "partition": "memory"})
    assert memory_partition(one_way, 2, Assumed("cpu")) is None


def test_too_few_layers_of_a_kind_are_refused_before_anything_is_run() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"needs three layers of one kind .* 5 layers of 3 "
            r"kinds have at most 2: set .*'uniform'"
        ),
    ):
        _samples(([0, 1], [2, 3], [4]), position=0, pp=2)


# --- from made-up bytes ---------------------------------------------------------------------------


def test_kinds_are_told_by_what_blocks_are_made_of() -> None:
    dense = FAMILIES["qwen3_moe"].config(
        **SIZES | {"num_hidden_layers": 6, "mlp_only_layers": (1, 4)}
    )
    assert block_kinds(build_model(dense, None, torch.device("meta")).layers) == [
        [0, 2, 3, 5],
        [1, 4],
    ]
    sliding = FAMILIES["gpt_oss"].config(num_hidden_layers=5)
    assert block_kinds(build_model(sliding, None, torch.device("meta")).layers) == [
        [0, 2, 4],
        [1, 3],
    ]


def test_samples_have_a_layer_in_each_stage_and_one_more() -> None:
    samples = _samples(([1, 2, 3], [0]), position=1, pp=3)
    base = ((), (1,), (), (), (2,), ())
    assert samples[0] == _Sample(1, base)
    assert {sample.added: (sample.layers[1], sample.layers[4]) for sample in samples[1:]} == {
        (0, 0): ((1, 3), (2,)),
        (0, 1): ((1,), (2, 3)),
        (1, 0): ((1, 0), (2,)),
        (1, 1): ((1,), (2, 0)),
    }


def test_sums_over_layers_give_back_every_sample() -> None:
    """The bytes are made of 10 for the rank, 1 and 2 for a layer of kinds 0 and 1 in the first
    stage, 3 and 5 for one in the second."""
    kinds = (0, 0, 0, 1)
    samples = _samples(([0, 1, 2], [3]), position=0, pp=1)
    adds = ({0: 1, 1: 2}, {0: 3, 1: 5})
    found = {
        sample: {
            "step: F": 10
            + sum(adds[stage][kinds[layer]] for stage in (0, 1) for layer in sample.layers[stage]),
            "step: less": 4,
        }
        for sample in samples
    }
    peaks = _rank_peaks(([0, 1, 2], [3]), found)
    assert peaks.base.tolist() == [10.0]
    assert peaks.first.tolist() == [[1.0, 1.0, 1.0, 2.0]]
    assert peaks.second.tolist() == [[3.0, 3.0, 3.0, 5.0]]


def test_a_phase_is_kept_if_some_number_of_layers_makes_it_the_largest() -> None:
    samples = _samples(([0, 1, 2],), position=0, pp=1)
    grows = {
        sample: {
            "grows": sum(map(len, sample.layers)),
            "is large": 5,
            "is as large": 5,
            "is small": 1,
        }
        for sample in samples
    }
    peaks = _rank_peaks(([0, 1, 2],), grows)
    assert sorted(zip(peaks.base.tolist(), peaks.first[:, 0].tolist(), strict=True)) == [
        (0.0, 1.0),
        (5.0, 0.0),
    ]


def test_phases_of_a_run_have_the_state_of_the_rank_that_owns_most() -> None:
    def timeline(*totals: int, marks: dict[int, str]) -> MemoryTimeline:
        curves = np.zeros((len(KINDS), len(totals)), np.int64)
        curves[0] = totals
        return MemoryTimeline(curves, {}, [Mark(time, name) for time, name in marks.items()])

    steps = {
        BUILDING: timeline(7, 8, marks={0: BUILDING}),
        "a step": timeline(1, 5, 2, 9, 3, marks={0: "F", 2: "B", 4: "F"}),
    }
    run = RankRun(0, 0, (), steps, {}, {0: 10, 1: 14})
    assert phase_peaks(run) == {f"{BUILDING}: {BUILDING}": 8, "a step: F": 9, "a step: B": 13}
