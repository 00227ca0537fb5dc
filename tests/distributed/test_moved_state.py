"""State of spread parameters that is moved, taken as room for a checkpoint, loaded, or part of a graph."""

import pytest
from moved_cases import moved_differences, room_differences, version_differences
from ranks import run_ranks


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_moving_state_and_weights_changes_nothing_and_frees_memory(world_size: int) -> None:
    assert run_ranks(moved_differences, world_size) == [[]] * world_size


def test_room_for_a_checkpoint_takes_half_of_the_state_on_two_ranks() -> None:
    assert run_ranks(room_differences, 2) == [[], []]


def test_a_step_tells_autograd_which_weights_it_changed() -> None:
    assert run_ranks(version_differences, 2) == [[], []]
