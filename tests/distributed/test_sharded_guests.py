"""Sharded optimizers on two ranks: another default device, and the state of torch's Muon."""

from ranks import run_ranks
from sharded_guests import CASES, from_torchs_muon, on_default_devices, partitioned_on_meta


def test_sharded_runs_are_the_same_on_any_default_device() -> None:
    for found in run_ranks(on_default_devices, 2):
        assert found == dict.fromkeys(CASES, True)


def test_plain_shards_too() -> None:
    assert run_ranks(partitioned_on_meta, 2) == [[True, True]] * 2


def test_a_run_of_torchs_muon_goes_on_sharded_as_on_one_process() -> None:
    for found in run_ranks(from_torchs_muon, 2):
        for weights, momenta in found.values():
            assert weights < 1e-6
            assert momenta == 0.0
