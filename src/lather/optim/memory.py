"""Size of the optimizer state of a parameter, computed without allocating it."""

from __future__ import annotations

import operator
from typing import Any

import torch

from lather.optim.batched.matrix_layout import layout_of, rule_for_dtype
from lather.optim.batched.optimizer import MatrixOptimizer
from lather.optim.optimizers import SOAP
from lather.optim.options import options_of
from lather.optim.rule import Rule


def state_bytes(
    shape: tuple[int, ...],
    optimizer: type[MatrixOptimizer] | type[Rule] = SOAP,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> int:
    """Return the exact bytes of optimizer state of a parameter of `shape`, including the step
    counter.

    `optimizer` is an optimizer (SOAP, Muon, ...) or the class of a rule; `options` are those of its
    options that differ from the defaults, of which layout, sides and dtypes matter. `dtype` is that
    of the parameter, on which the state depends if `state_dtype` is None.

    Raises:
        ValueError: for an option that the optimizer does not have, or that is out of range.
    """
    rule = optimizer if issubclass(optimizer, Rule) else optimizer.rule
    known = options_of(rule)
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(
            f"unknown option {unknown[0]!r} of {optimizer.__name__}; known options: "
            f"{', '.join(sorted(known))}"
        )
    rule_of_dtype = rule_for_dtype(rule(**{"lr": 1e-3, **options}), dtype)
    return layout_of(tuple(map(operator.index, shape)), rule_of_dtype).state_bytes()
