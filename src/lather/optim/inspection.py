"""What a step must know of the gradients before it changes anything: whether they are dense, real and finite, and which experts got no
token. One pass over each gradient, and one synchronisation with the device in all; with parameters that are spread over ranks, one more for
each mesh, in which its ranks agree.

Both are read off the 2-norm. It is infinite also where only the squares overflow, which second moments and factors would not survive, and
zero also where they all underflow, which adds nothing to a factor. Of a spread parameter the squares of all parts are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.optim.layout import Layout
from lather.optim.members import local_grad
from lather.optim.placement import Spread, is_dtensor, local
from lather.torch_private import foreach_norm

GroupOf = Callable[[tuple[int, ...]], dist.ProcessGroup]
"""The process group of some ranks."""


@dataclass(frozen=True)
class Gradient:
    """A parameter that may have a gradient, its group, the name that errors give it, its layout, and where its parts are."""

    param: Tensor
    group: dict[str, Any]
    name: str
    layout: Layout
    spread: Spread | None = None
    measured_anyway: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether its matrices have factors of their own, which stay as they are where there is no gradient."""
        return self.layout.kind == "per_expert" and bool(self.layout.factor_dims)

    @property
    def is_measured(self) -> bool:
        return self.has_experts or self.measured_anyway or self.group["nonfinite"] != "ignore"

    @property
    def num_norms(self) -> int:
        return (self.layout.batch if self.has_experts else 1) if self.is_measured else 0


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    usable: list[Gradient]
    idle: dict[int, list[bool]]
    """id of a parameter with experts -> which of those got no token (an exactly zero gradient)."""
    num_bad: int
    """Gradients that are passed over since they are not finite."""
    is_zero: bool
    """Whether all that was measured is exactly zero."""


def inspect_gradients(gradients: Sequence[Gradient], group_of: GroupOf) -> Inspection:
    """A spread parameter is used if any rank has a gradient of it; every rank of its mesh finds the same.

    Raises TypeError for a gradient that is sparse, complex or spread otherwise than its parameter, and ValueError, on all ranks of the
    meshes, for a non-finite one whose group says "raise".
    """
    for one in gradients:
        _check_kind(one)
    here = [one for one in gradients if one.spread is None]
    own = _norms([one for one in here if one.is_measured])
    norms: dict[int, list[float]] = dict(zip(own, read_together(list(own.values())), strict=True))
    used = {id(one) for one in here}
    offender = _offender(here, norms, used)
    for ranks in sorted({one.spread.ranks for one in gradients if one.spread is not None}, key=lambda ranks: (len(ranks), ranks)):
        some = [one for one in gradients if one.spread is not None and one.spread.ranks == ranks]
        present, of_mesh, elsewhere = _agree(some, group_of(ranks), raises=offender is not None)
        used |= present
        norms |= of_mesh
        offender = offender or _offender(some, norms, used) or ("a parameter of other ranks" if elsewhere else None)
    if offender is not None:
        raise ValueError(
            f"gradient of {offender} is not finite, or its square is not; nothing was changed. Skip such steps, lower the "
            "learning rate, or set nonfinite='skip' to pass over the parameter"
        )
    taken = [one for one in gradients if id(one) in used]
    usable = [one for one in taken if not _is_bad(one, norms)]
    idle = {id(one.param): [norm == 0 for norm in norms[id(one)]] for one in taken if one.has_experts}
    return Inspection(usable, idle, len(taken) - len(usable), not any(chain.from_iterable(norms.values())))


def _check_kind(one: Gradient) -> None:
    grad = one.param.grad
    if grad is None:
        return
    if grad.layout is not torch.strided or grad.is_complex():
        kind = "complex" if grad.is_complex() else "sparse"
        raise TypeError(f"gradient of {one.name} is {kind}; the SOAP family takes dense real gradients: give it to another optimizer")
    if one.spread is not None and grad.dtype != one.param.dtype:
        raise TypeError(f"gradient of {one.name} is {grad.dtype}, the parameter {one.param.dtype}: spread over ranks they must be equal")
    if is_dtensor(one.param) and (not is_dtensor(grad) or grad.placements != one.param.placements):
        found = tuple(grad.placements) if is_dtensor(grad) else "none"
        raise TypeError(
            f"gradient of {one.name} has placements {found}, the parameter {tuple(one.param.placements)}: they must be equal; "
            "give it as grad.redistribute(placements=parameter.placements)"
        )


def _is_bad(one: Gradient, norms: Mapping[int, list[float]]) -> bool:
    return one.group["nonfinite"] != "ignore" and not all(map(math.isfinite, norms[id(one)]))


def _offender(gradients: Sequence[Gradient], norms: Mapping[int, list[float]], used: set[int]) -> str | None:
    """The name of the first whose group says "raise" and that is not finite."""
    bad = (one.name for one in gradients if id(one) in used and one.group["nonfinite"] == "raise" and _is_bad(one, norms))
    return next(bad, None)


def _agree(some: Sequence[Gradient], group: dist.ProcessGroup, *, raises: bool) -> tuple[set[int], dict[int, list[float]], bool]:
    """What the ranks of a mesh find together: which parameters have a gradient, their norms, and whether any rank must raise."""
    device = local(some[0].param).device
    parts = [torch.tensor([float(raises), *(float(one.param.grad is not None) for one in some)], dtype=torch.float64, device=device)]
    own = _norms([one for one in some if one.is_measured])
    for one in some:
        assert one.spread is not None
        squares = torch.zeros(one.num_norms, dtype=torch.float64, device=device)
        if one.is_measured:
            first = one.spread.box.offset[0] if one.has_experts else 0
            squares[first : first + len(own[id(one)])] = own[id(one)].double().square() / one.spread.num_copies
        parts.append(squares)
    found = torch.cat(parts)
    dist.all_reduce(found, group=group)
    elsewhere, *rest = found.tolist()
    present = {id(one) for one, count in zip(some, rest[: len(some)], strict=True) if count}
    stops = list(accumulate((one.num_norms for one in some), initial=len(some)))
    norms = {
        id(one): [_root(square, _wide(one.param)) for square in rest[start:stop]]
        for one, (start, stop) in zip(some, pairwise(stops), strict=True)
    }
    return present, norms, elsewhere > 0


def _root(square: float, dtype: torch.dtype) -> float:
    """Infinite, too, where `dtype` cannot hold it."""
    root = math.sqrt(square)
    return math.inf if root > torch.finfo(dtype).max else root


def _norms(gradients: Sequence[Gradient]) -> dict[int, Tensor]:
    """id -> the norm of each expert's gradient that is here, or of the whole as one; in order."""
    norms: dict[int, Tensor | None] = dict.fromkeys(map(id, gradients))
    for one in gradients:
        if one.has_experts:
            grad = local_grad(one.param)
            norms[id(one)] = torch.linalg.vector_norm(grad, dim=tuple(range(1, grad.dim())), dtype=_wide(grad))
    whole = [one for one in gradients if not one.has_experts]
    for dtype in {_wide(one.param) for one in whole}:
        same = [one for one in whole if _wide(one.param) == dtype]
        for one, norm in zip(same, foreach_norm([local_grad(one.param) for one in same], 2, dtype=dtype), strict=True):
            norms[id(one)] = norm.view(1)
    return {key: norm for key, norm in norms.items() if norm is not None}


def read_together(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """The values of 1-D tensors of any device on the host, with one synchronisation in all where they share a device."""
    if not tensors:
        return []
    joined = torch.cat([x.to(tensors[0].device) for x in tensors]).tolist()
    stops = list(accumulate(len(x) for x in tensors))
    return [joined[start:stop] for start, stop in pairwise([0, *stops])]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
