"""Checks of the gradients before a step changes anything: whether they are dense, real and finite, and which experts got no
token. One pass over each gradient, and one synchronisation with the device in all; with parameters that are spread over ranks, one more for
each mesh, in which its ranks agree.

Both are read off the 2-norm. It is infinite also where only the squares overflow, which second moments and factors would not survive, and
zero also where they all underflow, which adds nothing to a factor. Of a spread parameter the squares of all parts are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.optim.engine.roster import ParamInfo
from lather.optim.sharded.placement import Spread, is_dtensor, local, local_grad
from lather.torch_private import foreach_norm

GroupOf = Callable[[Spread], dist.ProcessGroup]
"""The process group of the ranks over which something is spread."""


@dataclass(frozen=True)
class Inspection:
    """Findings about the gradients of a step."""

    usable: list[ParamInfo]
    """The parameters that take the step."""
    idle: dict[int, list[bool]]
    """id of a parameter with experts -> which of those got no token (an exactly zero gradient)."""
    num_bad: int
    """Gradients that are passed over since they are not finite."""


def inspect_gradients(params: Sequence[ParamInfo], group_of: GroupOf) -> Inspection:
    """A spread parameter is used if any rank has a gradient of it; every rank of its mesh finds the same.

    Raises TypeError for a gradient that is sparse, complex or spread otherwise than its parameter, and ValueError, on all ranks of the
    meshes, for a non-finite one whose group says "raise".
    """
    for one in params:
        grad = one.param.grad
        if grad is not None and (one.spread is not None or grad.layout is not torch.strided or grad.is_complex()):
            _check(one, grad)
    norms: dict[int, list[float]] = {}
    bad: set[int] = set()
    offender: str | None = None
    for some in _by_mesh(params):
        if some[0].spread is None:
            found, elsewhere = _read([one for one in some if one.param.grad is not None]), False
        else:
            found, elsewhere = _agree(some, group_of(some[0].spread), raises=offender is not None)
        norms |= found
        if not all(map(math.isfinite, chain.from_iterable(found.values()))):
            more = [one for one in some if one.settings.rule.nonfinite != "ignore" and not all(map(math.isfinite, found.get(id(one), ())))]
            bad |= set(map(id, more))
            offender = offender or next((one.name for one in more if one.settings.rule.nonfinite == "raise"), None)
        offender = offender or ("a parameter of other ranks" if elsewhere else None)
    if offender is not None:
        raise ValueError(
            f"gradient of {offender} is not finite, or its square is not; nothing was changed. Skip such steps, lower the "
            "learning rate, or set nonfinite='skip' to pass over the parameter"
        )
    usable = [one for one in params if id(one) in norms and id(one) not in bad]
    idle = {id(one.param): [norm == 0 for norm in norms[id(one)]] for one in usable if one.has_experts}
    return Inspection(usable, idle, len(bad))


def _by_mesh(params: Sequence[ParamInfo]) -> list[list[ParamInfo]]:
    """Parameters that this process has to itself, if any, then those that are spread, mesh by mesh in one order everywhere."""
    found: dict[tuple[int, ...], list[ParamInfo]] = {}
    for one in params:
        found.setdefault(() if one.spread is None else one.spread.ranks, []).append(one)
    return [found[ranks] for ranks in sorted(found, key=lambda ranks: (len(ranks), ranks))]


def are_zero(params: Sequence[ParamInfo], group_of: GroupOf) -> bool:
    """Whether all gradients that there are, on all ranks, are exactly zero."""
    zero = all(one.param.grad is None or not local(one.param.grad).any() for one in params)
    for some in _by_mesh(params):
        if some[0].spread is not None:
            found = torch.tensor(float(zero), device=local(some[0].param).device)
            dist.all_reduce(found, dist.ReduceOp.MIN, group=group_of(some[0].spread))
            zero = bool(found)
    return zero


def _check(one: ParamInfo, grad: Tensor) -> None:
    """Raises TypeError for a gradient that no rule takes."""
    if one.spread is not None and grad.dtype != one.param.dtype:
        raise TypeError(f"gradient of {one.name} is {grad.dtype}, the parameter {one.param.dtype}: spread over ranks they must be equal")
    if is_dtensor(one.param) and (not is_dtensor(grad) or grad.placements != one.param.placements):
        found = tuple(grad.placements) if is_dtensor(grad) else "none"
        raise TypeError(
            f"gradient of {one.name} has placements {found}, the parameter {tuple(one.param.placements)}: they must be equal; "
            "give it as grad.redistribute(placements=parameter.placements)"
        )
    if grad.layout is not torch.strided or grad.is_complex():
        kind = "complex" if grad.is_complex() else "sparse"
        raise TypeError(
            f"gradient of {one.name} is {kind}; {one.rule.name or 'this rule'} takes dense real gradients: give it to another optimizer"
        )


def _read(here: Sequence[ParamInfo]) -> dict[int, list[float]]:
    """The norms of gradients that this process has to itself."""
    measured = _norms(here)
    found: dict[int, list[float]] = {id(one): [] for one in here}
    for (some, _), norms in zip(measured, read_together([norms for _, norms in measured]), strict=True):
        found.update({id(some[0]): norms} if some[0].has_experts else zip(map(id, some), [[norm] for norm in norms], strict=True))
    return found


def _agree(some: Sequence[ParamInfo], group: dist.ProcessGroup, *, raises: bool) -> tuple[dict[int, list[float]], bool]:
    """Findings that the ranks of a mesh share: the norms of those parameters that have a gradient, and whether any rank must raise."""
    device, own = local(some[0].param).device, dict[int, Tensor]()
    for measured, norms in _norms(some):
        own.update({id(measured[0]): norms} if measured[0].has_experts else zip(map(id, measured), norms.split(1), strict=True))
    parts = [torch.tensor([float(raises), *(float(one.param.grad is not None) for one in some)], dtype=torch.float64, device=device)]
    for one in some:
        assert one.spread is not None
        squares = torch.zeros(one.num_norms, dtype=torch.float64, device=device)
        if one.num_norms:
            first = one.spread.box.offset[0] if one.has_experts else 0
            squares[first : first + len(own[id(one)])] = own[id(one)].double().square() / len(one.spread.positions_of[one.spread.box])
        parts.append(squares)
    found = torch.cat(parts)
    dist.all_reduce(found, group=group)
    found, *squared = found.cpu().split(list(map(len, parts)))
    elsewhere, *present = found.tolist()
    roots = [x.sqrt().to(one.wide).tolist() for one, x in zip(some, squared, strict=True)]  # infinite, too, where `wide` cannot hold them
    return {id(one): root for one, is_here, root in zip(some, present, roots, strict=True) if is_here}, elsewhere > 0


def _norms(params: Sequence[ParamInfo]) -> list[tuple[list[ParamInfo], Tensor]]:
    """The norms of gradients that are measured: of all experts of one parameter that are here, or of several parameters, one each."""
    found: list[tuple[list[ParamInfo], Tensor]] = []
    whole: dict[torch.dtype, list[ParamInfo]] = {}
    for one in params:
        if one.has_experts:
            grad = local_grad(one.param)
            found.append(([one], torch.linalg.vector_norm(grad, dim=tuple(range(1, grad.dim())), dtype=one.wide)))
        elif one.num_norms:
            whole.setdefault(one.wide, []).append(one)
    for dtype, same in whole.items():
        grads: Any = [one.param.grad if one.spread is None else local_grad(one.param) for one in same]
        found.append((same, torch.stack([norm.to(grads[0].device) for norm in foreach_norm(grads, 2, dtype=dtype)])))
    return found


def read_together(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """The values of 1-D tensors of any device on the host, with one synchronisation in all where they share a device."""
    if not tensors:
        return []
    joined = torch.cat([x.to(tensors[0].device) for x in tensors]).tolist()
    return [joined[start:stop] for start, stop in pairwise([0, *accumulate(map(len, tensors))])]
