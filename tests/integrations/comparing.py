"""Compares the results of two ways to train."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lather.optim import Muon

Weights = Mapping[str, Tensor]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy the parameters by name, sharded ones whole."""
    return {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for name, p in model.named_parameters()
    }


def difference(one: Weights, other: Weights) -> float:
    """The largest difference of an element."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_same_training(
    trained: Weights, plain: Callable[[float], Weights], tolerance: float
) -> None:
    """Compare trained weights with `plain(factor)`, those of a plain loop with learning rates
    `factor` times as high. 1 % more has to be noticed."""
    same, other = difference(trained, plain(1.0)), difference(trained, plain(1.01))
    assert same <= tolerance
    assert other > 10 * tolerance


def muon(groups: Any, precondition_frequency: int, **options: Any) -> Muon:
    """Make Muon in place of SOAP, for tests in which gradients differ by rounding: where a gradient
    has low rank, bases beyond it are arbitrary."""
    return Muon(groups, **options)


def assert_same_bits(one: object, other: object) -> None:
    """Check that nested state, with its tensors, is equal to the bit."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, Mapping):
        assert isinstance(other, Mapping)
        assert one.keys() == other.keys()
        for key in one:
            assert_same_bits(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        for a, b in zip(one, other, strict=True):
            assert_same_bits(a, b)
    else:
        assert one == other
