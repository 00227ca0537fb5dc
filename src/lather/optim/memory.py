"""How much state a parameter will have, without allocating it."""

from __future__ import annotations

import inspect
from typing import Any

from lather.optim.layout import layout_of
from lather.optim.optimizer import MatrixOptimizer
from lather.optim.soap import SOAP
from lather.optim.state import layout_bytes


def state_bytes(shape: tuple[int, ...], optimizer: type[MatrixOptimizer] = SOAP, **options: Any) -> int:
    """Bytes of optimizer state that a parameter of `shape` will have, exactly, the step counter included.

    `options` are those of `optimizer` (SOAP, KLSOAP, ...), with its defaults: `matrix_layout`, `max_precond_dim`, `precondition_1d` and
    `state_dtype` matter.

    Raises:
        ValueError: for an option that the optimizer does not have, or that is out of range.
    """
    defaults: dict[str, Any] = {}
    for cls in reversed(optimizer.__mro__):
        if issubclass(cls, MatrixOptimizer) and "__init__" in vars(cls):
            parameters = inspect.signature(cls.__init__).parameters.values()
            defaults |= {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    if unknown := sorted(set(options) - set(defaults) - {"lr"}):
        raise ValueError(f"unknown option {unknown[0]!r} of {optimizer.__name__}; known options: {', '.join(sorted(defaults))}")
    merged = {**defaults, **optimizer.preset, **options}
    optimizer._check_options(merged)
    return layout_bytes(layout_of(tuple(shape), merged), merged)
