"""The learning rate over the steps of a run, of `[optim]` and of kinds of parameters."""

import itertools
import math
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lather.config.optim import optim_config
from lather.config.rate_schedule import Shape
from lather.engine.step import learning_rate
from lather.errors import ConfigError

SHAPES = get_args(Shape)


@pytest.mark.parametrize("schedule", SHAPES)
def test_the_rate_at_the_ends_of_warm_up_and_decay(schedule: str) -> None:
    config = optim_config(
        lr=2.0, schedule=schedule, warmup_steps=10, decay_fraction=0.25, min_lr_ratio=0.1
    )
    rates = [learning_rate(step, config, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[9] == 2.0
    assert rates[-1] == (2.0 if schedule == "constant" else pytest.approx(0.2))
    step, rate = {"linear": (55, 1.1), "cosine": (55, 1.1)}.get(schedule, (75, 2.0))
    assert learning_rate(step, config, 100) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        ("wsd", lambda left: left),
        ("1-sqrt", lambda left: 1 - math.sqrt(1 - left)),
        ("power", lambda left: left * left * left),
    ],
)
def test_a_cooldown_is_constant_and_then_decays(
    schedule: str, shape: Callable[[float], float]
) -> None:
    """`left`: the fraction of the cooldown that is left."""
    cooldown = {"schedule": schedule, "decay_fraction": 0.2, "decay_power": 3.0}
    config = optim_config(lr=0.5, warmup_steps=10, min_lr_ratio=0.0, **cooldown)
    rates = [learning_rate(step, config, 100) for step in range(10, 101)]
    decay = [0.5 * shape((100 - step) / 20) for step in range(81, 101)]
    assert rates == pytest.approx([0.5] * 71 + decay, abs=1e-15)


@pytest.mark.parametrize(("schedule", "rate"), [("constant", 1.0), ("linear", 0.9)])
def test_without_warm_up_the_first_step_is_on_the_schedule(schedule: str, rate: float) -> None:
    config = optim_config(lr=1.0, warmup_steps=0, schedule=schedule, min_lr_ratio=0.0)
    assert learning_rate(1, config, 10) == pytest.approx(rate)


def test_fractions_of_a_run_take_at_least_one_step() -> None:
    few = optim_config(lr=1.0, schedule="wsd", warmup_steps=0.001, decay_fraction=0.001)
    assert [learning_rate(step, few, 4) for step in (1, 2, 3, 4)] == [1.0, 1.0, 1.0, 0.1]
    assert learning_rate(1, few, 1) == 1.0  # both: the one step is warm-up
    tenth = optim_config(lr=1.0, schedule="constant", warmup_steps=0.1)
    assert [learning_rate(step, tenth, 40) for step in range(1, 6)] == [0.25, 0.5, 0.75, 1, 1]
    assert [learning_rate(step, tenth, 20) for step in (1, 2)] == [0.5, 1]
    longer = optim_config(lr=1.0, warmup_steps=8)
    assert [learning_rate(step, longer, 4) for step in (1, 4)] == [0.125, 0.5]


@given(
    st.sampled_from(SHAPES),
    st.integers(1, 300),
    st.integers(0, 400),
    st.floats(0.0001, 1),
    st.floats(0, 1),
    st.floats(1e-6, 10),
    st.floats(0.1, 9),
)
@settings(deadline=None, max_examples=100)
def test_the_rate_stays_between_its_ends_and_never_rises(
    schedule: str, steps: int, warmup: int, decay: float, ratio: float, lr: float, power: float
) -> None:
    shape = {"schedule": schedule, "decay_fraction": decay, "decay_power": power}
    config = optim_config(lr=lr, warmup_steps=warmup, min_lr_ratio=ratio, **shape)
    rates = [learning_rate(step, config, steps) for step in range(1, steps + 1)]
    assert all(0 < rate <= lr * (1 + 1e-12) for rate in rates[:warmup])
    after = rates[warmup:]
    assert all(lr * ratio * (1 - 1e-12) <= rate <= lr * (1 + 1e-12) for rate in after)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(after))
    if after and schedule != "constant":
        assert after[-1] == pytest.approx(lr * ratio)


# --- kinds of parameters --------------------------------------------------------------------------


def test_a_kind_has_the_schedule_of_optim_where_it_sets_none() -> None:
    rest = {"schedule": "cosine", "warmup_steps": 0.5, "decay_fraction": 0.3}
    config = optim_config(lr=1.0, min_lr_ratio=0.2, decay_power=3.0, rest=rest)
    assert config.own_schedules().keys() == {"rest", "router"}
    assert config.own_schedules(has_experts=False).keys() == {"rest"}
    schedule = config.schedule_of("rest")
    assert (schedule.schedule, schedule.warmup_steps, schedule.decay_fraction) == (
        *("cosine", 0.5, 0.3),
    )
    assert (schedule.decay_power, schedule.min_lr_ratio) == (3.0, 0.2)
    assert schedule.describe(100) == "cosine, 50 steps of warm-up"
    assert config.schedule_of("router") == schedule
    assert config.schedule_of("matrices") == config.schedule_of("experts") == config.schedule_of()


def test_a_router_with_a_rule_does_not_have_the_schedule_of_the_rest() -> None:
    rest, router = {"warmup_steps": 7}, {"min_lr_ratio": 0.5}
    follows = optim_config(rest=rest, router=router).schedule_of("router")
    assert (follows.warmup_steps, follows.min_lr_ratio) == (7, 0.5)
    alone = optim_config(rest=rest, router={"rule": "adamw", **router}).schedule_of("router")
    assert (alone.warmup_steps, alone.min_lr_ratio) == (20, 0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"warmup_steps": 1.0}, "optim.warmup_steps = 1.0 .* an integer >= 0, or a fraction of"),
        ({"warmup_steps": -1}, "optim.warmup_steps = -1 is not valid"),
        ({"decay_power": 0.0}, "optim.decay_power = 0.0 is not valid: it must be a number > 0"),
        ({"rest": {"warmup_steps": 1.5}}, r"optim\.rest\.warmup_steps = 1.5"),
        ({"router": {"decay_fraction": 0.0}}, r"optim\.router\.decay_fraction = 0.0"),
        ({"experts": {"min_lr_ratio": 2.0}}, r"optim\.experts\.min_lr_ratio = 2.0"),
    ],
)
def test_a_value_out_of_range_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optim_config(**values)
