"""Optimizers that earlier code saved are read whole, and go on as they would have gone on there."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from machine import machine
from optim.fixtures.make import (
    CASES,
    FOLDER,
    LAST_STEP,
    SAVED_STEP,
    digest_of_state,
    load_case,
    make_case,
    set_values,
    take_steps,
    values_of,
)

INTEGERS = {2: torch.int16, 4: torch.int32}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(*(x.contiguous().view(INTEGERS[x.dtype.itemsize]) for x in (a, b)))
    )


def assert_same_state(state_dict: dict[str, Any], saved: dict[str, Any]) -> None:
    assert state_dict.keys() == saved.keys()
    assert state_dict["state"].keys() == saved["state"].keys()
    for number, entries in saved["state"].items():
        found = state_dict["state"][number]
        assert found.keys() == entries.keys()
        assert [key for key in entries if not same_bits(found[key], entries[key])] == []
    for group, saved_group in zip(state_dict["param_groups"], saved["param_groups"], strict=True):
        assert {**group, **saved_group} == group


@pytest.mark.parametrize("name", CASES)
def test_an_old_optimizer_goes_on(name: str) -> None:
    """They go on to the bit on the machine that saved them. Elsewhere products are rounded
    differently, but the loaded state is the same to the bit."""
    case = load_case(name)
    optimizer, params = make_case(name)
    set_values(params, case["parameters"])
    optimizer.load_state_dict(case["state_dict"])
    assert_same_state(optimizer.state_dict(), case["state_dict"])
    take_steps(optimizer, params, range(SAVED_STEP + 1, LAST_STEP + 1))
    found = values_of(params)
    if machine() == json.loads((FOLDER / "machine.json").read_text()):
        assert same_bits(found, case["expected"])
        assert digest_of_state(optimizer) == case["expected_state"]
    else:
        torch.testing.assert_close(found, case["expected"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_state_matters(name: str) -> None:
    """The tolerance tells an optimizer that went on from one that started afresh."""
    case = load_case(name)
    optimizer, params = make_case(name)
    set_values(params, case["parameters"])
    take_steps(optimizer, params, range(SAVED_STEP + 1, LAST_STEP + 1))
    assert float((values_of(params) - case["expected"]).abs().max()) > 1e-2
