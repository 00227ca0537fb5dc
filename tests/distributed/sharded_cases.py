"""Compares optimizers of parameters that are spread over ranks with the same optimizer of whole
parameters in one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretended_boundary import crossing
from strangers import Lion, Shampoo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from lather.boxes import local
from lather.optim import (
    KLSOAP,
    REKLS,
    SOAP,
    AdaMuon,
    AdamW,
    MatrixOptimizer,
    Muon,
    PSGDKron,
    Rule,
    Scion,
    SOAPMuon,
    StackedSOAP,
)
from lather.optim import Shampoo as GraftedShampoo
from lather.optim.batched import roster

KINDS: dict[str, tuple[type[MatrixOptimizer] | type[Rule], dict[str, Any]]] = {
    "soap": (SOAP, {"weight_decay": 0.1}),
    "soap_rotate": (
        SOAP,
        {"second_moment": "rotate", "use_decoupled_weight_decay": False, "max_update_rms": 0.5},
    ),
    "kl_soap": (KLSOAP, {"weight_decay_method": "l2", "async_refresh": True}),
    "rekls": (REKLS, {"radial_brake": 0.5, "row_floor": 0.9}),
    "stacked_soap": (StackedSOAP, {"relative_update": True}),
    "muon": (
        Muon,
        {"keep_norm": True, "weight_rms": 0.5, "normalize": "row", "slow_momentum_start": 3},
    ),
    "soap_muon": (
        SOAPMuon,
        {"weight_decay": 0.1, "weight_decay_method": "l2", "slow_momentum_start": 3},
    ),
    "mixed": (SOAP.rule, {}),
    "heads": (SOAP, {"keep_norm": True}),
    "adamw": (AdamW, {"weight_decay": 0.1}),
    "grafted_shampoo": (GraftedShampoo, {"weight_decay": 0.1}),
    "psgd_kron": (PSGDKron, {"weight_decay_method": "l2"}),
    "adamuon": (AdaMuon, {}),
    "scion": (Scion, {"weight_decay": 0.1}),
    "shampoo": (Shampoo, {"weight_decay": 0.1, "cautious_decay": True}),
    "lion": (Lion, {"weight_decay": 0.1, "weight_decay_method": "l2"}),
}
"""mixed: SOAP on experts, Muon on matrices and AdamW on the rest, by `rule` of their groups, with
the controls of `MIXED`; heads: SOAP on heads of matrices, which shards may cut; shampoo and lion:
rules from outside."""

MIXED: dict[str, dict[str, Any]] = {
    "soap": {"keep_norm": True},
    "muon": {"relative_update": True, "radial_brake": 0.5},
    "adamw": {"radial_brake": 0.5, "row_floor": 0.9, "cautious_decay": True, "weight_decay": 0.1},
}

STRANGERS = ("shampoo", "lion")

SHAPES: tuple[tuple[int, ...], ...] = (
    (12, 8),
    (7, 5),
    (12, 8),
    (5, 6, 4),
    (3, 9),
    (4, 6, 4),
    (13,),
    (12, 8),
    (1, 4),
    (33,),
    (),
    (4, 6, 4),
)
"""Shapes of equal and unequal parameters, experts, vectors, and parameters smaller than a mesh."""

EXPERTS = (3, 5, 11)
"""Numbers of the shapes whose first dim counts experts."""

HEADS: dict[int, dict[str, Any]] = {
    i: {"matrix_layout": "per_head", name: size}
    for i, name, size in ((0, "head_rows", 4), (2, "head_rows", 2), (7, "head_columns", 2))
}
"""Layout of the matrices that have heads in the kind `heads`, by number."""


STEPS = 7
"""Steps of a run; the last uses a third basis where one is renewed every three steps."""


@dataclass(frozen=True)
class Layout:
    """A mesh and how parameters are placed on it."""

    mesh_shape: tuple[int, ...]
    placements: Callable[[int, tuple[int, ...]], Sequence[Placement]]
    """Return the placements of parameter number i with this shape."""
    ranks: tuple[int, ...] = ()
    """The ranks in the mesh, row by row; empty: ascending."""

    def mesh(self) -> DeviceMesh:
        ranks = self.ranks or range(math.prod(self.mesh_shape))
        return DeviceMesh("cpu", torch.tensor(ranks).view(self.mesh_shape))


def on_dim(dim: int) -> Callable[[int, tuple[int, ...]], list[Placement]]:
    """Shard every parameter on `dim`, or on its last dim if it has fewer."""
    return lambda i, shape: [Shard(min(dim, len(shape) - 1)) if shape else Replicate()]


def mixed(i: int, shape: tuple[int, ...]) -> list[Placement]:
    """Place parameters column-wise, row-wise, or as copies, by turns."""
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    return [choices[i % 3] if len(shape) > i % 3 else Replicate()]


def two(first: Placement, second: Placement) -> Callable[[int, tuple[int, ...]], list[Placement]]:
    def placements(i: int, shape: tuple[int, ...]) -> list[Placement]:
        return [
            one if one.is_replicate() or (shape and one.dim < len(shape)) else Replicate()
            for one in (first, second)
        ]  # type: ignore[attr-defined]

    return placements


LAYOUTS = {
    1: {"one rank": Layout((1,), on_dim(0))},
    2: {
        "fsdp": Layout((2,), on_dim(0)),
        "tp": Layout((2,), mixed),
        "experts on 1": Layout((2,), on_dim(1)),
        "copies": Layout((2,), lambda i, shape: [Replicate()]),
    },
    3: {"fsdp": Layout((3,), on_dim(0)), "experts on 2": Layout((3,), on_dim(2))},
    4: {
        "fsdp": Layout((4,), on_dim(0)),
        "tp": Layout((4,), mixed),
        "hsdp": Layout((2, 2), two(Replicate(), Shard(0))),
        "fsdp x tp": Layout((2, 2), two(Shard(0), Shard(1))),
        "both on 0": Layout((2, 2), two(Shard(0), Shard(0))),
        "in another order": Layout((2, 2), two(Shard(0), Shard(1)), ranks=(0, 2, 1, 3)),
    },
}


def values(
    seed: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def gradients(
    step: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Tensor | None]:
    """Draw gradients; some parameters have none in some steps, and some experts get no token in
    others."""
    found: list[Tensor | None] = []
    for i, grad in enumerate(values(1000 + step, dtype, shapes)):
        if i in EXPERTS:
            grad[step % len(grad)] = 0
        found.append(None if (step + i) % 5 == 0 else grad)
    return found


def factor_of(step: int) -> float:
    """Return the factor by which a step multiplies its gradients: some are clipped."""
    return 0.37 if step % 3 == 1 else 1.0


def build(kind: str, groups: Sequence[dict[str, Any]], **options: Any) -> MatrixOptimizer:
    """Make the optimizer `kind` over these groups. A frequency in the options counts only for rules
    that refresh."""
    cls, preset = KINDS[kind]
    rule = cls if issubclass(cls, Rule) else cls.rule
    known = {field.name for field in fields(rule)}
    if "precondition_frequency" not in known:
        options.pop("precondition_frequency", None)
    if kind == "mixed":
        for group in groups:
            group.setdefault("rule", rule_for(group))
            group.update(MIXED[group["rule"]])
    merged = {"lr": 1e-2, **preset, **options}
    return MatrixOptimizer(groups, rule(**merged)) if cls is rule else cls(groups, **merged)  # type: ignore[arg-type]


def rule_for(group: dict[str, Any]) -> str:
    """Name the rule of a group of the mixed optimizer."""
    if group.get("matrix_layout") == "per_expert":
        return "soap"
    first = next(iter(group["params"]))
    p = first[1] if isinstance(first, tuple) else first
    return "muon" if p.dim() > 1 and p.shape[-1] != SHAPES[4][1] else "adamw"


def make(kind: str, params: Sequence[Tensor], **options: Any) -> MatrixOptimizer:
    layout = "stacked" if kind == "stacked_soap" else "per_expert"
    heads = HEADS if kind == "heads" else {}
    others = (*EXPERTS, *heads, 4)
    groups = [
        *({"params": [params[i]], **of_heads} for i, of_heads in heads.items()),
        {"params": [p for i, p in enumerate(params) if i in EXPERTS], "matrix_layout": layout},
        {
            "params": [p for i, p in enumerate(params) if i not in others and p.dim() > 1],
            "matrix_layout": "tensor",
        },
        {"params": [params[4]], "matrix_layout": "tensor"},
        {
            "params": [p for p in params if p.dim() < 2],
            "matrix_layout": "tensor",
            **without_bases(kind),
        },
    ]
    return build(kind, groups, **options)


def without_bases(kind: str) -> dict[str, Any]:
    """Options under which SOAP is AdamW."""
    cls, _ = KINDS[kind]
    return {"max_precond_dim": 0, "max_update_rms": 0.0} if issubclass(cls, SOAP | KLSOAP) else {}


@functools.cache
def trained(
    kind: str, dtype: torch.dtype, steps: int, frequency: int
) -> tuple[list[nn.Parameter], MatrixOptimizer]:
    """Train in one process."""
    options = {"precondition_frequency": frequency}
    params = [nn.Parameter(x) for x in values(0, dtype)]
    optimizer = make(kind, params, **options)
    for step in range(steps):
        for p, grad in zip(params, gradients(step, dtype), strict=True):
            p.grad = grad
        optimizer.step(gradient_factor=factor_of(step))
    return params, optimizer


def told_by_the_first(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors of rank 0, which alone does what one process does; on other ranks
    `tensors` say shapes and dtypes."""
    told = [x.detach().clone() for x in tensors]
    for x in told:
        dist.broadcast(x, 0)
    return told


@functools.cache
def expected_of(kind: str, dtype: torch.dtype, steps: int, frequency: int) -> list[Tensor]:
    """Return the parameters that one process has trained."""
    return told_by_the_first(
        trained(kind, dtype, steps, frequency)[0] if dist.get_rank() == 0 else values(0, dtype)
    )


def spread(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Distribute a copy of x: a DTensor that is replicated would be x itself."""
    return distribute_tensor(x.clone(), mesh, placements, src_data_rank=None)


@dataclass
class Spread:
    """An optimizer of spread parameters."""

    params: list[nn.Parameter]
    optimizer: MatrixOptimizer
    mesh: DeviceMesh
    placements: list[Sequence[Placement]]
    dtype: torch.dtype

    def give(self, grads: Sequence[Tensor | None]) -> None:
        for p, grad, placements in zip(self.params, grads, self.placements, strict=True):
            p.grad = None if grad is None else spread(grad, self.mesh, placements)

    def run(self, steps: range) -> None:
        for step in steps:
            self.give(gradients(step, self.dtype))
            self.optimizer.step(gradient_factor=factor_of(step))

    def whole(self) -> list[Tensor]:
        return [p.detach().full_tensor() for p in self.params]


def make_spread(
    kind: str, layout: Layout, dtype: torch.dtype, mesh: DeviceMesh | None = None, **options: Any
) -> Spread:
    mesh = mesh or layout.mesh()
    placements = [layout.placements(i, shape) for i, shape in enumerate(SHAPES)]
    params = [
        nn.Parameter(spread(x, mesh, places))
        for x, places in zip(values(0, dtype), placements, strict=True)
    ]
    return Spread(params, make(kind, params, **options), mesh, placements, dtype)


def cases(kinds: Sequence[str]) -> Iterator[tuple[str, torch.dtype, int]]:
    """Yield (kind, dtype, frequency) of every case."""
    for frequencies in ((1, 3), (3, 1)):
        for kind in kinds:
            yield from zip([kind] * 2, (torch.float32, torch.bfloat16), frequencies, strict=True)


def chosen(number: int, share: int, kinds: Sequence[str]) -> list[tuple[str, torch.dtype, int]]:
    """Return the cases of a layout: one in `share`, the next layout's three further."""
    return list(cases(kinds))[3 * number % share :: share]


def differences(
    rank: int, world_size: int, share: int, kinds: Sequence[str] = tuple(KINDS)
) -> list[str]:
    """Name the parameters that are not bit for bit one process's, in the chosen cases of each
    layout."""
    wrong = []
    for number, (name, layout) in enumerate(LAYOUTS[world_size].items()):
        mesh = layout.mesh()
        for kind, dtype, frequency in chosen(number, share, kinds):
            expected = expected_of(kind, dtype, STEPS, frequency)
            found = make_spread(kind, layout, dtype, mesh, precondition_frequency=frequency)
            found.run(range(STEPS))
            case = f"{name}, {kind}, {dtype}, {frequency}"
            for i, (p, q) in enumerate(zip(found.whole(), expected, strict=True)):
                if not torch.equal(p, q):
                    wrong.append(
                        f"{case}: parameter {i} {SHAPES[i]} by {(p - q).abs().max().item():.1e}"
                    )
    dist.barrier()
    return wrong


def differences_of_kernels_that_take_the_factor(rank: int, world_size: int) -> list[str]:
    """Name the cases whose weights are not those of one process that multiplies gradients in place,
    or in which no parameter, or every one, is left to its rule, as on a GPU."""
    wrong, mesh = [], LAYOUTS[world_size]["tp"].mesh()
    for kind, ownership in (("mixed", "whole"), ("adamuon", "replicated"), ("adamuon", "whole")):
        expected = expected_of(kind, torch.float32, STEPS, 3)
        options = {"precondition_frequency": 3, "ownership": ownership}
        found = make_spread(kind, LAYOUTS[world_size]["tp"], torch.float32, mesh, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roster, "is_gpu", lambda on: True)
            found.run(range(STEPS - 2))
            left = [
                torch.equal(local(p.grad), local(spread(grad, mesh, places)))
                for p, grad, places in zip(
                    found.params,
                    gradients(STEPS - 3, torch.float32),
                    found.placements,
                    strict=True,
                )
                if grad is not None and grad.dim() and local(p).numel()
            ]
            found.run(range(STEPS - 2, STEPS))
        if all(left) or not any(left) or not all(map(torch.equal, found.whole(), expected)):
            wrong.append(f"{kind}, {ownership}: {left}")
    dist.barrier()
    return wrong


def offloaded_differences(rank: int, world_size: int) -> list[str]:
    """Name the layouts in which weights or state differ with offloaded state, on a pretended
    boundary, also after a load of their own state."""
    wrong = []
    for kind, (name, layout) in zip(
        ("soap", "mixed", "rekls", "adamw"), LAYOUTS[world_size].items(), strict=True
    ):
        mesh, options = layout.mesh(), {"precondition_frequency": 2}
        staying = make_spread(kind, layout, torch.float32, mesh, **options)
        visiting = make_spread(
            kind, layout, torch.float32, mesh, **options, offload=True, bucket_bytes=4000
        )
        staying.run(range(STEPS))
        with pytest.MonkeyPatch.context() as patch, crossing(patch) as boundary:
            visiting.run(range(4))
            visiting.optimizer.load_state_dict(visiting.optimizer.state_dict())
            visiting.run(range(4, STEPS))
            expected, found = (x.optimizer.state_dict()["state"] for x in (staying, visiting))
        same = all(map(torch.equal, staying.whole(), visiting.whole())) and all(
            torch.equal(local(x), local(found[number][key]))
            for number, entries in expected.items()
            for key, x in entries.items()
        )
        if not (same and boundary.fetched):
            wrong.append(f"{name}, {kind}")
    return wrong
