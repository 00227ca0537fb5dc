"""Which numbers of ranks a configuration fits: refused with the numbers and the remedy before
anything is started."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from lather.config.config import Config, ParallelConfig
from lather.config.loop import LoopConfig
from lather.config.ranks import check_parallel
from lather.errors import ConfigError
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.models.families.gpt_oss import GptOssConfig
from lather.models.families.qwen3_moe import Qwen3MoeConfig


def config(
    batch_size: int = 8, micro_batch_size: int = 1, layers: int = 8, **parallel: object
) -> Config:
    return Config(
        model=DeepseekV2Config(num_hidden_layers=layers, n_routed_experts=6),
        train=LoopConfig(batch_size=batch_size, micro_batch_size=micro_batch_size),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("pp", "dp", "ep", "replicas", "micro"),
    list(itertools.product([1, 2, 4], [1, 2], [1, 3], [1, 2], [1, 2])),
)
def test_the_smallest_batch_that_fits_is_accepted_and_one_micro_batch_less_is_not(
    pp: int, dp: int, ep: int, replicas: int, micro: int
) -> None:
    if dp % replicas:
        return
    needed = (2 * pp if pp > 1 else 1) * dp * ep * micro
    enough = config(needed, micro, pp=pp, ep=ep, replicas=replicas)
    check_parallel(enough, pp * dp * ep)
    if needed > dp * ep * micro:
        less = replace(enough, train=replace(enough.train, batch_size=needed - dp * ep * micro))
        with pytest.raises(ConfigError, match="micro-batches"):
            check_parallel(less, pp * dp * ep)


def test_a_micro_batch_size_that_is_left_out_gives_as_few_micro_batches_as_will_do() -> None:
    for batch_size, pp, data_ranks, expected in [
        (8, 1, 1, 1),
        (8, 1, 2, 1),
        (8, 2, 1, 4),
        (8, 2, 2, 4),
        (10, 2, 1, 5),
        (7, 2, 1, 7),
    ]:
        assert config(batch_size, 0, pp=pp).num_micro_batches(data_ranks) == expected
    with pytest.raises(
        ConfigError, match=r"train\.batch_size = 6 .* at least 8 .* give train\.batch_size 8$"
    ):
        config(6, 0, pp=2).num_micro_batches(2)
    with pytest.raises(
        ConfigError,
        match=(
            r"a multiple of 5 \(train\.micro_batch_size 5\): give "
            r"train\.batch_size 5 or 10, or .*_size 4$"
        ),
    ):
        config(8, 5)


@pytest.mark.parametrize(
    ("pp", "data_ranks", "micro"), list(itertools.product([1, 2, 3], [1, 2, 6], [0, 1, 4]))
)
def test_a_batch_that_does_not_fit_is_refused_with_changes_that_do(
    pp: int, data_ranks: int, micro: int
) -> None:
    """Sizes that nobody gave are not named, and no number between the batch and the suggested ones
    would do."""
    for batch in range(max(1, micro), 60, max(1, micro)):
        try:
            config(batch, micro, pp=pp).num_micro_batches(data_ranks)
            continue
        except ConfigError as caught:
            text = str(caught)
        assert text.startswith(f"train.batch_size = {batch} is not valid")
        assert "train.micro_batch_size" not in text or micro
        remedies = text.rpartition("give ")[2]
        batches = [
            int(number) for number in re.findall(r"\d+", remedies.partition(", or train.micro")[0])
        ]
        sizes = [int(number) for number in re.findall(r"micro_batch_size (\d+)", remedies)]
        for fitting in batches:
            config(fitting, micro, pp=pp).num_micro_batches(data_ranks)
        for size in sizes:
            config(batch, size, pp=pp).num_micro_batches(data_ranks)
        for between in range(min([batch, *batches]) + 1, max(batches)):
            if between not in batches:
                with pytest.raises(ConfigError):
                    config(between, micro, pp=pp).num_micro_batches(data_ranks)


def growing(first: int, micro: int = 0, batch: int = 24, **parallel: object) -> Config:
    made = config(batch, micro, **parallel)  # type: ignore[arg-type]
    train = replace(made.train, first_batch_size=first, batch_growth_steps=10)
    return replace(made, train=train)


def test_the_micro_batches_of_a_batch_that_grows_fit_the_first_one() -> None:
    for first, pp, data_ranks, expected in [(8, 1, 1, 3), (8, 1, 2, 3), (8, 2, 1, 12)]:
        assert growing(first, pp=pp).num_micro_batches(data_ranks) == expected
    assert growing(12, micro=3).num_micro_batches(2) == 4


@pytest.mark.parametrize(
    ("options", "data_ranks", "message"),
    [
        (
            (6,),
            4,
            r"first_batch_size = 6 .* a multiple of 4 .*: give train.first_batch_size 4 or 8$",
        ),
        ((2, 0, 24, 2), 1, r"= 2 .* at least 4 .*: give train.first_batch_size 4 or 6$"),
        ((6, 2), 2, r"a multiple of 4 .*: give .* 4 or 8, or train.micro_batch_size 1$"),
        ((3, 0, 9), 2, r"first_batch_size = 3 is not valid: .* a multiple of 2 .*: leave it out$"),
    ],
)
def test_a_first_batch_that_does_not_fit_is_refused_with_those_that_do(
    options: tuple[int, ...], data_ranks: int, message: str
) -> None:
    first, micro, batch, pp = (*options, *(0, 0, 24, 1)[len(options) :])
    with pytest.raises(ConfigError, match=message):
        growing(first, micro, batch, pp=pp).num_micro_batches(data_ranks)


def test_a_batch_grows_from_a_divisor_in_a_number_of_steps() -> None:
    for first in (5, 24, 48):
        with pytest.raises(ConfigError, match=r"a divisor of train\.batch_size \(24\), below it"):
            growing(first)
    with pytest.raises(ConfigError, match=r"first_batch_size = 3 is not valid: .*_size 2\)"):
        growing(3, micro=2)
    for values in ({"first_batch_size": 4}, {"batch_growth_steps": 4}):
        with pytest.raises(ConfigError, match="belong together: give both, or neither"):
            LoopConfig(**values)


def test_schedule_auto() -> None:
    assert [ParallelConfig(pp=pp).resolved_schedule for pp in (1, 2)] == ["sequential", "dualpipev"]
    assert ParallelConfig(schedule="dualpipev").resolved_schedule == "dualpipev"


def test_every_family_says_how_many_experts_it_has() -> None:
    families = [
        DeepseekV2Config(n_routed_experts=10),
        Qwen3MoeConfig(num_experts=10),
        GptOssConfig(num_local_experts=10),
    ]
    assert [model.num_routed_experts for model in families] == [10, 10, 10]
