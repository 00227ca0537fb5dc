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

from lather.boxes import gradient_dtype, is_dtensor, local, local_grad
from lather.device import Read, is_true, read, to_device
from lather.optim.batched.roster import ParamInfo
from lather.optim.plain import rate_of
from lather.torch_private import foreach_mul_, foreach_norm

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Ranks over which tensors are spread -> their process group."""


@dataclass(frozen=True)
class Inspection:
    """Results of the check of a step's gradients."""

    infos: Sequence[ParamInfo]
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

    infos: Sequence[ParamInfo]
    norms: Mapping[int, Tensor]
    """id -> norms of this rank's part of the gradient, on the device."""
    values: Tensor
    """All measured values, 1-D."""
    lengths: Sequence[int]
    """Numbers of consecutive values that belong to each parameter. On a mesh the first part holds
    flags: whether a rank must raise, and on how many ranks each parameter has a gradient."""

    def on_host(self, values: Tensor) -> tuple[dict[int, list[float]], bool]:
        """Return id -> norms of the parameters that have a gradient on any rank, and whether any
        rank must raise. `values`: a copy of `self.values` on the host."""
        if not self.infos or self.infos[0].spread is None:
            norms = _split(values.tolist(), self.lengths)
            return dict(zip(map(id, self.infos), norms, strict=True)), False
        flags, *squares = values.split(list(self.lengths))
        raises, *present = flags.tolist()
        # Squares that are too large or too small for the arithmetic become infinite or zero.
        return {
            id(info): square.to(info.dtypes_of_norms[1]).sqrt().tolist()
            for info, num_ranks, square in zip(self.infos, present, squares, strict=True)
            if num_ranks
        }, raises > 0


@dataclass(frozen=True, eq=False)
class GradientNorms:
    """Norms and flags that a step needs about its gradients, measured but not yet read.

    A caller that reads other values from the device anyway reads `values` together with them, and
    gives the step what `on_host` returns; the step then does not wait for the device.
    """

    infos: Sequence[ParamInfo]
    measured: Sequence[_Measured]

    @property
    def values(self) -> Tensor:
        """All measured values, fp64, 1-D, on the device."""
        parts = [mesh.values.double() for mesh in self.measured if len(mesh.values)]
        if not parts:
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        return torch.cat([part.to(parts[0].device) for part in parts])

    def on_host(self, values: Tensor) -> Inspection:
        """Return what the step needs. `values`: a copy of `self.values` on the host."""
        parts = values.split([len(mesh.values) for mesh in self.measured])
        norms: dict[int, list[float]] = {}
        for mesh, part in zip(self.measured, parts, strict=True):
            norms |= mesh.on_host(part)[0]
        return _inspection(self.infos, norms, set())

    @property
    def of_parameter(self) -> dict[Tensor, Tensor]:
        """The 2-norm of this rank's part of a parameter's gradient, or the norms of its experts,
        on the device, for the parameters of which they were measured."""
        return {
            info.param: mesh.norms[id(info)]
            for mesh in self.measured
            for info in mesh.infos
            if id(info) in mesh.norms
        }


def measure_gradients(infos: Sequence[ParamInfo], groups: Groups) -> GradientNorms:
    """Start on the device the measurements that `inspect_gradients` needs, without waiting for it.

    Measures nothing if a group has `nonfinite` other than "ignore", for then ranks must agree mesh
    by mesh. Raises TypeError as `inspect_gradients` does.
    """
    if any(info.settings.rule.nonfinite != "ignore" for info in infos):
        return GradientNorms((), ())
    _check_all(infos)
    meshes = _by_mesh(infos)
    return GradientNorms(infos, [_measure(mesh, groups, raises=False) for mesh in meshes])


def inspect_gradients(
    infos: Sequence[ParamInfo], groups: Groups, known: Inspection | None = None
) -> Inspection:
    """Check the gradients. A parameter that is spread over ranks takes the step if any rank has a
    gradient for it; all ranks of its mesh get the same results.

    Raises TypeError for a gradient that is sparse, complex or on another mesh than its parameter,
    and ValueError, on all ranks of the meshes, for a non-finite gradient whose group has
    `nonfinite="raise"`. `known`: results for these gradients, if the caller has read them; those
    of other parameters are not used.
    """
    if known is not None and known.infos is infos:
        return known
    _check_all(infos)
    norms: dict[int, list[float]] = {}
    bad: set[int] = set()
    offender = ""
    for mesh in _by_mesh(infos):
        measured = _measure(mesh, groups, raises=bool(offender))
        of_mesh, others_raise = measured.on_host(read(measured.values, Read.GRADIENTS))
        norms |= of_mesh
        if not all(map(math.isfinite, chain.from_iterable(of_mesh.values()))):
            for info in mesh:
                handling = info.settings.rule.nonfinite
                if handling != "ignore" and not all(map(math.isfinite, of_mesh.get(id(info), ()))):
                    bad.add(id(info))
                    offender = offender or (info.name if handling == "raise" else "")
        offender = offender or ("a parameter of other ranks" if others_raise else "")
    if offender:
        raise ValueError(
            f"gradient of {offender} is not finite, or its square is not; nothing was changed. "
            "Skip such steps, lower the "
            "learning rate, or set nonfinite='skip' to pass over the parameter"
        )
    return _inspection(infos, norms, bad)


def _inspection(
    infos: Sequence[ParamInfo], norms: Mapping[int, list[float]], bad: set[int]
) -> Inspection:
    usable = [info for info in infos if id(info) in norms and id(info) not in bad]
    idle = {
        id(info.param): [norm == 0 for norm in norms[id(info)]]
        for info in usable
        if info.layout.has_experts
    }
    return Inspection(infos, usable, idle, len(bad))


def _by_mesh(infos: Sequence[ParamInfo]) -> list[list[ParamInfo]]:
    """Divide parameters into those that are not spread over ranks, if any, and those of each mesh,
    in the same order on every rank."""
    meshes: dict[tuple[int, ...], list[ParamInfo]] = {}
    for info in infos:
        meshes.setdefault(() if info.spread is None else info.spread.ranks, []).append(info)
    return list(dict(sorted(meshes.items())).values())


def are_zero(infos: Sequence[ParamInfo], groups: Groups) -> bool:
    """Whether all gradients on all ranks are exactly zero; missing gradients count as zero."""
    grads = (local(info.param.grad) for info in infos if info.param.grad is not None)
    zero = not any(is_true(grad.any(), Read.ZERO) for grad in grads)
    for mesh in _by_mesh(infos):
        if mesh[0].spread is not None:
            flag = torch.tensor(float(zero), device=local(mesh[0].param).device)
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=groups[mesh[0].spread.ranks])
            zero = is_true(flag, Read.ZERO)
    return zero


def checked_factor(value: Any) -> float:
    """Return a factor of gradients as a float. Raises ValueError unless it is in (0, 1]: none that
    is finite then becomes infinite."""
    factor = value if type(value) is float else rate_of(value)
    if not 0 < factor <= 1:
        raise ValueError(
            f"gradient_factor is {value!r}, but has to be a number > 0 and <= 1; if the norm of "
            "the gradients is not finite, skip the step"
        )
    return factor


def multiply_gradients(infos: Iterable[ParamInfo], factor: float) -> None:
    """Multiply this rank's parts of gradients in place, but for those that their rules multiply as
    they read them (`ParamInfo.takes_factor`). Raises ValueError, before that, for a gradient that
    cannot be written."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for info in infos:
        if info.param.grad is not None and not info.takes_factor:
            grad = local(info.param.grad)
            if any(n > 1 and not step for n, step in zip(grad.shape, grad.stride(), strict=True)):
                raise ValueError(
                    f"the gradient of {info.name} has elements that share memory, as `expand` "
                    "makes them, and cannot be multiplied in place: clone it"
                )
            alike.setdefault((grad.device, grad.dtype), []).append(grad)
    for grads in alike.values():
        foreach_mul_(grads, factor)


def _check_all(infos: Sequence[ParamInfo]) -> None:
    """Raise TypeError if there is a gradient that no rule accepts; give others the placements of
    their parameters."""
    for info in infos:
        grad, p = info.param.grad, info.param
        if grad is None:
            continue
        if info.spread is not None and grad.dtype != gradient_dtype(p):
            raise TypeError(
                f"gradient of {info.name} is {grad.dtype}, but gradients of this parameter, which "
                f"is spread over ranks, have to be {gradient_dtype(p)}: set its grad_dtype on "
                "every rank"
            )
        if info.spread is not None and is_dtensor(p):
            grad = _placed_as(p, grad, info.name)
            if grad is not p.grad:
                p.grad = grad
        if grad.layout is not torch.strided or grad.is_complex():
            kind = "complex" if grad.is_complex() else "sparse"
            raise TypeError(
                f"gradient of {info.name} is {kind}; {info.rule.name or 'this rule'} takes dense "
                "real gradients: give it to another optimizer"
            )


def _placed_as(p: Any, grad: Any, name: str) -> Tensor:
    """Return the gradient with the placements of its parameter. Tensor parallelism leaves it whole
    on every rank for an embedding, and unsummed for norms of parts of the sequence."""
    if is_dtensor(grad) and grad.device_mesh == p.device_mesh:
        if tuple(grad.placements) == tuple(p.placements):
            return grad
        return grad.redistribute(placements=p.placements)
    raise TypeError(
        f"gradient of {name} is no DTensor on the mesh of the parameter: give it as "
        "distribute_tensor(grad, parameter.device_mesh, parameter.placements)"
    )


def _measure(infos: Sequence[ParamInfo], groups: Groups, *, raises: bool) -> _Measured:
    """Measure the gradients of parameters on one mesh, whose ranks also exchange whether any of
    them `raises`, or of parameters that are not spread over ranks."""
    spread = infos[0].spread
    if spread is None:
        infos = [info for info in infos if info.param.grad is not None]
    batches = _norms(infos)
    norms = {
        id(info): norm
        for alike, of_alike in batches
        for info, norm in zip(alike, of_alike.split(alike[0].num_norms), strict=True)
    }
    if spread is None:
        order = [info for alike, _ in batches for info in alike]
        order += [info for info in infos if id(info) not in norms]
        values = torch.zeros(0, device="cpu")
        if batches:
            values = torch.cat([x.to(batches[0][1].device) for _, x in batches])
        return _Measured(order, norms, values, [info.num_norms for info in order])
    device = local(infos[0].param).device
    flags = [float(raises), *(float(info.param.grad is not None) for info in infos)]
    parts = [to_device(torch.tensor(flags, dtype=torch.float64, device="cpu"), device)]
    for info in infos:
        assert info.spread is not None
        squares = torch.zeros(info.num_norms, dtype=torch.float64, device=device)
        if info.num_norms:
            box, norm = info.spread.box, norms[id(info)].double()
            first = box.offset[0] if info.layout.has_experts else 0
            num_copies = len(info.spread.positions_of[box])
            squares[first : first + len(norm)] = norm.square() / num_copies
        parts.append(squares)
    values = torch.cat(parts)
    dist.all_reduce(values, group=groups[spread.ranks])
    return _Measured(infos, norms, values, list(map(len, parts)))


def _norms(infos: Sequence[ParamInfo]) -> list[tuple[list[ParamInfo], Tensor]]:
    """Compute the norms that are needed: of a parameter with experts, those of this rank's experts;
    of each other parameter, its norm, together for parameters of the same dtypes."""
    measured: list[tuple[list[ParamInfo], Tensor]] = []
    whole: dict[tuple[torch.dtype, torch.dtype], list[ParamInfo]] = {}
    for info in infos:
        if info.layout.has_experts:
            grad, (dtype, arithmetic) = local_grad(info.param), info.dtypes_of_norms
            dims = tuple(range(1, grad.dim()))
            norms = torch.linalg.vector_norm(grad, dim=dims, dtype=dtype)
            measured.append(([info], _in_range(norms, arithmetic)))
        elif info.num_norms:
            whole.setdefault(info.dtypes_of_norms, []).append(info)
    for (dtype, arithmetic), alike in whole.items():
        grads: Any = [x.param.grad if x.spread is None else local_grad(x.param) for x in alike]
        norms = torch.stack([x.to(grads[0].device) for x in foreach_norm(grads, 2, dtype=dtype)])
        measured.append((alike, _in_range(norms, arithmetic)))
    return measured


def _in_range(norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norms, infinite where a narrower dtype does not have their squares because they
    are too large, and zero where they are too small."""
    if dtype == norms.dtype:
        return norms
    squares = norms.square().to(dtype)
    return norms.where(squares != 0, 0.0).where(squares.isfinite(), torch.inf)


def read_together(tensors: Sequence[Tensor], what: Read) -> list[list[Any]]:
    """Return the values of 1-D tensors as lists; if all are on one device, the host waits for it
    once."""
    if not tensors:
        return []
    values = read(torch.cat([x.to(tensors[0].device) for x in tensors]), what)
    return _split(values.tolist(), map(len, tensors))


def _split(values: Sequence[Any], lengths: Iterable[int]) -> list[list[Any]]:
    """Divide values into consecutive lists of these lengths."""
    remaining = iter(values)
    return [list(islice(remaining, length)) for length in lengths]
