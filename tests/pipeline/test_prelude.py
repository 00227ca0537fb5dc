"""The prelude to the first pipelined step on GPUs: what the step would launch for the first
time, and that nothing of the prelude remains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import Case, Pair, make_pair
from ranks import run_ranks
from torch import Tensor

from lather.memory.workers import worker_processes
from lather.pipeline.prelude import actions
from lather.pipeline.schedule import Kind, dualpipev
from pipeline.first_launches import first_launches

EXPERTS = {"parallel": {"pp": 2, "ep": 2}}
PACKED = {"data": {"packing": "documents", "packed_attention": True}}
REMADE = {"recompute": ("attention", "experts"), "memory": "recompute"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "documents, first and last layers": (0, {**EXPERTS, **PACKED}),
    "recomputed layers between": (3, {**EXPERTS, **REMADE}),
}
"""Rank of four, and configuration."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with worker_processes() as workers:
        futures = {
            name: workers.submit(first_launches, rank, 4, changes, True)
            for name, (rank, changes) in CASES.items()
        }
        futures["without a prelude"] = workers.submit(first_launches, 0, 4, EXPERTS, False)
        return {name: future.result(timeout=200) for name, future in futures.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_step_launches_nothing_for_the_first_time_while_transfers_are_under_way(
    name: str, found: dict[str, Any]
) -> None:
    launches, peak_of_prelude, peak = found[name]
    assert launches == []
    assert 0 < peak_of_prelude < peak


def test_without_a_prelude_it_does(found: dict[str, Any]) -> None:
    assert len(found["without a prelude"][0]) > 50


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("trains", [True, False])
def test_the_prelude_has_every_kind_of_a_ranks_row(num_ranks: int, trains: bool) -> None:
    table = dualpipev(num_ranks, 2 * num_ranks + 2)
    for rank, row in enumerate(table.ranks):
        chunks = {(chunk.kind, chunk.stage) for action in row for chunk in action.chunks}
        found = list(actions(table, rank, trains=trains))
        kinds = {(action.kind, action.stage) for action in found}
        if trains:
            assert kinds >= chunks
        assert kinds - chunks <= {
            (kind, stage)
            for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            for stage in table.stages_of(rank)
        }
        backwards = (Kind.SEND_B, Kind.RECV_B, Kind.BACKWARD, Kind.REDUCE_GRAD)
        assert trains or not {kind for kind, _ in kinds} & set(backwards)


def gradients(pair: Pair) -> dict[str, Tensor]:
    named = ((entry.info.name, entry.parameter) for entry in pair.engine.parameters)
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def buffers_and_weights(pair: Pair) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in pair.engine.part.state_dict().items()}


def equal(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(*(getattr(x, "to_local", lambda x=x: x)() for x in (some[key], others[key])))
        for key in some
    )


def compared(rank: int, world_size: int, case: Case) -> dict[str, bool]:
    """Compare a step after a prelude with one without, and what a prelude finds with what it
    leaves."""
    fresh, pair = make_pair(case), make_pair(case)
    expected, before = fresh.run(fresh.tokens()), buffers_and_weights(pair)
    state = torch.get_rng_state()
    pair.engine.run_prelude(pair.share_of(pair.tokens()))
    executor, queue = pair.engine._executor, pair.engine._segments.weight_gradients
    found = {
        "random state": torch.equal(torch.get_rng_state(), state),
        "weights and buffers": equal(buffers_and_weights(pair), before),
        "no gradients": all(p.grad is None for p in pair.engine.part.parameters()),
        "an empty queue": not queue.entries and not queue.deferring,
        "no rounded weights": not pair.engine.rounded_weights.copies(),
        "no step": executor.walk is None,
        "counts": all(router.balance._count_E is None for router in pair.engine.part.routers()),
    }
    result = pair.run(pair.tokens())
    found["loss"] = (result.loss, result.balance_loss) == (expected.loss, expected.balance_loss)
    found["loads"] = torch.equal(result.counts_LE, expected.counts_LE)
    found["gradients"] = equal(gradients(pair), gradients(fresh))
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, ep=2, balance_level="global_batch", z_loss=0.1, poison=True),
        Case(pp=2, ep=1, precision="bf16", dtype=torch.float32, recompute=("attention",)),
    ],
    ids=Case.name,
)
def test_a_prelude_leaves_nothing_and_changes_no_bits(case: Case) -> None:
    for found in run_ranks(compared, 4, case):
        assert all(found.values()), found
