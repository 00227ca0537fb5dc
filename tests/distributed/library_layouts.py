"""Differences of sharded optimizers from unsharded ones under the layouts of other libraries: plain
shards of tensor parallelism, experts of expert parallelism, and FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from sharded_cases import (
    EXPERTS,
    KINDS,
    SHAPES,
    STEPS,
    build,
    gradients,
    make,
    spread,
    told_by_the_first,
    values,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lather.boxes import local
from lather.optim import (
    MatrixOptimizer,
    parameter_groups,
)


def shards_of(x: Tensor, dim: int | None, num: int) -> list[Tensor]:
    """Cut x as `num` tensor-parallel ranks hold it."""
    return [x.clone()] * num if dim is None else [part.clone() for part in x.chunk(num, dim)]


Cut = Callable[[int, Tensor], Tensor]
"""Returns a rank's part of a value of parameter number i."""


def step_both(
    one: MatrixOptimizer,
    many: MatrixOptimizer,
    params: Sequence[tuple[nn.Parameter, nn.Parameter]],
    gradients_of: Callable[[int], Sequence[Tensor | None]],
    cut: Cut,
    steps: range,
) -> list[int]:
    """Take steps in one process (on rank 0) and on all ranks; return the numbers of the parameters
    that then differ on this rank. `params`: whole parameters, each with this rank's part."""
    for step in steps:
        for i, ((p, q), grad) in enumerate(zip(params, gradients_of(step), strict=True)):
            p.grad, q.grad = grad, None if grad is None else cut(i, grad)
        if dist.get_rank() == 0:
            one.step()
        many.step()
    expected = enumerate(told_by_the_first(p for p, _ in params))
    return [i for i, p in expected if not torch.equal(local(cut(i, p)), local(params[i][1]))]


def plain_shard_differences(rank: int, world_size: int) -> list[str]:
    """Name the parameters that differ on tensor-parallel shards that are plain tensors, on dims 0,
    1 and None."""
    shapes = ((8, 12), (12, 8), (7, 5), (4, 8, 12), (16,), (5,), (8, 12))
    dims = (0, 1, None, 1, 0, None, 0)

    def cut(i: int, x: Tensor) -> Tensor:
        return shards_of(x, dims[i], world_size)[rank]

    def gradients_of(step: int) -> list[Tensor]:
        return values(1000 + step, torch.float32, shapes)

    wrong = []
    for kind in KINDS:
        whole = [nn.Parameter(x) for x in values(0, torch.float32, shapes)]
        parts = [nn.Parameter(cut(i, p.detach())) for i, p in enumerate(whole)]
        experts = "stacked" if kind == "stacked_soap" else "per_expert"
        layouts = [experts if len(shape) > 2 else "tensor" for shape in shapes]
        plain, sharded = (
            [
                {"params": [p], "matrix_layout": layout, **({"partition_dim": dim} if cuts else {})}
                for p, layout, dim in zip(params, layouts, dims, strict=True)
            ]
            for params, cuts in ((whole, False), (parts, True))
        )
        one, many = build(kind, plain), build(kind, sharded, tp_group=dist.group.WORLD)
        pairs = list(zip(whole, parts, strict=True))
        step_both(one, many, pairs, gradients_of, cut, range(4))
        many.load_state_dict(many.state_dict())
        differing = step_both(one, many, pairs, gradients_of, cut, range(4, 6))
        wrong += [f"{kind}: parameter {i} {shapes[i]} on {dims[i]}" for i in differing]
    return wrong


def expert_parallel_differences(rank: int, world_size: int) -> list[str]:
    """Name what differs with experts on two expert-parallel ranks, each with FSDP2 on two, along
    dims 0, 1 and 2, all else with FSDP2 on four."""
    wrong = []
    mesh = DeviceMesh("cpu", torch.arange(world_size).view(2, 2), mesh_dim_names=("ep", "fsdp"))
    place = mesh.get_local_rank("ep")
    shapes = [(4, *shape[1:]) if i in EXPERTS else shape for i, shape in enumerate(SHAPES)]

    def cut(i: int, x: Tensor) -> Tensor:
        if i in EXPERTS:
            return spread(x.chunk(2)[place], mesh["fsdp"], [Shard(EXPERTS.index(i))])
        return spread(x, mesh, [Shard(0), Shard(0)] if x.dim() else [Replicate(), Replicate()])

    def gradients_of(step: int) -> list[Tensor | None]:
        return gradients(step, torch.float32, shapes)

    # stacked_soap stacks the experts of the rank, so that it is another rule on every mesh
    for kind in [kind for kind in KINDS if kind != "stacked_soap"]:
        whole = [nn.Parameter(x) for x in values(0, torch.float32, shapes)]
        parts = [nn.Parameter(cut(i, p.detach())) for i, p in enumerate(whole)]
        one, many = (make(kind, params, precondition_frequency=3) for params in (whole, parts))
        pairs = list(zip(whole, parts, strict=True))
        differing = step_both(one, many, pairs, gradients_of, cut, range(STEPS))
        wrong += [f"{kind}: parameter {i} {shapes[i]}" for i in differing]
    return wrong


class Net(nn.Module):
    """A module with two projections and a stack of experts, each of which `fully_shard` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 14, bias=True), nn.Linear(14, 8, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        if isinstance(self.experts, DTensor):
            y = DTensor.from_local(y, self.experts.device_mesh, [Replicate()])
        return torch.einsum("bi,eoi->beo", y, self.experts).square().mean()


def fsdp2_differences(rank: int, world_size: int, kinds_of: dict[int, list[str]]) -> list[str]:
    """Name what differs under real `fully_shard` over so many tensor-parallel ranks, which cut dim
    0 a second time. Gradients are those of FSDP2's own backward pass."""
    wrong = []
    for tp, kinds in kinds_of.items():
        for kind in kinds:
            one = Net()
            with torch.no_grad():
                for p, x in zip(
                    one.parameters(),
                    values(0, torch.float32, [tuple(p.shape) for p in one.parameters()]),
                    strict=True,
                ):
                    p.copy_(x)
            many = copy.deepcopy(one)
            mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
            if tp > 1:
                parallelize_module(
                    many, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )
                many.experts = nn.Parameter(
                    distribute_tensor(many.experts.detach(), mesh["tp"], [Replicate()])
                )
            fully_shard(many, mesh=mesh["dp"])
            experts = "stacked" if kind == "stacked_soap" else "per_expert"
            ours, alone = (
                build(kind, parameter_groups(net, expert_layout=experts)) for net in (many, one)
            )
            for step in range(5):
                x = values(50 + step, torch.float32, [(world_size, 8)])[0]
                shard = x[rank : rank + 1] if tp == 1 else x[rank // tp * 2 : rank // tp * 2 + 2]
                many(shard).backward()
                gathered = [p.grad.full_tensor() for p in many.parameters()]  # type: ignore[union-attr]
                for p, grad in zip(one.parameters(), gathered, strict=True):
                    p.grad = grad
                ours.step()
                if rank == 0:
                    alone.step()
                ours.zero_grad()
            for (name, p), q in zip(
                many.named_parameters(), told_by_the_first(one.parameters()), strict=True
            ):
                if not torch.equal(p.full_tensor(), q):  # type: ignore[attr-defined]
                    wrong.append(f"tp {tp}, {kind}: {name}")
    return wrong
