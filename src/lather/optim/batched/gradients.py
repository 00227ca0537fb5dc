"""Checks of the gradients before a step changes anything: whether they are dense, real and finite,
and which experts got no token.

The check reads each gradient once and waits for the device once, and once more for each mesh over
which parameters are spread, whose ranks then agree. A caller that reads other values from the
device anyway can start the check first (`measure_gradients`) and read its results together with
them; the step itself then waits for nothing.

Both answers come from the 2-norm in the dtype of the arithmetic. It is also infinite where only the
squares overflow, which would ruin second moments and factors, and also zero where all squares
underflow, so that the gradient adds nothing to a factor. For a parameter that is spread over ranks
the squares of all parts are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.boxes import is_dtensor, local, local_grad
from lather.device import Read, is_true, read, to_device
from lather.optim.batched.roster import ParamInfo
from lather.torch_private import foreach_norm

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Ranks over which tensors are spread -> their process group."""


@dataclass(frozen=True)
class Inspection:
    """Results of the check of a step's gradients."""

    params: Sequence[ParamInfo]
    """The parameters that were checked."""
    usable: list[ParamInfo]
    """Parameters that take the step."""
    idle: dict[int, list[bool]]
    """id of a parameter with experts -> for each expert, whether it got no token (its gradient is
    exactly zero)."""
    num_bad: int
    """Number of gradients that are skipped because they are not finite."""


@dataclass(eq=False)
class _Measured:
    """Measurements, not yet read, of the gradients of parameters on one mesh, or of parameters that
    are not spread over ranks."""

    params: Sequence[ParamInfo]
    own: dict[int, Tensor]
    """id -> norms of this rank's part of the gradient, on the device."""
    found: Tensor
    """All measured values, 1-D."""
    lengths: Sequence[int]
    """Numbers of consecutive values in `found` that belong to each parameter. On a mesh the first
    part holds flags: whether a rank must raise, and on how many ranks each parameter has a
    gradient."""

    def on_host(self, values: Tensor) -> tuple[dict[int, list[float]], bool]:
        """Return id -> norms of the parameters that have a gradient on any rank, and whether any
        rank must raise. `values`: those of `found`, on the host."""
        if self.params and self.params[0].spread is not None:
            flags, *squared = values.split(list(self.lengths))
            elsewhere, *present = flags.tolist()
            # Squares that are too large or too small for the arithmetic become infinite or zero.
            found = zip(self.params, present, squared, strict=True)
            present_ones = ((one, x.to(one.dtypes_of_norms[1])) for one, here, x in found if here)
            return {id(one): x.sqrt().tolist() for one, x in present_ones}, elsewhere > 0
        norms = _split(values.tolist(), self.lengths)
        return dict(zip(map(id, self.params), norms, strict=True)), False


@dataclass(frozen=True, eq=False)
class GradientNorms:
    """Norms and flags that a step needs about its gradients, measured but not yet read.

    A caller that reads other values from the device anyway reads `values` together with them, and
    gives the step what `on_host` returns; the step then does not wait for the device.
    """

    params: Sequence[ParamInfo]
    measured: Sequence[_Measured]

    @property
    def values(self) -> Tensor:
        """All measured values, fp64, 1-D, on the device."""
        parts = [some.found.double() for some in self.measured if len(some.found)]
        if not parts:
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        return torch.cat([part.to(parts[0].device) for part in parts])

    def on_host(self, values: Tensor) -> Inspection:
        """Return what the step needs. `values`: a copy of `self.values` on the host."""
        parts = values.split([len(some.found) for some in self.measured])
        norms: dict[int, list[float]] = {}
        for some, part in zip(self.measured, parts, strict=True):
            norms |= some.on_host(part)[0]
        return _inspection(self.params, norms, set())

    @property
    def of_parameter(self) -> dict[Tensor, Tensor]:
        """The 2-norm of this rank's part of a parameter's gradient, or the norms of its experts,
        on the device, for the parameters of which they were measured."""
        return {
            one.param: some.own[id(one)]
            for some in self.measured
            for one in some.params
            if id(one) in some.own
        }


def measure_gradients(params: Sequence[ParamInfo], groups: Groups) -> GradientNorms:
    """Start on the device the measurements that `inspect_gradients` needs, without waiting for it.

    Measures nothing if a group has `nonfinite` other than "ignore", for then ranks must agree mesh
    by mesh. Raises TypeError as `inspect_gradients` does.
    """
    if any(one.settings.rule.nonfinite != "ignore" for one in params):
        return GradientNorms((), ())
    _check_all(params)
    return GradientNorms(
        params, [_measure(some, groups, raises=False) for some in _by_mesh(params)]
    )


def inspect_gradients(
    params: Sequence[ParamInfo], groups: Groups, known: Inspection | None = None
) -> Inspection:
    """Check the gradients. A parameter that is spread over ranks takes the step if any rank has a
    gradient for it; all ranks of its mesh get the same results.

    Raises TypeError for a gradient that is sparse, complex or has other placements than its
    parameter, and ValueError, on all ranks of the meshes, for a non-finite gradient whose group has
    `nonfinite="raise"`. `known`: results for these gradients, if the caller has read them; those
    of other parameters are not used.
    """
    if known is not None and known.params is params:
        return known
    _check_all(params)
    norms: dict[int, list[float]] = {}
    bad: set[int] = set()
    offender: str | None = None
    for some in _by_mesh(params):
        measured = _measure(some, groups, raises=offender is not None)
        found, elsewhere = measured.on_host(read(measured.found, Read.GRADIENTS))
        norms |= found
        if not all(map(math.isfinite, chain.from_iterable(found.values()))):
            more = [
                one
                for one in some
                if one.settings.rule.nonfinite != "ignore"
                and not all(map(math.isfinite, found.get(id(one), ())))
            ]
            bad |= set(map(id, more))
            offender = offender or next(
                (one.name for one in more if one.settings.rule.nonfinite == "raise"), None
            )
        offender = offender or ("a parameter of other ranks" if elsewhere else None)
    if offender is not None:
        raise ValueError(
            f"gradient of {offender} is not finite, or its square is not; nothing was changed. "
            "Skip such steps, lower the "
            "learning rate, or set nonfinite='skip' to pass over the parameter"
        )
    return _inspection(params, norms, bad)


def _inspection(
    params: Sequence[ParamInfo], norms: Mapping[int, list[float]], bad: set[int]
) -> Inspection:
    usable = [one for one in params if id(one) in norms and id(one) not in bad]
    idle = {
        id(one.param): [norm == 0 for norm in norms[id(one)]]
        for one in usable
        if one.layout.has_experts
    }
    return Inspection(params, usable, idle, len(bad))


def _by_mesh(params: Sequence[ParamInfo]) -> list[list[ParamInfo]]:
    """Divide parameters into those that are not spread over ranks, if any, and those of each mesh,
    in the same order on every rank."""
    found: dict[tuple[int, ...], list[ParamInfo]] = {}
    for one in params:
        found.setdefault(() if one.spread is None else one.spread.ranks, []).append(one)
    return [found[ranks] for ranks in sorted(found, key=lambda ranks: (len(ranks), ranks))]


def are_zero(params: Sequence[ParamInfo], groups: Groups) -> bool:
    """Whether all gradients on all ranks are exactly zero; missing ones count as zero."""
    grads = (local(one.param.grad) for one in params if one.param.grad is not None)
    zero = not any(is_true(grad.any(), Read.ZERO) for grad in grads)
    for some in _by_mesh(params):
        if some[0].spread is not None:
            found = torch.tensor(float(zero), device=local(some[0].param).device)
            dist.all_reduce(found, dist.ReduceOp.MIN, group=groups[some[0].spread.ranks])
            zero = is_true(found, Read.ZERO)
    return zero


def _check_all(params: Sequence[ParamInfo]) -> None:
    """Raise TypeError if there is a gradient that no rule accepts."""
    for one in params:
        grad = one.param.grad
        if grad is None:
            continue
        if one.spread is not None and grad.dtype != one.param.dtype:
            raise TypeError(
                f"gradient of {one.name} is {grad.dtype}, the parameter {one.param.dtype}: spread "
                "over ranks, both must have the same dtype"
            )
        if (
            one.spread is not None
            and is_dtensor(one.param)
            and (not is_dtensor(grad) or grad.placements != one.param.placements)
        ):
            found = tuple(grad.placements) if is_dtensor(grad) else "none"
            raise TypeError(
                f"gradient of {one.name} has placements {found}, the parameter "
                f"{tuple(one.param.placements)}: they must be equal; "
                "give it as grad.redistribute(placements=parameter.placements)"
            )
        if grad.layout is not torch.strided or grad.is_complex():
            kind = "complex" if grad.is_complex() else "sparse"
            raise TypeError(
                f"gradient of {one.name} is {kind}; {one.rule.name or 'this rule'} takes dense "
                "real gradients: give it to another optimizer"
            )


def _measure(some: Sequence[ParamInfo], groups: Groups, *, raises: bool) -> _Measured:
    """Measure the gradients of parameters on one mesh, whose ranks also exchange whether any of
    them `raises`, or of parameters that are not spread over ranks."""
    spread = some[0].spread
    if spread is None:
        some = [one for one in some if one.param.grad is not None]
    measured = _norms(some)
    own = {
        id(one): norm
        for alike, norms in measured
        for one, norm in zip(alike, norms.split(alike[0].num_norms), strict=True)
    }
    if spread is None:
        order = [one for alike, _ in measured for one in alike] + [
            one for one in some if id(one) not in own
        ]
        found = torch.zeros(0, device="cpu")
        if measured:
            found = torch.cat([norms.to(measured[0][1].device) for _, norms in measured])
        return _Measured(order, own, found, [one.num_norms for one in order])
    device = local(some[0].param).device
    flags = [float(raises), *(float(one.param.grad is not None) for one in some)]
    parts = [to_device(torch.tensor(flags, dtype=torch.float64, device="cpu"), device)]
    for one in some:
        assert one.spread is not None
        squares = torch.zeros(one.num_norms, dtype=torch.float64, device=device)
        if one.num_norms:
            first = one.spread.box.offset[0] if one.layout.has_experts else 0
            squares[first : first + len(own[id(one)])] = own[id(one)].double().square() / len(
                one.spread.positions_of[one.spread.box]
            )
        parts.append(squares)
    found = torch.cat(parts)
    dist.all_reduce(found, group=groups[spread.ranks])
    return _Measured(some, own, found, list(map(len, parts)))


def _norms(params: Sequence[ParamInfo]) -> list[tuple[list[ParamInfo], Tensor]]:
    """Compute the norms that are needed: those of this rank's experts of one parameter, or one norm
    for each of several parameters."""
    found: list[tuple[list[ParamInfo], Tensor]] = []
    whole: dict[tuple[torch.dtype, torch.dtype], list[ParamInfo]] = {}
    for one in params:
        if one.layout.has_experts:
            grad = local_grad(one.param)
            dims = tuple(range(1, grad.dim()))
            dtype, arithmetic = one.dtypes_of_norms
            norms = torch.linalg.vector_norm(grad, dim=dims, dtype=dtype)
            found.append(([one], norms if dtype == arithmetic else _in_range(norms, arithmetic)))
        elif one.num_norms:
            whole.setdefault(one.dtypes_of_norms, []).append(one)
    for (dtype, arithmetic), same in whole.items():
        grads: Any = [
            one.param.grad if one.spread is None else local_grad(one.param) for one in same
        ]
        each = [norm.to(grads[0].device) for norm in foreach_norm(grads, 2, dtype=dtype)]
        norms = torch.stack(each)
        found.append((same, norms if dtype == arithmetic else _in_range(norms, arithmetic)))
    return found


def _in_range(norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norms, infinite where this narrower dtype does not have their squares because they
    are too large, and zero where they are too small."""
    squares = norms.square().to(dtype)
    return norms.where(squares != 0, 0.0).where(squares.isfinite(), torch.inf)


def read_together(tensors: Sequence[Tensor], what: Read) -> list[list[Any]]:
    """Return the values of 1-D tensors on the host; the device is waited for once if all tensors
    are on the same one."""
    if not tensors:
        return []
    values = read(torch.cat([x.to(tensors[0].device) for x in tensors]), what)
    return _split(values.tolist(), map(len, tensors))


def _split(values: Sequence[Any], lengths: Iterable[int]) -> list[list[Any]]:
    """Divide values into consecutive lists of these lengths."""
    remaining = iter(values)
    return [list(islice(remaining, length)) for length in lengths]
