"""What a step must know of the gradients before it changes anything: whether they are dense, real and finite, and which experts got no
token. One pass over each gradient, and one synchronisation with the device in all.

Both are read off the 2-norm. It is infinite also where only the squares overflow, which second moments and factors would not survive, and
zero also where they all underflow, which adds nothing to a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lather.optim.buckets import grad_of, parameter_layout
from lather.torch_private import foreach_norm


@dataclass(frozen=True)
class Gradient:
    """A parameter with a gradient, its group, and the name that errors give it."""

    param: Tensor
    group: dict[str, Any]
    name: str

    @property
    def has_experts(self) -> bool:
        """Whether its matrices have factors of their own, which stay as they are where there is no gradient."""
        if self.group["matrix_layout"] != "per_expert":
            return False
        layout = parameter_layout(self.param, self.group)
        return layout.kind == "per_expert" and bool(layout.factor_dims)


def inspect_gradients(gradients: list[Gradient]) -> tuple[list[Gradient], dict[int, list[bool]]]:
    """The gradients to be used, and per parameter with experts (by id) which of those got no token (an exactly zero gradient).

    Raises TypeError for a sparse or complex gradient, and ValueError for a non-finite one whose group says "raise".
    """
    for one in gradients:
        grad = grad_of(one.param)
        if grad.layout is not torch.strided or grad.is_complex():
            kind = "complex" if grad.is_complex() else "sparse"
            raise TypeError(f"gradient of {one.name} is {kind}; the SOAP family takes dense real gradients: give it to another optimizer")
    norms = _norms([one for one in gradients if one.has_experts or one.group["nonfinite"] != "ignore"])
    bad = [one for one in gradients if one.group["nonfinite"] != "ignore" and not all(map(math.isfinite, norms[id(one.param)]))]
    for one in bad:
        if one.group["nonfinite"] == "raise":
            raise ValueError(
                f"gradient of {one.name} is not finite, or its square is not; nothing was changed. Skip such steps, lower the "
                "learning rate, or set nonfinite='skip' to pass over the parameter"
            )
    idle = {id(one.param): [norm == 0 for norm in norms[id(one.param)]] for one in gradients if one.has_experts}
    bad_params = {id(one.param) for one in bad}
    return [one for one in gradients if id(one.param) not in bad_params], idle


def _norms(gradients: list[Gradient]) -> Mapping[int, list[float]]:
    """id of a parameter -> the norm of each expert's gradient, or of the whole as a list of one."""
    norms: dict[int, Tensor] = {}
    for one in gradients:
        if one.has_experts:
            grad = grad_of(one.param)
            norms[id(one.param)] = torch.linalg.vector_norm(grad, dim=tuple(range(1, grad.dim())), dtype=_wide(grad))
    whole = [one.param for one in gradients if not one.has_experts]
    for dtype in {_wide(p) for p in whole}:
        same = [p for p in whole if _wide(p) == dtype]
        for p, norm in zip(same, foreach_norm([grad_of(p) for p in same], 2, dtype=dtype), strict=True):
            norms[id(p)] = norm.view(1)
    return dict(zip(norms, read_together(list(norms.values())), strict=True))


def read_together(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """The values of 1-D tensors of any device on the host, with one synchronisation in all where they share a device."""
    if not tensors:
        return []
    joined = torch.cat([x.to(tensors[0].device) for x in tensors]).tolist()
    stops = list(accumulate(len(x) for x in tensors))
    return [joined[start:stop] for start, stop in pairwise([0, *stops])]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
