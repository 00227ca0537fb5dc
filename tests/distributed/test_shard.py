"""Sharded parameters and gradients against one process: plain sums over data ranks, whatever the
mesh; local rows, norm, count, clip.

Four ranks are started once and run every case. The ranks' rows are put together here by their
`ShardInfo`, and compared with a model that saw the data of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shard_cases import (
    MICRO_BATCHES,
    Case,
    Part,
    gather,
    grad_norm,
    loss_of,
    reduce,
    reshard,
    tokens_of,
    whole_model,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

from lather.config.config import ParallelConfig
from lather.parallel.fsdp_units import FsdpUnit, shard
from lather.parallel.local_parameters import ShardInfo, clip_, local_parameters
from lather.parallel.mesh import Mesh
from models.tiny import largest_error

CPU = torch.device("cpu")
STEPS = 2
LR = 0.01

CASES = {
    "dp4": Case(),
    "dp4-fp32-tied": Case(dtype=torch.float32, tied=True),
    "dp2-ep2": Case(ep=2, experts=2),
    "ep4": Case(ep=4, experts=8),
    "hsdp": Case(replicas=2, tied=True),
    "pp2-dp2": Case(pp=2),
    "pp4": Case(pp=4),
    "idle": Case(ep=2, experts=6, idle_rank=1),
}


@dataclass
class Reference:
    """The results of one process after each step."""

    losses: list[float]
    counts: list[int]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    params: list[dict[str, Tensor]]


def reference_of(case: Case) -> Reference:
    decoder = whole_model(case)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=LR)
    result = Reference([], [], [], [], [])
    for step in range(STEPS):
        labels = [
            tokens_of(rank, step, m)[1]
            for rank in range(case.data_size)
            for m in range(MICRO_BATCHES)
        ]
        count = torch.tensor(sum(int((one != -100).sum()) for one in labels))
        losses = [
            loss
            for rank in range(case.data_size)
            for loss in loss_of(decoder, decoder, case, rank, step, count)
        ]
        torch.stack(losses).sum().backward()
        for p in decoder.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        result.losses.append(sum(loss.item() for loss in losses))
        result.counts.append(int(count))
        result.norms.append(
            torch.nn.utils.get_total_norm([p.grad for p in decoder.parameters()]).item()
        )
        result.grads.append({name: p.grad.clone() for name, p in decoder.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        result.params.append({name: p.detach().clone() for name, p in decoder.named_parameters()})
    return result


Rows = list[tuple[ShardInfo, Tensor]]


@dataclass
class Seen:
    """The results of a rank after each step."""

    losses: list[float]
    validation: float
    """Validation loss at the last step, by a forward pass of its own."""
    counts: list[int]
    norms: list[float]
    grads: list[Rows]
    params: list[Rows]
    clipped: list[float]
    """The norm after clipping to half of it."""


def run_case(case: Case) -> Seen:
    config = ParallelConfig(pp=case.pp, ep=case.ep, replicas=case.replicas)
    mesh = Mesh.build(config, CPU)
    decoder = whole_model(case)
    part = Part(decoder, case, mesh)
    before = {name: p for name, p in part.named_parameters() if ".experts." not in name}
    stages = shard(part, mesh)
    own = dict(part.named_parameters())
    # else it was replaced
    assert all((own[name] is p) == (case.data_size == 1) for name, p in before.items())
    local = local_parameters(part, mesh)
    optimizer = torch.optim.AdamW([one.parameter for one in local], lr=LR)
    seen = Seen([], 0.0, [], [], [], [], [])
    for step in range(STEPS):
        labels = torch.cat([tokens_of(mesh.data_rank, step, m)[1] for m in range(MICRO_BATCHES)])
        count = (labels != -100).sum()
        dist.all_reduce(count, group=mesh.data_group)
        args = (decoder, part, case, mesh.data_rank, step, count)
        if step == 1:
            gather(stages, async_op=True)
            with torch.no_grad():
                seen.validation = sum(loss.item() for loss in loss_of(*args))
            reshard(stages)
        gather(stages, async_op=step == 0)
        losses = []
        for loss in loss_of(*args):
            loss.backward()
            losses.append(loss.item())
        seen.losses.append(sum(losses))
        if step == 0:
            check_nothing_was_reduced(part, args)
        reduce(stages)
        local.collect_gradients()
        rows = [one.parameter for one in local]
        assert all(p.grad is not None and p.grad.shape == p.shape for p in rows)
        seen.counts.append(int(count))
        seen.norms.append(grad_norm(local, mesh).item())
        seen.grads.append([(entry.info, entry.parameter.grad.clone()) for entry in local])
        optimizer.step()
        clip_(local.gradients(), grad_norm(local, mesh), seen.norms[-1] / 2)
        seen.clipped.append(grad_norm(local, mesh).item())
        local.clear_gradients()
        assert all(p.grad is None for p in part.parameters())
        seen.params.append([(entry.info, entry.parameter.detach().clone()) for entry in local])
    check_gathered(part, stages, local)
    return seen


def check_nothing_was_reduced(part: Part, args: Any) -> None:
    """Check that no hook ran: parameters are still whole, and gradients are this rank's alone, of
    all micro-batches."""
    seen = {name: p.grad for name, p in part.named_parameters()}
    assert not any(isinstance(p, DTensor) for p in part.parameters())
    params = {name: p for name, p in part.named_parameters() if seen[name] is not None}
    own = torch.autograd.grad(torch.stack(loss_of(*args)).sum(), list(params.values()))
    for name, grad in zip(params, own, strict=True):
        torch.testing.assert_close(seen[name], grad)


def check_gathered(part: Part, stages: list[list[FsdpUnit]], local: Any) -> None:
    """Check that whole parameters have the rows of the last optimizer step, and that what was
    gathered is freed."""
    gather(stages, async_op=False)
    whole = dict(part.named_parameters())
    for entry in local:
        p = whole[entry.info.name]
        start = entry.info.offset - (
            entry.info.offset // len(p) * len(p)
            if entry.info.is_expert and not entry.info.is_empty
            else 0
        )
        if not entry.info.is_empty:
            assert torch.equal(p[start : start + entry.info.length], entry.parameter)
    reshard(stages)
    for entry in local:
        if isinstance(entry.source, DTensor):
            assert whole[entry.info.name].untyped_storage().size() == 0


def run_cases(rank: int, world_size: int) -> dict[str, Seen]:
    mesh = Mesh.build(ParallelConfig(), CPU)
    with pytest.raises(ValueError, match="is not sharded, or is gathered at the moment"):
        local_parameters(Part(whole_model(Case()), Case(), mesh), mesh)
    return {name: run_case(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Seen]]:
    """The results of each rank, by case."""
    return run_ranks(run_cases, 4)


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {name: reference_of(case) for name, case in CASES.items()}


def put_together(rows: list[Rows]) -> dict[str, Tensor]:
    """Make whole tensors from all ranks' rows: every row is there once in replica 0, and copies are
    equal."""
    infos = {info.name: info for one in rows for info, _ in one}
    whole = {
        name: torch.full(info.shape, torch.nan, dtype=rows[0][0][1].dtype)
        for name, info in infos.items()
    }
    for first in (True, False):
        for info, x in (pair for one in rows for pair in one):
            assert x.shape == (info.length, *info.shape[1:])
            place = whole[info.name][info.offset : info.offset + info.length]
            if first and info.replica == 0:
                assert place.isnan().all()
                place.copy_(x)
            elif not first:
                assert torch.equal(place, x)
    return whole


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    largest, name = largest_error(actual, expected)
    assert largest < tolerance, name


def tolerance_of(case: Case) -> float:
    return 1e-12 if case.dtype == torch.float64 else 1e-5


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(
    name: str, seen: list[dict[str, Seen]], references: dict[str, Reference]
) -> None:
    for step in range(STEPS):
        grads = put_together([rank[name].grads[step] for rank in seen])
        assert_close(
            grads,
            references[name].grads[step],
            tolerance_of(CASES[name]) * (1 if step == 0 else 100),
        )


@pytest.mark.parametrize("name", CASES)
def test_parameters_after_steps_are_those_of_one_process(
    name: str, seen: list[dict[str, Seen]], references: dict[str, Reference]
) -> None:
    for step in range(STEPS):
        params = put_together([rank[name].params[step] for rank in seen])
        assert_close(
            params,
            references[name].params[step],
            1e-9 if CASES[name].dtype == torch.float64 else 1e-4,
        )


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_one_norm_and_the_one_count(
    name: str, seen: list[dict[str, Seen]], references: dict[str, Reference]
) -> None:
    for rank in seen:
        assert rank[name].norms == pytest.approx(
            references[name].norms, rel=tolerance_of(CASES[name]) * 100
        )
        assert rank[name].counts == references[name].counts
        assert rank[name].clipped == pytest.approx(
            [norm / 2 for norm in rank[name].norms], rel=1e-5
        )
    assert len({tuple(rank[name].norms) for rank in seen}) == 1


@pytest.mark.parametrize("name", CASES)
def test_a_forward_pass_without_gradients_has_the_same_loss(
    name: str, seen: list[dict[str, Seen]], references: dict[str, Reference]
) -> None:
    for rank in seen:
        assert rank[name].validation == pytest.approx(rank[name].losses[-1], rel=1e-6)
    total = [sum(rank[name].losses[step] for rank in seen) for step in range(STEPS)]
    assert total == pytest.approx(references[name].losses, rel=1e-5)


def test_shards_can_be_empty_and_uneven(seen: list[dict[str, Seen]]) -> None:
    def lengths(name: str, parameter: str) -> list[int]:
        return [
            info.length
            for rank in seen
            for info, _ in rank[name].grads[0]
            if info.name == parameter
        ]

    assert lengths("dp4", "layers.0.mlp.gate.weight") == [2, 2, 1, 0]
    assert lengths("idle", "layers.0.mlp.experts.down_proj") == [2, 2, 1, 1]
    assert lengths("dp2-ep2", "layers.0.mlp.experts.down_proj") == [1, 1, 0, 0]
    assert [info.name for info, _ in seen[0]["dp4-fp32-tied"].grads[0]].count("lm_head.weight") == 0
