"""Second-order optimizers of parameters that are spread over ranks have the bits of one process,
and do nothing twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from gathered_cases import (
    changes,
    files_of_a_step,
    gathered_differences,
    weights_that_left_by_another_door,
)
from library_layouts import expert_parallel_differences, fsdp2_differences, plain_shard_differences
from ranks import run_ranks
from rounding_cases import rounding_differences
from sharded_cases import KINDS as RULES
from sharded_cases import (
    LAYOUTS,
    STRANGERS,
    chosen,
    differences,
    differences_of_kernels_that_take_the_factor,
    offloaded_differences,
)
from sharded_refusals import counts, refusals
from sharded_state_cases import (
    KINDS,
    Kinds,
    from_torchs_muon,
    frozen_differences,
    full_states,
    load_all,
    save_all,
)

SHARE = 17
"""Each layout runs one in so many cases; the grid runs all."""


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.grid), 4])
def test_every_layout_has_the_bits_of_one_process(world_size: int) -> None:
    assert run_ranks(differences, world_size, SHARE) == [[]] * world_size


def test_every_rule_is_tried_on_four_ranks() -> None:
    assert {
        kind
        for number in range(len(LAYOUTS[4]))
        for kind, _, _ in chosen(number, SHARE, tuple(RULES))
    } == set(RULES)


@pytest.mark.grid
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_layout_with_every_rule_has_the_bits_of_one_process(world_size: int) -> None:
    assert run_ranks(differences, world_size, 1, timeout=1000) == [[]] * world_size


def test_state_in_rows_has_the_bits_of_one_process() -> None:
    assert run_ranks(gathered_differences, 4) == [[]] * 4


def test_bf16_weights_have_the_bits_of_one_process() -> None:
    assert run_ranks(rounding_differences, 4) == [[]] * 4


def test_every_weight_is_changed_at_one_place() -> None:
    assert run_ranks(weights_that_left_by_another_door, 2) == [[]] * 2


def test_the_way_of_a_gradient_is_short() -> None:
    """Values that are read from the device pass `lather.device`, too, and phases have a name for
    profilers."""
    for files in run_ranks(files_of_a_step, 2):
        assert "device.py" in files
        assert "optim/rules/soap.py" in files
        assert len(files) <= 16, files


def test_options_that_change_are_refused_or_carried_out() -> None:
    assert run_ranks(changes, 2) == [[]] * 2


def reshard(folder: Path, names: Sequence[str], kinds: Kinds, timeout: float) -> None:
    world_sizes = sorted({int(name.split()[0]) for name in names})
    for world_size in world_sizes:
        run_ranks(save_all, world_size, folder, names, kinds, timeout=timeout)
    for world_size in world_sizes:
        assert (
            run_ranks(load_all, world_size, folder, names, kinds, timeout=timeout)
            == [[]] * world_size
        )


def test_a_checkpoint_of_any_layout_goes_on_in_any_other(tmp_path: Path) -> None:
    reshard(tmp_path, ("1 plain", "2 fsdp", "2 tp", "4 fsdp"), KINDS[1:2], timeout=200)


@pytest.mark.grid
def test_a_checkpoint_of_other_rules_goes_on_in_another_layout(tmp_path: Path) -> None:
    reshard(tmp_path, ("2 tp", "4 fsdp"), KINDS[4:], timeout=200)


@pytest.mark.grid
@pytest.mark.timeout(3000)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other_for_every_rule(tmp_path: Path) -> None:
    names = (
        "1 plain",
        *(f"{world_size} {name}" for world_size in (2, 3, 4) for name in LAYOUTS[world_size]),
    )
    reshard(tmp_path, names, KINDS, timeout=1200)


def test_parameters_that_are_frozen_when_a_checkpoint_is_loaded() -> None:
    assert run_ranks(frozen_differences, 2) == [[], []]


def test_whole_state_dicts_of_torch() -> None:
    assert run_ranks(full_states, 2) == [[], []]


def test_a_run_of_torchs_muon_continues_sharded_as_on_one_process() -> None:
    for weights, momenta in run_ranks(from_torchs_muon, 2):
        assert weights < 1e-6
        assert momenta == 0.0


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.grid), 4])
def test_plain_tensor_parallel_shards_have_the_bits_of_one_process(world_size: int) -> None:
    assert run_ranks(plain_shard_differences, world_size) == [[]] * world_size


def test_expert_parallelism_with_fsdp2_has_the_bits_of_one_process() -> None:
    assert run_ranks(expert_parallel_differences, 4) == [[]] * 4


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.grid)])
def test_fsdp2_alone_and_over_tensor_parallelism_has_the_bits_of_one_process(first: int) -> None:
    """Each rule has it in one of the two ways; the other is in the grid."""
    kinds_of = {1: [*RULES][first::2], 2: [*RULES][1 - first :: 2]}
    assert run_ranks(fsdp2_differences, 4, kinds_of) == [[]] * 4


@pytest.mark.grid
def test_offloaded_state_has_the_bits_of_state_on_the_device() -> None:
    assert run_ranks(offloaded_differences, 2) == [[], []]


def test_kernels_that_multiply_gradients_have_the_bits_of_one_process() -> None:
    assert run_ranks(differences_of_kernels_that_take_the_factor, 2) == [[], []]


def test_rules_from_outside_have_the_bits_of_one_process() -> None:
    """This holds on every mesh, whole and cut along other dims."""
    assert run_ranks(differences, 4, 7, STRANGERS) == [[]] * 4


def test_refusals_are_those_of_all_ranks() -> None:
    for found in run_ranks(refusals, 2):
        assert "redistribute(placements=...)" in found["partial"]
        assert "several pieces of it that do not follow each other" in found["packed"]
        assert found["partition_dim"].startswith("ValueError: partition_dim=2 of parameter 0")
        assert "tp_group=" in found["no group"]
        assert found["plain gradient"].startswith(
            "TypeError: gradient of parameter 'w' is no DTensor on the mesh of the parameter"
        )
        assert "different parameters" in found["parameters"]
        assert found["raise"].startswith("ValueError: gradient of parameter 'w' is not finite")
        assert found["raise moved"] == "([False, False], 0, 0)"
        assert found["skip"] == "nothing"
        assert found["skip moved"] == "([False, True], 1, 1)"


def test_every_rank_keeps_its_share_of_the_state() -> None:
    for fresh, after, whole in run_ranks(counts, 4):
        assert fresh == after == whole / 4
