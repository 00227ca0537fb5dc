"""Advice of `lather plan`: estimates against whole plans, the findings of a search, and the work
that it counts as their price."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from planned_configs import config_of

from lather.cli import main
from lather.config.config import Config, ParallelConfig
from lather.config.toml_file import config_to_toml, load_config
from lather.errors import ConfigError
from lather.models.families import FAMILIES
from lather.pipeline.partition import Partition
from lather.pipeline.replay import bubble_of_layers
from lather.planning import advice as advice_module
from lather.planning.advice import Advice, advise, are_on_machines, as_options, changed
from lather.planning.estimate import Estimate, Estimator, with_layers
from lather.planning.plan import plan
from lather.planning.work import MICRO_BATCHES, REST, Work, sent_bytes
from lather.planning.workers import Assumed, worker_processes

LAYERS = 8


def deep_config(rule: str, *, layers: int = LAYERS, **parallel: int) -> Config:
    config = config_of(rule, parallel=parallel, batch_size=16)
    return replace(config, model=replace(config.model, num_hidden_layers=layers))


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param({"ep": 2}, {}, marks=pytest.mark.grid),
        ({"ep": 2}, {"moe.memory": "recompute", "optim.name": "muon"}),
        pytest.param({"pp": 2}, {}, marks=pytest.mark.grid),
        pytest.param(
            {"pp": 2}, {"moe.memory": "recompute", "optim.name": "muon"}, marks=pytest.mark.grid
        ),
    ],
)
def test_estimates_are_near_plans(mesh: dict[str, int], changes: dict[str, str]) -> None:
    base = deep_config("soap", layers=LAYERS // 2 * mesh.get("pp", 1))
    config = changed(replace(base, parallel=ParallelConfig(**mesh)), changes)
    assert config is not None
    with worker_processes() as pool:
        (estimate,) = Estimator(base, Assumed("cpu"), pool).estimates([config], 2)
    assert estimate is not None
    needed = plan(config.resolved(), 2, Assumed("cpu")).needed
    assert estimate.needed == pytest.approx(
        needed, rel=0.15 if changes else 0.06
    )  # another mesh's factor is rougher


def test_with_layers_keeps_the_pattern_of_layers() -> None:
    config = config_of("muon")
    gpt = FAMILIES["gpt_oss"].config(
        num_hidden_layers=24, layer_types=("full_attention", "sliding_attention") * 12
    )
    assert (
        with_layers(replace(config, model=gpt), 4).model.layer_types
        == ("full_attention", "sliding_attention") * 2
    )  # type: ignore[attr-defined]
    dense = FAMILIES["deepseek_v2"].config(num_hidden_layers=9, first_k_dense_replace=3)
    assert with_layers(replace(config, model=dense), 2).model.first_k_dense_replace == 1  # type: ignore[attr-defined]


# --- the search -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def needed() -> int:
    """Count the bytes that one of two ranks needs without changes."""
    return plan(deep_config("soap").resolved(), 2, Assumed("cpu")).needed


@pytest.fixture(scope="module")
def advice(needed: int) -> Advice:
    return advise(deep_config("soap"), 2, Assumed("cpu", memory=int(0.7 * needed)))


@pytest.mark.grid
def test_all_that_is_advised_fits_by_its_plan(advice: Advice, needed: int) -> None:
    assert advice.settings
    assert all(found.needed <= 0.7 * needed for _, found in advice.settings)
    assert all(setting.changes for setting, _ in advice.settings)
    seconds = [setting.seconds for setting, _ in advice.settings]
    assert seconds == sorted(seconds)
    assert advice.least_flops <= min(setting.estimate.work.flops for setting, _ in advice.settings)


@pytest.mark.grid
def test_what_is_advised_is_a_configuration(advice: Advice, tmp_path: Path) -> None:
    setting, found = advice.settings[0]
    file = tmp_path / "advised.toml"
    file.write_text(config_to_toml(setting.config), "utf-8")
    assert plan(load_config(file).resolved(), 2, Assumed("cpu")).needed == found.needed


@pytest.mark.grid
def test_nothing_fits(needed: int) -> None:
    config = deep_config("muon")
    advice = advise(config, 2, Assumed("cpu", memory=needed // 50))
    assert not advice.settings
    assert advice.lightest.estimate.needed > needed // 50


@pytest.mark.grid
def test_command_prints_a_table_and_writes_the_first(
    needed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "advised.toml"
    file.write_text(config_to_toml(deep_config("soap")), "utf-8")
    status = main(
        [
            "plan",
            str(file),
            "--world",
            "2",
            "--device",
            "cpu",
            "--memory",
            f"{0.7 * needed / 1024:.0f}KiB",
            "--write",
            str(out),
        ]
    )
    printed = capsys.readouterr().out
    assert status == 1
    assert "does not fit" in printed
    assert "settings that fit" in printed
    assert f"written: {out}" in printed
    assert plan(load_config(out).resolved(), 2, Assumed("cpu")).needed <= 0.7 * needed


# --- the search with made-up sizes ----------------------------------------------------------------

STATES = {"soap": 60, "stacked_soap": 60, "soap_muon": 60, "muon": 20}


class MadeUp:
    """Stands for `Estimator`: it computes bytes from a configuration, without dry runs."""

    failures = ("no dry run",)

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Take the arguments that an estimator takes."""

    def estimates(self, configs: list[Config], world_size: int) -> list[Estimate]:
        return [
            Estimate(np.array([size_of(config, world_size)], float), 0.0, work_of(config))
            for config in configs
        ]


def size_of(config: Config, world_size: int) -> int:
    state = STATES[config.optim.name] // (
        2 if getattr(config.optim, "sides", "") == "smaller" else 1
    )
    return (
        state + 30 - 10 * len(config.train.recompute)
    ) * 2 // world_size + 5 * config.parallel.pp


def work_of(config: Config) -> Work:
    return Work(flops=1e15 * (1 + len(config.train.recompute)))


def advised(memory: int, off: int = 0, saved: int = 0, *, only_early: bool = False) -> Advice:
    """Advise two ranks with two-sided SOAP. Whole plans need `off` bytes more than estimates, and
    `saved` less with layers partitioned by memory. If `only_early`, plans are too large for all but
    pipelines whose weight gradients come early."""

    def planned(
        config: Config, world_size: int, assumed: Assumed, partition: Partition | None
    ) -> SimpleNamespace:
        assert (partition is not None) == (config.parallel.partition == "memory")
        needed = size_of(config, world_size) + off - (0 if partition is None else saved)
        too_large = only_early and not config.parallel.early_weight_gradients
        return SimpleNamespace(
            needed=needed + 1000 * too_large, peaks_where_weight_gradients_wait=too_large
        )

    def partitioned(config: Config, world_size: int, assumed: Assumed) -> Partition:
        if saved < 0:
            raise ConfigError("cannot be partitioned")
        size = size_of(config, world_size)
        return Partition((1, 2, 2, 3), size - saved, size)

    with (
        patch.object(advice_module, "Estimator", MadeUp),
        patch.object(advice_module, "plan", planned),
        patch.object(advice_module, "memory_partition", partitioned),
        patch.object(advice_module._Search, "has_room", lambda search, parts: True),
    ):
        return advise(deep_config("soap"), 2, Assumed("cpu", memory=memory))


def test_meshes_come_first_and_what_fits_as_it_is_stays() -> None:
    found = advised(95 + 5)
    assert found.settings[0][0].changes == {}
    assert all(
        set(setting.changes) <= {"parallel.pp", "parallel.ep"} for setting, _ in found.settings
    )


def test_less_is_kept_before_the_rule_changes() -> None:
    found = advised(90)
    assert found.settings
    assert all(setting.config.optim.name == "soap" for setting, _ in found.settings)
    assert all(setting.config.train.recompute for setting, _ in found.settings)
    flops = [setting.estimate.work.flops for setting, _ in found.settings]
    assert flops == sorted(flops)


def test_layers_are_partitioned_by_memory_where_a_pipeline_nearly_fits() -> None:
    """A pipeline needs 100 bytes, 95 with layers partitioned by memory; 91 are there."""
    found = advised(91, saved=10)
    (partitioned,) = [setting for setting, _ in found.settings if setting.partition is not None]
    assert partitioned.changes == {"parallel.pp": 2, "parallel.partition": "memory"}
    assert partitioned.estimate.needed == pytest.approx(90)
    assert partitioned.bubble == bubble_of_layers((1, 2, 2, 3), 16)
    assert not any(setting.partition for setting, _ in advised(91, saved=0).settings)
    assert not any(
        setting.partition for setting, _ in advised(80, saved=10).settings
    )  # the search does not hope for 20 % less


def test_weight_gradients_come_early_where_a_whole_plan_needs_it() -> None:
    """An estimate does not see what waits for weight gradients: if that makes a pipeline's plan too
    large, the pipeline is planned once more."""
    early = [setting for setting, _ in advised(90, only_early=True).settings]
    assert early
    assert all(setting.changes["parallel.schedule_memory"] == "least" for setting in early)
    assert all(setting.bubble > bubble_of_layers((LAYERS // 4,) * 4, 16) for setting in early)
    assert not any(
        setting.config.parallel.early_weight_gradients for setting, _ in advised(90).settings
    )


def test_a_search_goes_on_where_layers_cannot_be_partitioned() -> None:
    assert advised(91, saved=-1).settings


def test_then_the_state_and_at_last_the_rule() -> None:
    sided = advised(50)
    assert {setting.config.optim.name for setting, _ in sided.settings} == {"soap"}
    assert all(setting.changes["optim.sides"] == "smaller" for setting, _ in sided.settings)
    assert {setting.config.optim.name for setting, _ in advised(30).settings} == {"muon"}


def test_owners_share_a_state_where_parameters_are_sharded_and_a_rank_may_have_all_experts() -> (
    None
):
    def lighter(**parallel: int) -> tuple[set[str], set[str]]:
        config = deep_config("soap", **parallel)
        search = advice_module._Search(
            config, 2, 100, Assumed("cpu", 1.0, None), 8, MadeUp(), print
        )  # type: ignore[arg-type]
        states, rules = search.shared_states(), search.lighter_rules()
        return {name for one in states for name in one}, {one["optim.name"] for one in rules}

    states = {"optim.sides", "optim.state_dtype", "optim.ownership"}
    assert lighter() == (states, {"stacked_soap", "soap_muon", "muon"})
    assert lighter(pp=2) == (set(), {"stacked_soap", "soap_muon", "muon"})
    assert lighter(replicas=2)[0] == set()
    assert lighter(ep=2)[1] == {"soap_muon", "muon"}


def test_what_a_whole_plan_refuses_is_not_advised() -> None:
    assert not advised(90, off=1000).settings


def test_where_nothing_fits_the_world_that_would_is_named() -> None:
    found = advised(24)
    assert not found.settings
    assert found.lightest.config.optim.name == "muon"
    assert found.lightest.config.train.recompute == ("attention", "experts", "shared_experts")
    assert found.world_that_fits == 4  # 20 / 2 for each rank, and 5 for the pipeline rank


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


def search_of(
    config: Config,
    world: int,
    machine: int,
    say: Callable[[str], None],
) -> advice_module._Search:
    estimator: Any = MadeUp()
    return advice_module._Search(config, world, 2**60, Assumed("cpu"), machine, estimator, say)


def meshes_of(world: int, machine: int, **own: int) -> tuple[set[tuple[int, int]], list[str]]:
    """Return (pp, ep) of every mesh that a search tries, and what it says."""
    config = deep_config("muon", layers=2 * world)
    model: Any = replace(config.model, num_experts=840)  # type: ignore[call-arg]
    train = replace(config.train, batch_size=2 * world**2)
    config = replace(config, model=model, train=train, parallel=ParallelConfig(**own))
    said: list[str] = []
    search = search_of(config, world, machine, said.append)
    found = [(mesh["parallel.pp"], mesh["parallel.ep"]) for mesh in search.meshes()]
    assert len(found) == len(set(found))
    return set(found), said


@pytest.mark.parametrize("machine", [1, 2, 3, 4, 5, 6, 8, 16])
def test_meshes_are_all_those_whose_expert_groups_lie_on_machines(machine: int) -> None:
    for world in (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20):
        sizes = range(1, world + 1)
        meshes, said = meshes_of(world, machine)
        assert meshes == {
            (pp, ep)
            for pp, ep in product(sizes, sizes)
            if world % (pp * ep) == 0
            if 840 % ep == 0
            if groups_on_machines(world, pp, ep, machine)
        }
        assert not said


def test_a_configured_mesh_whose_expert_groups_lie_on_two_machines_is_left_out_and_told() -> None:
    """On machines of 4, ranks 3, 4 and 5 of the 12 would share experts."""
    meshes, said = meshes_of(12, 4, pp=2, ep=3)
    assert {ep for _, ep in meshes} == {1, 2, 4}
    assert len(said) == 1
    assert said[0].startswith("--parallel.ep 3 is left out")
    assert (2, 3) in meshes_of(12, 12, pp=2, ep=3)[0]


def test_a_larger_world_fits_only_with_expert_groups_on_machines() -> None:
    def world(machine: int) -> int | None:
        config = deep_config("muon", ep=2)
        search = search_of(config, 2, machine, print)
        search.memory = 15
        with patch.object(MadeUp, "estimates", estimates):
            search.try_all("meshes", [{}])
            return search.world_that_fits(search.tried[0])

    def estimates(made_up: MadeUp, configs: list[Config], size: int) -> list[Estimate]:
        return [Estimate(np.array([100 / size], float), 0.0, Work(flops=1.0)) for _ in configs]

    assert world(machine=4) == 8
    assert world(machine=3) is None  # ranks 2 and 3 would be on two machines


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


# --- work -----------------------------------------------------------------------------------------


def test_bytes_that_experts_exchange() -> None:
    """Rows of hidden size travel to the other rank's experts and back, and so do their gradients,
    in fp32."""
    config = config_of("muon", parallel={"ep": 2}, batch_size=2)
    run = plan(config, 2, Assumed("cpu")).ranks[0]
    model, tokens = config.model, 32
    pairs = tokens * model.num_experts_per_tok
    least, most = (
        4 * rows * model.hidden_size * 4 * model.num_hidden_layers for rows in (tokens, 2 * pairs)
    )
    assert least <= run.work[MICRO_BATCHES].exchanged <= most


def test_bytes_sent_by_operation() -> None:
    whole, part = torch.zeros(8), torch.zeros(2)
    sent = {
        name: sent_bytes(name, args)
        for name, args in {
            "_allgather_base_": (whole, part),
            "_reduce_scatter_base_": (part, whole),
            "allreduce_": ([whole],),
            "alltoall_base_": (part, whole),
            "send": ([part],),
            "recv_": ([part],),
            "barrier": (),
        }.items()
    }
    assert sent == {
        "_allgather_base_": 24,
        "_reduce_scatter_base_": 24,
        "allreduce_": 64,
        "alltoall_base_": 32,
        "send": 8,
        "recv_": 0,
        "barrier": 0,
    }


def test_work_grows_with_micro_batches() -> None:
    one, four = (
        plan(config_of("muon", batch_size=size), 1, Assumed("cpu")).ranks[0].work
        for size in (4, 16)
    )
    assert four[MICRO_BATCHES].flops == pytest.approx(4 * one[MICRO_BATCHES].flops)
    assert four[REST].flops == one[REST].flops
    model = config_of("muon").model
    experts = (
        6
        * 4
        * 32
        * model.num_experts_per_tok
        * 3
        * model.hidden_size
        * model.moe_intermediate_size
        * model.num_hidden_layers
    )
    assert one[MICRO_BATCHES].flops > experts
    assert all(work.exchanged == 0 for work in one.values())
