"""Cases of parameters in fp64 that are spread over ranks: their arithmetic, and the dtype in which
their gradients are checked."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sharded_cases import LAYOUTS, SHAPES, expected_of, make_spread, spread
from sharded_refusals import error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from lather.optim import SOAP, AdamW, Muon

FP64 = torch.float64
STEPS = 4
CASES = (("fsdp", "soap"), ("tp", "mixed"), ("fsdp", "adamw"), ("tp", "soap_muon"))


def fp64_differences(rank: int, world_size: int) -> list[str]:
    """Name the parameters that are not bit for bit one process's, and those whose state is not
    fp64."""
    wrong = []
    for ownership in ("whole", "replicated"):
        for name, kind in CASES:
            layout = LAYOUTS[world_size][name]
            expected = expected_of(kind, FP64, STEPS, 2)
            options = {"precondition_frequency": 2, "ownership": ownership}
            run = make_spread(kind, layout, FP64, layout.mesh(), **options)
            run.run(range(STEPS))
            pairs = enumerate(zip(run.whole(), expected, strict=True))
            case = f"{name}, {kind}, {ownership}"
            wrong += [f"{case}: {SHAPES[i]}" for i, (p, q) in pairs if not torch.equal(p, q)]
            pieces = [one for _, one in run.optimizer.state_pieces() if one.name != "step"]
            wrong += [f"{case}: {one.name}" for one in pieces if one.value.dtype != FP64]
            saved = run.optimizer.state_dict()
            again = make_spread(kind, layout, FP64, layout.mesh(), **options)
            with torch.no_grad():
                for p, q in zip(again.params, run.params, strict=True):
                    p.copy_(q)
            again.optimizer.load_state_dict(saved)
            for one in (run, again):
                one.run(range(STEPS, STEPS + 2))
            pairs = enumerate(zip(run.whole(), again.whole(), strict=True))
            wrong += [f"{case} again: {SHAPES[i]}" for i, (p, q) in pairs if not torch.equal(p, q)]
    dist.barrier()
    return wrong


def checks(rank: int, world_size: int) -> list[str]:
    """Return what a step says about gradients of several sizes: constant ones of a sharded 8 x 4
    matrix, in fp64 or with a state that is asked for."""
    mesh = init_device_mesh("cpu", (world_size,))
    said = []
    for cls in (AdamW, Muon, SOAP):
        for state_dtype in (None, torch.float32):
            for value in (1e18, 4e18, 1e40, 1e155):
                p = nn.Parameter(spread(torch.ones(8, 4, dtype=FP64), mesh, [Shard(0)]))
                optimizer = cls([p], lr=0.1, state_dtype=state_dtype)
                p.grad = spread(torch.full((8, 4), value, dtype=FP64), mesh, [Shard(0)])
                said.append(error_of(optimizer.step)[:10])
                said[-1] += "" if p.to_local().isfinite().all() else ", not finite"
    return said


def idle_experts(rank: int, world_size: int) -> list[list[bool]]:
    """Return whether each expert's factor is zero after a step with gradients too small for fp32
    squares, in fp64 and in fp32."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for state_dtype in (None, torch.float32):
        p = nn.Parameter(spread(torch.ones(4, 6, 6, dtype=FP64), mesh, [Shard(1)]))
        optimizer = SOAP([p], lr=0.1, state_dtype=state_dtype, matrix_layout="per_expert")
        g = torch.ones(4, 6, 6, dtype=FP64)
        p.grad = spread(g * torch.tensor([1.0, 1e-30, 0.0, 1e-3]).view(4, 1, 1), mesh, [Shard(1)])
        optimizer.step()
        factor = optimizer.state_dict()["state"][0]["factor_0"].full_tensor()
        found.append((factor == 0).flatten(1).all(1).tolist())
    return found
