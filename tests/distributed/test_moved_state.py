"""State of spread parameters that is moved, taken as room for a checkpoint, loaded, or part of a
graph."""

from pathlib import Path

import pytest
from moved_cases import (
    exchanged_differences,
    moved_differences,
    reset_differences,
    room_differences,
)
from ranks import run_ranks


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_moving_state_and_weights_changes_nothing_and_frees_memory(world_size: int) -> None:
    assert run_ranks(moved_differences, world_size) == [[]] * world_size


def test_room_for_a_checkpoint_takes_half_of_the_state_on_two_ranks() -> None:
    assert run_ranks(room_differences, 2) == [[], []]


def test_room_that_is_loaded_elsewhere_or_saved_has_the_right_values(tmp_path: Path) -> None:
    assert run_ranks(exchanged_differences, 2, str(tmp_path)) == [[], []]


def test_state_that_is_removed_begins_again_and_state_that_does_not_fit_is_refused() -> None:
    assert run_ranks(reset_differences, 2) == [[], []]
