"""Advice of `lather plan`: the rungs of the ladder with made-up sizes, and the command."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from planned_configs import config_of

from lather.cli import main
from lather.config.config import Config
from lather.config.toml_file import config_to_toml, load_config
from lather.errors import ConfigError
from lather.memory import advice as advice_module
from lather.memory.advice import (
    MOST_SETTINGS,
    Advice,
    Changes,
    advise,
    are_on_machines,
    as_options,
    changed,
)
from lather.memory.plan import plan
from lather.memory.step_time import BUS
from lather.memory.work import MICRO_BATCHES, REST, Work
from lather.memory.workers import Assumed

LAYERS = 8


def deep_config(rule: str, *, layers: int = LAYERS, **parallel: int) -> Config:
    config = config_of(rule, parallel=parallel, batch_size=16, precision="bf16")
    return replace(config, model=replace(config.model, num_hidden_layers=layers))


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.grid
def test_command_prints_a_table_and_writes_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "advised.toml"
    file.write_text(config_to_toml(deep_config("soap")), "utf-8")
    memory = int(0.8 * plan(deep_config("soap").resolved(), 2, Assumed("cpu")).needed)
    options = ["--world", "2", "--device", "cpu", "--memory", f"{memory}B", "--write", str(out)]
    status = main(["plan", str(file), *options])
    printed = capsys.readouterr().out
    assert status == 1
    assert "does not fit" in printed
    assert "settings that fit" in printed
    assert f"written: {out}" in printed
    assert plan(load_config(out).resolved(), 2, Assumed("cpu")).needed <= memory


# --- the ladder with made-up sizes ----------------------------------------------------------------

STATES = {"soap": 600, "soap_muon": 400, "muon": 100}


NARROWED = {"float32": 1, "bfloat16": 2, "int8": 4}


class MadeUp:
    """Stands for a plan: bytes computed from a configuration, without dry runs. Parameters take 60
    of them, gradients 30; a pipeline gathers another 50, or 10 block by block; weights rounded for
    a step take `rounded`."""

    assumed = Assumed("cpu")
    bus = (0.0, 0.0)
    frozen = 0.0
    refresh_interval = 1

    def __init__(
        self, config: Config, world_size: int, activations: int = 200, rounded: int = 0
    ) -> None:
        self.config, self.world_size = config, world_size
        train, optim = config.train, config.optim
        state = STATES[optim.name]
        state //= 2 if getattr(optim, "sides", "") == "smaller" else 1
        state //= NARROWED[optim.state_dtype]
        state = 0 if getattr(optim, "offload", False) else state
        self.activations = activations
        self.activations //= 2 if train.recompute else 1
        self.activations //= 2 if config.moe.memory == "recompute" else 1
        rest = 0 if config.parallel.partition == "memory" else 10
        self.gathered = 0
        if config.parallel.pp > 1:
            self.gathered = 50 if config.parallel.resolved_gather == "stage" else 10
        rest += 30 if train.weight_dtype == "bfloat16" else 60
        rest += 15 if train.gradient_dtype == "bfloat16" else 30
        is_rounded = train.rounded_weights == "step" and train.weight_dtype == "float32"
        rounded = rounded if is_rounded else 0
        total = rest + state + self.activations + self.gathered + rounded
        self.needed = total * 2 // world_size
        kinds = {
            "activations": self.activations,
            "gathered parameters": self.gathered,
            "rounded weights": rounded,
        }
        step = SimpleNamespace(
            total=np.array([self.needed]), of_kind=lambda kind: np.array([kinds[kind]])
        )
        work = {MICRO_BATCHES: Work(seconds=2.5e-3)}
        self.ranks = [SimpleNamespace(steps={"a step": step}, work=work)]

    @property
    def peaks_where_weight_gradients_wait(self) -> bool:
        return self.config.parallel.schedule_memory != "least"

    @property
    def work(self) -> Work:
        pipeline = 1e9 * (self.config.parallel.pp - 1)
        return Work(flops=1e12, parameters=1e9 / self.config.parallel.pp, pipeline=pipeline)

    def bubble(self) -> float:
        return 0.1 if self.config.parallel.pp > 1 else 0.0


def advised(
    memory: int,
    *,
    config: Config | None = None,
    activations: int = 200,
    rounded: int = 0,
    machine: int = 8,
    world: int = 2,
    refused: Callable[[Config], bool] = lambda config: False,
    say: Callable[[str], None] = lambda what: None,
) -> Advice:
    """Advise two ranks with two-sided SOAP that share experts, which need 900 bytes."""
    config = config or deep_config("soap", ep=2)

    def planned(config: Config, world: int, assumed: Assumed, *, pool: object) -> MadeUp:
        if refused(config):
            raise ConfigError("cannot run")
        return MadeUp(config, world, activations, rounded)

    with (
        patch.object(advice_module, "plan", planned),
        patch.object(advice_module, "worker_processes", nullcontext),
    ):
        given: Any = MadeUp(config, world, activations, rounded)
        return advise(config, given, memory, machine=machine, say=say)


ATTENTION: Changes = {"train.micro_batch_size": 1, "train.recompute": ("attention",)}
EXPERTS: Changes = {**ATTENTION, "moe.memory": "recompute"}
BF16: Changes = {"optim.state_dtype": "bfloat16"}
INT8: Changes = {"optim.state_dtype": "int8"}
ONE_SIDE: Changes = {"optim.sides": "smaller", **INT8}
NARROW: Changes = {"train.weight_dtype": "bfloat16", "train.gradient_dtype": "bfloat16"}
OFFLOAD: Changes = {"optim.weight_rounding": "stochastic", "optim.offload": True}
BLOCK: Changes = {"parallel.gather": "block"}


def changes_of(advice: Advice) -> list[Changes]:
    return [setting.changes for setting in advice.tried[1:]]


def test_activations_come_first_where_they_can_be_enough() -> None:
    advice = advised(810)
    assert changes_of(advice) == [ATTENTION, EXPERTS]
    assert [setting.plan.needed for setting in advice.fitting] == [800, 750]


def test_what_context_ranks_keep_is_gathered_again_first() -> None:
    mesh: dict[str, Any] = {"cp": 2, "ep": 2}
    config = deep_config("soap", **mesh, cp_keep_gathered=True)
    again: Changes = {"parallel.cp_keep_gathered": False}
    found = changes_of(advised(400, config=config, activations=400, world=4))
    assert found[:3] == [again, again | ATTENTION, again | EXPERTS]
    found = changes_of(advised(400, config=deep_config("soap", **mesh), activations=400, world=4))
    assert found[:2] == [ATTENTION, EXPERTS]


def test_a_smaller_state_comes_first_where_activations_cannot_be_enough() -> None:
    """Activations are 200 of the 900 bytes, and 600 are there."""
    advice = advised(600)
    assert changes_of(advice) == [BF16, INT8, ONE_SIDE]
    assert [setting.plan.needed for setting in advice.fitting] == [600, 450, 375]
    assert [setting.changes for setting in advice.fitting] == [BF16, INT8, ONE_SIDE]


def test_a_rung_builds_on_what_helped_and_not_on_what_did_not() -> None:
    below = ONE_SIDE | NARROW
    advice = advised(240, activations=100)
    assert changes_of(advice)[3:] == [below]
    assert [setting.plan.needed for setting in advice.fitting] == [230]
    advice = advised(190, activations=100)
    assert changes_of(advice)[4:] == [below | ATTENTION, below | EXPERTS]
    advice = advised(60, activations=0)
    assert changes_of(advice)[6:] == [below | OFFLOAD]
    assert [setting.plan.needed for setting in advice.fitting] == [55]


def test_another_rule_keeps_the_form_of_its_state() -> None:
    advice = advised(50, activations=0)
    muon = {**INT8, **NARROW, **OFFLOAD, "optim.name": "muon"}
    assert changes_of(advice)[7] == muon  # offloaded state is not divided into rows


def test_weights_are_rounded_block_by_block_beside_a_state_in_bf16() -> None:
    """Weights in bf16, of the next rung, need no rounded copies. Where stages are gathered, and
    where copies are few, blocks would save nothing."""
    muon, rounding = deep_config("muon", ep=2), {"train.rounded_weights": "block"}
    assert changes_of(advised(1, config=muon, activations=0, rounded=60))[:3] == [
        {**BF16, **rounding},
        INT8,
        {**BF16, **NARROW},
    ]
    few = advised(1, config=muon, activations=0, rounded=2)
    pipeline = deep_config("muon", pp=2)
    stages = advised(1, config=pipeline, activations=0, machine=1, rounded=60)
    for advice in (few, stages):
        assert BF16 in changes_of(advice)
        assert not any("train.rounded_weights" in changes for changes in changes_of(advice))


def test_offload_takes_back_what_does_not_go_with_it() -> None:
    config = deep_config("soap", ep=2)
    rule: Any = config.optim
    config = replace(config, optim=replace(rule, ownership="replicated", async_refresh=True))
    settings = changes_of(advised(1, config=config, activations=0))
    whole = {"optim.ownership": "whole", "optim.async_refresh": False}
    assert any(changes.items() >= {**OFFLOAD, **whole}.items() for changes in settings)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"ownership": "replicated"}, {"optim.experts.ownership": "whole"}),
        ({"num_streams": 2}, {"optim.experts.num_streams": 1}),
        ({"offload": False}, {"optim.experts.offload": True}),
    ],
    ids=str,
)
def test_offload_takes_back_what_a_section_sets(options: Any, changes: Changes) -> None:
    config = deep_config("soap", ep=2)
    rule: Any = config.optim
    config = replace(config, optim=replace(rule, experts=replace(rule.experts, **options)))
    settings = changes_of(advised(1, config=config, activations=0))
    found = next(x for x in settings if x.items() >= {**OFFLOAD, **changes}.items())
    offloaded = changed(config, found)
    assert offloaded is not None
    assert all(offloaded.optim.rule_of(kind).offload for kind in ("experts", "matrices", "rest"))


def test_rows_are_not_advised_beside_a_section_with_offload() -> None:
    config = deep_config("soap")
    rule: Any = config.optim
    config = replace(config, optim=replace(rule, rest=replace(rule.rest, offload=True)))
    settings = changes_of(advised(1, config=config, activations=0))
    assert not any("optim.ownership" in changes for changes in settings)


def test_frozen_weights_on_the_host_are_gathered_block_by_block() -> None:
    """A single data rank gathers nothing else, and so has no other rung for it."""
    config = deep_config("muon", pp=2)
    config = replace(config, lora=replace(config.lora, rank=4))
    settings = changes_of(advised(1, config=config, activations=0, machine=1))
    offloaded = [changes for changes in settings if changes.get("train.offload_frozen")]
    assert offloaded
    assert all(changes["parallel.gather"] == "block" for changes in offloaded)


def test_frozen_weights_travel_at_the_rate_of_the_bus() -> None:
    """They come to the device beside the state, while other state goes back."""
    made_up: Any = MadeUp(deep_config("muon"), 1)
    setting = advice_module.Setting({}, made_up.config, made_up)
    without = setting.seconds(8)
    made_up.frozen = 50e9
    assert setting.seconds(8) - without == pytest.approx(50e9 / BUS)
    made_up.bus = (25e9, 100e9)
    assert setting.seconds(8) - without == pytest.approx(100e9 / BUS)


def test_the_predicted_step_decides_the_order_and_not_the_flops_alone() -> None:
    """Two settings that compute and send the same differ in the time of their optimizers."""
    settings = []
    for seconds in (2.0, 1.0):
        made_up: Any = MadeUp(deep_config("muon"), 1)
        made_up.ranks[0].work = {MICRO_BATCHES: Work(seconds=1.0), REST: Work(seconds=seconds)}
        settings.append(
            advice_module.Setting({"optim.name": str(seconds)}, made_up.config, made_up)
        )
    assert settings[0].seconds(8) - settings[1].seconds(8) == pytest.approx(1.0)
    assert Advice(10**9, 8, tuple(settings)).fitting == settings[::-1]


def test_frozen_weights_go_to_the_host_where_adapters_are_trained() -> None:
    config = deep_config("muon", ep=2)
    config = replace(config, lora=replace(config.lora, rank=4))
    settings = changes_of(advised(1, config=config, activations=0))
    assert any(changes.get("train.offload_frozen") for changes in settings)
    assert not any("optim.offload" in changes for changes in settings)


def test_a_pipeline_has_rungs_of_its_own() -> None:
    options: dict[str, Any] = {"config": deep_config("soap", pp=2), "world": 4, "machine": 2}
    advice = advised(410, activations=100, **options)
    blocks = [BLOCK, BLOCK | ATTENTION, BLOCK | EXPERTS]
    assert changes_of(advice) == blocks
    assert [setting.plan.needed for setting in advice.fitting] == [405, 380, 367]
    advice = advised(365, activations=100, **options)
    early, by_memory = {"parallel.schedule_memory": "least"}, {"parallel.partition": "memory"}
    assert changes_of(advice)[3:] == [blocks[-1] | early, blocks[-1] | by_memory]
    assert [setting.changes for setting in advice.fitting] == [blocks[-1] | by_memory]


def test_the_ladder_has_at_most_ten_settings() -> None:
    for parallel in ({"pp": 2}, {"ep": 2}, {}):
        advice = advised(1, config=deep_config("soap", **parallel))
        assert not advice.fitting
        assert len(advice.tried) <= 1 + MOST_SETTINGS
        assert advice.lightest.plan.needed < 300
        configs = [(repr(setting.config), setting.plan.world_size) for setting in advice.tried]
        assert len(configs) == len(set(configs))
    assert advised(1).tried[-1].plan.world_size == 4


def test_a_run_that_fits_is_compared_with_other_meshes_alone() -> None:
    advice = advised(1000)
    assert changes_of(advice) == [{"parallel.pp": 2, "parallel.ep": 1}]
    assert advice.fitting[0].changes == {}


def test_a_pipeline_on_one_machine_is_not_worth_it() -> None:
    pipeline = deep_config("soap", pp=2)
    without = advised(1000, config=pipeline).without_pipeline
    assert without is not None
    assert without.changes == {"parallel.pp": 1, "parallel.ep": 2}
    assert advised(1000, config=pipeline, machine=1).without_pipeline is None
    assert advised(1000).without_pipeline is None
    assert advised(800, config=pipeline).without_pipeline is None  # does not fit


def test_a_setting_that_cannot_be_planned_is_told_and_left_out() -> None:
    said: list[str] = []
    advice = advised(810, refused=lambda config: config.moe.memory == "recompute", say=said.append)
    assert changes_of(advice) == [ATTENTION]
    assert any(line.endswith("cannot be planned: cannot run") for line in said)


# --- machines ---------------------------------------------------------------------------------


def groups_on_machines(world: int, pp: int, ep: int, machine: int) -> bool:
    """Lay all ranks out as the mesh does, and look at every expert group."""
    mesh = np.arange(world).reshape(pp, world // (pp * ep), ep)
    return all(len({int(rank) // machine for rank in group}) == 1 for group in mesh.reshape(-1, ep))


@pytest.mark.parametrize("machine", range(1, 13))
def test_expert_groups_lie_on_machines(machine: int) -> None:
    for world in range(1, 49):
        for pp, ep in product(range(1, world + 1), repeat=2):
            if world % (pp * ep) == 0:
                laid_out = groups_on_machines(world, pp, ep, machine)
                assert are_on_machines(ep, world, machine) == laid_out, (world, pp, ep)


@pytest.mark.parametrize("machine", [1, 2, 3, 4, 5, 6, 8, 16])
def test_advised_meshes_have_their_expert_groups_on_machines(machine: int) -> None:
    config = deep_config("muon", layers=40)
    model: Any = replace(config.model, num_experts=840)  # type: ignore[call-arg]
    for world in (2, 3, 4, 6, 8, 10, 12, 14, 16, 20):
        given: Any = MadeUp(config, world)
        ladder = advice_module._Ladder(
            replace(config, model=model),
            given,
            1,
            machine,
            print,
            None,  # type: ignore[arg-type]
        )
        meshes = [(mesh["parallel.pp"], mesh["parallel.ep"]) for mesh in ladder.meshes()]
        assert meshes
        for pp, ep in meshes:
            assert world % (pp * ep) == 0
            assert 840 % ep == 0
            assert groups_on_machines(world, pp, ep, machine)


# --- changes --------------------------------------------------------------------------------------


def test_another_rule_has_its_own_options_and_rates() -> None:
    config = deep_config("soap")
    config = replace(config, optim=replace(config.optim, lr=1.0, warmup_steps=7))
    other = changed(config, {"optim.name": "muon"})
    assert other is not None
    assert (other.optim.name, other.optim.lr, other.optim.warmup_steps) == ("muon", None, 7)


def test_changes_that_do_not_go_together_are_none() -> None:
    assert changed(deep_config("soap"), {"parallel.pp": LAYERS}) is None


def test_changes_read_as_options() -> None:
    assert (
        as_options({"parallel.pp": 2, "train.recompute": ("attention", "experts")})
        == "--parallel.pp 2 --train.recompute attention experts"
    )
    assert as_options({"optim.offload": True}) == "--optim.offload"
