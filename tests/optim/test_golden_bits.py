"""Optimizers end with the bits that they had when golden.json was made."""

import json

import pytest

from machine import machine
from optim.golden import CASES, FILE, digest_of_case


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_state_have_their_bits(name: str) -> None:
    golden = json.loads(FILE.read_text())
    if machine() != golden["machine"]:
        pytest.skip("another machine made the digests, and rounds products differently")
    assert digest_of_case(name) == golden["digests"][name]
