"""State in 8 bits has the bits of one process on meshes, also after it was converted."""

from coded_cases import bytes_of_owners, changed_differences, coded_differences, cut_blocks
from ranks import run_ranks


def test_coded_state_has_the_bits_of_one_process() -> None:
    assert run_ranks(coded_differences, 4) == [[]] * 4


def test_changed_formats_have_the_bits_of_one_process_or_are_refused() -> None:
    assert run_ranks(changed_differences, 2) == [[], []]


def test_bytes_of_owners_are_those_that_they_hold() -> None:
    for held, told in run_ranks(bytes_of_owners, 4):
        assert 0 < held == told


def test_shards_that_cut_blocks_are_refused() -> None:
    for text in run_ranks(cut_blocks, 2):
        assert text.startswith(
            "parameter 'table' with shape (64, 192) is sharded along its last dim, into 96 "
            "elements per rank, which divides blocks of 128 that share a scale (state_dtype "
            "int8): shard "
            "another dim, or into equal multiples of 128, or give its group "
            "state_dtype=torch.float32"
        )
