"""A sharded optimizer refuses the same on all ranks, before anything is changed; and it counts its
state's bytes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from sharded_cases import values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lather.optim import SOAP, parameter_groups, state_bytes


def error_of(call: object, *args: object, **options: object) -> str:
    try:
        call(*args, **options)  # type: ignore[operator]
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank: int, world_size: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}

    def sharded(x: Tensor, *placements: object) -> DTensor:
        return DTensor.from_local(
            x.chunk(world_size)[rank], mesh, placements or [Shard(0)], run_check=False
        )  # type: ignore[arg-type]

    w = values(0, torch.float32, [(4, 3)])[0]
    found["partial"] = error_of(SOAP, [nn.Parameter(sharded(w, Partial()))])
    packed = nn.Parameter(sharded(w, _StridedShard(0, split_factor=2)))
    found["packed"] = error_of(SOAP, [packed])
    plain = nn.Parameter(w.clone())
    found["partition_dim"] = error_of(
        SOAP, [{"params": [plain], "partition_dim": 2}], tp_group=dist.group.WORLD
    )
    found["no group"] = error_of(SOAP, [{"params": [plain], "partition_dim": 0}])
    p = nn.Parameter(sharded(w))
    optimizer = SOAP([("w", p)])
    p.grad = torch.ones(4, 3)
    found["plain gradient"] = error_of(optimizer.step)
    mismatched = SOAP([nn.Parameter(sharded(torch.ones(4, 3 + rank)))])
    found["parameters"] = error_of(mismatched.step)

    p, q = nn.Parameter(sharded(w)), nn.Parameter(sharded(w + 1))
    for nonfinite in ("raise", "skip"):
        optimizer = SOAP([("w", p), ("v", q)], nonfinite=nonfinite)
        before = [p.detach().full_tensor().clone(), q.detach().full_tensor().clone()]  # type: ignore[attr-defined]
        p.grad, q.grad = sharded(torch.ones(4, 3)), sharded(torch.ones(4, 3))
        if rank == world_size - 1:
            p.grad.to_local()[0, 0] = math.nan
        found[nonfinite] = error_of(optimizer.step)
        moved = [
            not torch.equal(x, y.detach().full_tensor())
            for x, y in zip(before, (p, q), strict=True)
        ]  # type: ignore[attr-defined]
        found[f"{nonfinite} moved"] = str(
            (moved, len(optimizer.state), optimizer.counters["nonfinite_skipped"])
        )
    return found


def counts(rank: int, world_size: int) -> list[int]:
    """Return this rank's bytes of state after `init_state` and after a step, and those of one
    process."""
    mesh = init_device_mesh("cpu", (world_size,))
    shapes = [(16, 16)] * 4 + [(4, 8, 16)]
    model = nn.Module()
    for i, x in enumerate(values(0, torch.float32, shapes)):
        name = "experts" if x.dim() > 2 else f"p{i}"
        model.register_parameter(
            name,
            nn.Parameter(
                DTensor.from_local(x.chunk(world_size)[rank], mesh, [Shard(0)], run_check=False)
            ),
        )
    sizes = []
    optimizer = SOAP(parameter_groups(model))
    optimizer.init_state()
    for _ in range(2):
        sizes.append(
            sum(piece.value.nbytes for _, piece in optimizer.state_pieces() if piece.name != "step")
        )
        assert all(
            optimizer.state[p].keys() == optimizer.state[next(iter(optimizer.state))].keys()
            for p in optimizer.state
        )
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    whole = sum(state_bytes(shape, matrix_layout="per_expert") - 4 for shape in shapes)
    return [*sizes, whole]
