"""Cases of `weight_rounding`: bf16 parameters that are spread over ranks have the bits of one
process, under a remainder those of fp32 parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import (
    LAYOUTS,
    SHAPES,
    Spread,
    factor_of,
    gradients,
    make,
    make_spread,
    told_by_the_first,
    values,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lather.boxes import local
from lather.optim.functional import exact_weight

CASES = (
    ("fsdp", "fsdp x tp", "soap", "whole"),
    ("tp", "fsdp", "muon", "whole"),
    ("hsdp", "tp", "soap_muon", "whole"),
    ("fsdp x tp", "hsdp", "adamw", "whole"),
    ("hsdp", "both on 0", "adamw", "whole"),
    ("both on 0", "in another order", "lion", "whole"),
    ("in another order", "hsdp", "mixed", "replicated"),
    ("tp", "hsdp", "soap_muon", "replicated"),
)
"""Layout at first, layout after the state dict was loaded, kind and ownership. All decays, and the
norm that is kept, occur."""

BEFORE, AFTER = range(3), range(3, 5)


def in_one_process(kind: str, rounding: str) -> list[Tensor]:
    """Return the weights of one process: under a remainder those of fp32 parameters."""
    start = [x.to(torch.bfloat16) for x in values(0, torch.float32)]
    params = [nn.Parameter(x.float() if rounding == "remainder" else x) for x in start]
    if dist.get_rank() == 0:
        optimizer = make(kind, params, precondition_frequency=2, weight_rounding=rounding)
        for step in (*BEFORE, *AFTER):
            for p, grad in zip(params, gradients(step, torch.float32), strict=True):
                p.grad_dtype, p.grad = torch.float32, grad
            optimizer.step(gradient_factor=factor_of(step))
    return told_by_the_first(params)


def narrow(kind: str, name: str, **options: Any) -> Spread:
    """Make an optimizer of spread bf16 parameters with fp32 gradients."""
    layout = LAYOUTS[dist.get_world_size()][name]
    run = make_spread(kind, layout, torch.bfloat16, precondition_frequency=2, **options)
    for p in run.params:
        p.grad_dtype = torch.float32
    return Spread(run.params, run.optimizer, run.mesh, run.placements, torch.float32)


def whole(x: Any) -> Any:
    """Return a value of a state dict with whole tensors in the place of DTensors."""
    if isinstance(x, dict):
        return {key: whole(value) for key, value in x.items()}
    return x.full_tensor() if isinstance(x, DTensor) else x


def rounding_differences(rank: int, world_size: int) -> list[str]:
    """Name the parameters that differ from one process's. In between, the state moves to another
    layout, once as a state dict of DTensors, once of whole tensors."""
    wrong = []
    for number, (first, second, kind, ownership) in enumerate(CASES):
        for rounding in ("stochastic", "remainder") if number % 3 == 0 else ("remainder",):
            expected = in_one_process(kind, rounding)
            options = {"weight_rounding": rounding, "ownership": ownership}
            run = narrow(kind, first, **options)
            run.run(BEFORE)
            after = narrow(kind, second, **options)
            for p, q in zip(after.params, run.whole(), strict=True):
                p.data.copy_(
                    torch.distributed.tensor.distribute_tensor(
                        q, p.device_mesh, p.placements, src_data_rank=None
                    )
                )
            saved = run.optimizer.state_dict()
            after.optimizer.load_state_dict(whole(saved) if number % 2 else saved)
            after.run(AFTER)
            found = after.whole()
            if rounding == "remainder":
                found = [exact(p, after) for p in after.params]
            wrong += [
                f"{first}, {second}, {kind}, {ownership}, {rounding}: parameter {i} {SHAPES[i]}"
                for i, (p, q) in enumerate(zip(found, expected, strict=True))
                if not torch.equal(p, q)
            ]
    dist.barrier()
    return wrong


def exact(p: nn.Parameter, run: Spread) -> Tensor:
    """Return the whole fp32 weights of a parameter; copies on ranks of the mesh must be equal."""
    if p not in run.optimizer.state:
        return p.detach().full_tensor().float()
    x = exact_weight(p, run.optimizer.state[p])
    assert isinstance(p, DTensor)
    full = DTensor.from_local(x, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    whole = full.full_tensor()
    mine = torch.distributed.tensor.distribute_tensor(
        whole, p.device_mesh, p.placements, src_data_rank=None
    )
    assert torch.equal(local(mine), x)
    return whole
