"""The order in which ranks start their exchanges.

Ranks of the same place in the pipeline take the same actions, so a schedule that does not deadlock
without exchanges does not with them if these ranks start the same exchanges in the same order, over
all communicators: then the exchange that was started first on one of them can always take place,
even if a device did one at a time. Transfers between stages are not among them; the tables that
order these are replayed in tests/pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import Case, make_pair, shared_mesh
from ranks import run_ranks

from lather.torch_private import TorchDispatchMode

BETWEEN_STAGES = ("send", "recv_")
ALL = ("attention", "experts", "shared_experts")


Exchange = tuple[str, tuple[int, ...], bool]
"""Name of the operation, places of its ranks, and whether they are context ranks."""


class Exchanges(TorchDispatchMode):
    """Lists the collective operations that start inside."""

    def __init__(self, of_context: dist.ProcessGroup) -> None:
        super().__init__()
        self.of_context = of_context.group_name
        self.started: list[Exchange] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::") and name.removeprefix("c10d::") not in BETWEEN_STAGES:
            (boxed,) = (x for x in args if isinstance(x, torch.ScriptObject) and is_group(x))
            group = dist.ProcessGroup.unbox(boxed)
            ranks = dist.get_process_group_ranks(group)
            places = tuple(rank - ranks[0] for rank in ranks)
            is_context = group.group_name == self.of_context
            self.started.append((name.removeprefix("c10d::"), places, is_context))
        return func(*args, **(kwargs or {}))


def is_group(x: torch.ScriptObject) -> bool:
    return "ProcessGroup" in x._type().qualified_name()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Started:
    """The exchanges that a rank started in a step."""

    pp_rank: int
    exchanges: list[Exchange]
    num_blocks: int
    """Blocks of the rank, once for each of its micro-batches."""


def order_of_exchanges(rank: int, world_size: int, cases: list[Case]) -> list[Started]:
    found = []
    for case in cases:
        pair = make_pair(case, mesh=shared_mesh(case))
        batch = pair.share_of(pair.tokens())
        with Exchanges(pair.mesh.cp_group) as exchanges:
            pair.engine.launch_gradients(batch).read()
        blocks = len(pair.engine.part.layers) * pair.engine.schedule.num_micro_batches
        found.append(Started(pair.mesh.pp_rank, exchanges.started, blocks))
    return found


def check_order(world_size: int, cases: list[Case]) -> None:
    """Check that the ranks of a place in the pipeline start the same, and that each attention
    starts as many exchanges with context ranks as it should: to gather, to gather again in
    backward, to sum gradients."""
    by_rank = run_ranks(order_of_exchanges, world_size, cases)
    for number, case in enumerate(cases):
        first: dict[int, Started] = {}
        for started in (each[number] for each in by_rank):
            other = first.setdefault(started.pp_rank, started)
            assert started.exchanges == other.exchanges, case.name()
            names = [name for name, _, is_context in started.exchanges if is_context]
            assert names.count("_allgather_base_") == 2 * started.num_blocks, case.name()
            assert names.count("alltoall_base_") == started.num_blocks, case.name()
        assert len(first) == case.pp


PIPELINE = Case(pp=2, cp=2, length=8)
EXPERTS = Case(cp=2, ep=2, length=8)


def test_ranks_of_a_stage_start_their_exchanges_in_the_same_order() -> None:
    check_order(
        4,
        [
            PIPELINE,
            replace(PIPELINE, early_weight_gradients=True),
            replace(PIPELINE, defer=False, gather="block"),
            replace(PIPELINE, recompute=ALL),
            replace(PIPELINE, num_micro_batches=9, family="qwen3_moe", length=12),
            EXPERTS,
            replace(EXPERTS, schedule="sequential"),
            replace(EXPERTS, defer=False, lopsided=True),
            replace(EXPERTS, recompute=ALL, gather="block"),
        ],
    )


@pytest.mark.grid
def test_pipeline_context_and_expert_ranks_start_their_exchanges_in_the_same_order() -> None:
    case = Case(pp=2, cp=2, ep=2, length=8)
    check_order(8, [case, replace(case, early_weight_gradients=True, lopsided=True)])
