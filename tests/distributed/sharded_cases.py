"""Optimizers of parameters that are spread over ranks, beside the same optimizer of whole parameters in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from lather.optim import KLSOAP, REKLS, SOAP, MatrixOptimizer, StackedSOAP

KINDS: dict[str, tuple[type[MatrixOptimizer], dict[str, Any]]] = {
    "soap": (SOAP, {"weight_decay": 0.1}),
    "soap_rotate": (SOAP, {"second_moment": "rotate", "use_decoupled_weight_decay": False, "max_update_rms": 0.5}),
    "kl_soap": (KLSOAP, {"weight_decay_method": "l2"}),
    "rekls": (REKLS, {}),
    "stacked_soap": (StackedSOAP, {}),
}

SHAPES: tuple[tuple[int, ...], ...] = ((12, 8), (7, 5), (12, 8), (5, 6, 4), (3, 9), (4, 6, 4), (13,), (12, 8), (1, 4), (33,), (), (4, 6, 4))
"""Equal ones, uneven ones, experts, vectors, and parameters smaller than a mesh."""

EXPERTS = (3, 5, 11)
"""Those whose first dim are experts."""


@dataclass(frozen=True)
class Layout:
    """A mesh and how parameters are placed on it."""

    mesh_shape: tuple[int, ...]
    placements: Callable[[int, tuple[int, ...]], Sequence[Placement]]
    """Of parameter number i with this shape."""
    names: tuple[str, ...] = field(default=("a", "b", "c"))

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", self.mesh_shape, mesh_dim_names=self.names[: len(self.mesh_shape)])


def on_dim(dim: int) -> Callable[[int, tuple[int, ...]], list[Placement]]:
    """Sharded on `dim`, or the last one that there is."""
    return lambda i, shape: [Shard(min(dim, len(shape) - 1)) if shape else Replicate()]


def mixed(i: int, shape: tuple[int, ...]) -> list[Placement]:
    """Column-wise, row-wise, or a copy."""
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    return [choices[i % 3] if len(shape) > i % 3 else Replicate()]


def two(first: Placement, second: Placement) -> Callable[[int, tuple[int, ...]], list[Placement]]:
    def placements(i: int, shape: tuple[int, ...]) -> list[Placement]:
        return [one if one.is_replicate() or (shape and one.dim < len(shape)) else Replicate() for one in (first, second)]  # type: ignore[attr-defined]

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
    },
}


def values(seed: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def gradients(step: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor | None]:
    """Those of some parameters are missing in some steps, some experts have no token in others."""
    found: list[Tensor | None] = []
    for i, grad in enumerate(values(1000 + step, dtype, shapes)):
        if i in EXPERTS:
            grad[step % len(grad)] = 0
        found.append(None if (step + i) % 5 == 0 else grad)
    return found


def make(kind: str, params: Sequence[Tensor], **options: Any) -> MatrixOptimizer:
    cls, preset = KINDS[kind]
    merged = {"lr": 1e-2, **preset, **options}
    layout = "stacked" if kind == "stacked_soap" else "per_expert"
    groups = [
        {"params": [p for i, p in enumerate(params) if i in EXPERTS], "matrix_layout": layout},
        {"params": [p for i, p in enumerate(params) if i not in EXPERTS and p.dim() > 1], "matrix_layout": "tensor"},
        {"params": [p for p in params if p.dim() < 2], "matrix_layout": "tensor", "max_precond_dim": 0, "max_update_rms": 0.0},
    ]
    return cls(groups, **merged)  # type: ignore[arg-type]


@functools.cache
def trained(kind: str, dtype: torch.dtype, steps: int, frequency: int) -> tuple[list[nn.Parameter], MatrixOptimizer]:
    """In one process."""
    options = {"precondition_frequency": frequency}
    params = [nn.Parameter(x) for x in values(0, dtype)]
    optimizer = make(kind, params, **options)
    for step in range(steps):
        for p, grad in zip(params, gradients(step, dtype), strict=True):
            p.grad = grad
        optimizer.step()
    return params, optimizer


def spread(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


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
            self.optimizer.step()

    def whole(self) -> list[Tensor]:
        return [p.detach().full_tensor() for p in self.params]


def make_spread(kind: str, layout: Layout, dtype: torch.dtype, mesh: DeviceMesh | None = None, **options: Any) -> Spread:
    mesh = mesh or layout.mesh()
    placements = [layout.placements(i, shape) for i, shape in enumerate(SHAPES)]
    params = [nn.Parameter(spread(x, mesh, places)) for x, places in zip(values(0, dtype), placements, strict=True)]
    return Spread(params, make(kind, params, **options), mesh, placements, dtype)


def cases() -> Iterator[tuple[str, torch.dtype, int]]:
    """(kind, dtype, frequency)."""
    for kind in KINDS:
        yield kind, torch.float32, 1
        yield kind, torch.bfloat16, 3


def differences(rank: int, world_size: int) -> list[str]:
    """What is not bit for bit what one process computes."""
    wrong = []
    for name, layout in LAYOUTS[world_size].items():
        mesh = layout.mesh()
        for kind, dtype, frequency in cases():
            expected, _ = trained(kind, dtype, 10, frequency)
            found = make_spread(kind, layout, dtype, mesh, precondition_frequency=frequency)
            found.run(range(10))
            case = f"{name}, {kind}, {dtype}, {frequency}"
            for i, (p, q) in enumerate(zip(found.whole(), expected, strict=True)):
                if not torch.equal(p, q.detach()):
                    wrong.append(f"{case}: parameter {i} {SHAPES[i]} by {(p - q).abs().max().item():.1e}")
    dist.barrier()
    return wrong
