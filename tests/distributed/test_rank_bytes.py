"""The bytes that `lather profile` expects of a rank without starting any, against bytes counted on
real ranks after every action of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from engines import VOCABULARY, Case, make_pair
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from lather.memory.chunk_bytes import ChunkMeter, MemoryLevers, layer_places
from lather.memory.live_bytes import PeakBytes
from lather.memory.rank_peaks import rank_bytes
from lather.models.token_positions import SequenceLayout
from lather.pipeline.partition import stages_of, uniform
from lather.pipeline.schedule import Action, dualpipev
from lather.pipeline.segments import MicroBatch
from models.tiny import tiny_family_model

LENGTH = 60
"""Tokens of a micro-batch: so many that the experts' load is about even."""
CASES = {
    "saved": Case(pp=2, num_micro_batches=8),
    "recomputed attention": Case(pp=2, num_micro_batches=8, recompute=("attention",)),
    "no early frees": Case(pp=2, num_micro_batches=4, frees=False),
    "another family": Case(pp=2, num_micro_batches=5, family="gpt_oss", layers=4),
}
ON_FOUR = {name: replace(CASES[name], ep=2) for name in ("saved", "recomputed attention")}


class Watch:
    """A recorder that counts the bytes after every action, without the gradients of gathered
    parameters."""

    def __init__(self, alive: PeakBytes, part: nn.Module) -> None:
        self.alive, self.part, self.largest = alive, part, 0
        self.sharded = {name for name, p in part.named_parameters() if isinstance(p, DTensor)}

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        yield
        whole = [
            p
            for name, p in self.part.named_parameters()
            if name in self.sharded and not isinstance(p, DTensor)
        ]
        summed = sum(
            p.grad.nbytes for p in whole if p.grad is not None
        )  # parameters are gathered into storages that the first step made
        self.largest = max(self.largest, self.alive.now - summed)

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


def counted(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, int]:
    """The most bytes of this rank, besides parameters and gradients."""
    found = {}
    with patch("engines.LENGTH", LENGTH):
        for name, case in cases.items():
            pair = make_pair(case)
            tokens = pair.tokens()
            pair.run(tokens)  # this makes tables and gradients
            for p in pair.engine.part.parameters():
                p.grad = torch.zeros_like(p)
            with PeakBytes() as alive:
                watch = pair.engine._executor.record = Watch(alive, pair.engine.part)
                pair.run(tokens)
            found[name] = watch.largest
    return found


def expected(case: Case) -> list[int]:
    sizes = {"num_hidden_layers": case.layers}
    sizes[{"deepseek_v2": "n_routed_experts", "gpt_oss": "num_local_experts"}[case.family]] = (
        case.experts
    )
    model = tiny_family_model(case.family, **sizes).to(case.dtype)
    tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    batch = MicroBatch(
        tokens[:, :-1], tokens[:, 1:], SequenceLayout(1, LENGTH, torch.device("cpu"))
    )
    meter = ChunkMeter(model, layer_places(model, None), batch, case.ep)
    chunks = meter.measure(MemoryLevers(case.memory, case.recompute, case.frees))
    schedule = dualpipev(case.pp, case.num_micro_batches)
    return [
        one.peak
        for one in rank_bytes(
            schedule, chunks, stages_of(uniform(case.layers, schedule.num_stages))
        )
    ]


def tolerance(case: Case) -> float:
    """The relative error that is allowed: chance decides which rows an expert rank gets; and
    without early frees what was sent is held, too, which the profile does not count."""
    return 0.05 if case.ep > 1 else 0.01 if case.frees else 0.03


@pytest.mark.parametrize(("world_size", "cases"), [(2, CASES), (4, ON_FOUR)], ids=["two", "four"])
def test_expected_bytes_are_those_of_real_ranks(world_size: int, cases: dict[str, Case]) -> None:
    by_rank = run_ranks(counted, world_size, cases)
    for name, case in cases.items():
        peaks = expected(case)
        for rank, found in enumerate(by_rank):
            assert found[name] == pytest.approx(peaks[rank // case.ep], rel=tolerance(case)), (
                name,
                rank,
            )
