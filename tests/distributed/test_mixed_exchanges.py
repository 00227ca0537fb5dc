"""Over ranks: parameters of equal shape under rules that do different things, and rules that
refuse."""

from __future__ import annotations

import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer


def parameters(seed: int, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, generator=generator) for _ in range(num)]


def mixed_differences(rank: int, world_size: int) -> list[str]:
    """Train two matrices, alike but that only one has statistics; name what differs from one
    process."""
    mesh = init_device_mesh("cpu", (world_size,))

    def make(params: list[nn.Parameter]) -> MatrixOptimizer:
        groups = [{"params": params[:1], "max_precond_dim": 0}, {"params": params[1:]}]
        return KLSOAP(groups, lr=0.1, max_update_rms=1.0)

    whole = [nn.Parameter(x) for x in parameters(0, 2)]
    parts = [
        nn.Parameter(distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None))
        for x in parameters(0, 2)
    ]
    one, many = make(whole), make(parts)
    for step in range(4):
        for p, q, g in zip(whole, parts, parameters(10 + step, 2), strict=True):
            p.grad, q.grad = g, distribute_tensor(g, mesh, [Shard(0)], src_data_rank=None)
        one.step()
        many.step()
    return [
        f"parameter {i}"
        for i, (p, q) in enumerate(zip(whole, parts, strict=True))
        if not torch.equal(p, q.detach().full_tensor())
    ]  # type: ignore[attr-defined]


def test_statistics_of_some_of_an_exchange() -> None:
    assert run_ranks(mixed_differences, 2) == [[], []]


def refusals(rank: int, world_size: int) -> list[str]:
    """Collect the errors of a step, also on ranks that own nothing of what is refused, and again
    when the same is asked once more."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = []

    def spread(x: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(x, mesh, [Replicate()], src_data_rank=None)

    def step(optimizer: MatrixOptimizer, p: nn.Parameter) -> str:
        p.grad = spread(torch.ones(6, 4))  # type: ignore[assignment]
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return ""

    p = nn.Parameter(spread(parameters(0, 1)[0]))
    optimizer: MatrixOptimizer = SOAP([p], precondition_frequency=lambda t: 0 if t == 4 else 2)
    found += [step(optimizer, p)[:32] for _ in range(4)]
    p = nn.Parameter(spread(parameters(0, 1)[0]))
    optimizer = AdamW([p])
    step(optimizer, p)
    optimizer.param_groups[0]["keep_norm"] = True
    return found + [step(optimizer, p)[:15] for _ in range(2)]


def test_what_is_refused_is_refused_on_all_ranks_and_every_time() -> None:
    found = run_ranks(refusals, 2)
    assert found[0] == found[1]
    assert found[0] == [
        "",
        "",
        "",
        "precondition_frequency gives 0 f",
        "matrix_layout, ",
        "matrix_layout, ",
    ]
