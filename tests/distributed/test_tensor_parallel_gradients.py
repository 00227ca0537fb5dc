"""Gradients as torch's tensor parallelism leaves them: whole on each rank for an embedding that is
cut along its rows, and unsummed for norms of parts of the sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lather.optim import SOAP, MatrixOptimizer, Muon, parameter_groups

PLAN = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "1": SequenceParallel(),
    "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def make(kind: str, model: nn.Module) -> MatrixOptimizer:
    groups = parameter_groups(model, rest_rule="embedding_soap" if kind == "soap" else "adamw")
    return SOAP(groups, lr=0.1) if kind == "soap" else Muon(groups, lr=0.1)


def differences(rank: int, world_size: int, kind: str, factor: float) -> tuple[list[str], set[str]]:
    """Name the parameters that differ from one process with the same gradients, and those whose
    gradients had other placements than they have."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Embedding(14, 8), nn.LayerNorm(8), nn.Linear(8, 14))
    many = parallelize_module(copy.deepcopy(one), init_device_mesh("cpu", (world_size,)), PLAN)
    alone, ours = make(kind, one), make(kind, many)
    sharded: list[tuple[str, Any]] = [*many.named_parameters()]
    moved = set[str]()
    for step in range(3):
        many(torch.arange(8).view(2, 4) + step).square().mean().backward()
        for (name, q), p in zip(sharded, one.parameters(), strict=True):
            moved |= {name} if q.grad.placements != q.placements else set()
            p.grad = q.grad.full_tensor()
        ours.step(gradient_factor=factor)
        alone.step(gradient_factor=factor)
        ours.zero_grad()
    pairs = zip(sharded, one.parameters(), strict=True)
    wrong = [name for (name, q), p in pairs if not torch.equal(q.full_tensor(), p)]
    return wrong, moved


@pytest.mark.parametrize(("kind", "factor"), [("muon", 1.0), ("soap", 0.5)])
def test_gradients_with_other_placements_are_those_of_one_process(kind: str, factor: float) -> None:
    expected = ([], {"0.weight", "1.weight", "1.bias"})
    assert run_ranks(differences, 2, kind, factor) == [expected] * 2
