"""Tests an exchange in its modes: buffers that it poisons or holds, and rows under autocast. It
runs in ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchange_cases import Case, from_tables
from torch import Tensor

from benchmarks.live_bytes import PeakBytes
from lather.models.decoder import Block
from lather.models.moe import Pending
from lather.models.token_positions import SequenceLayout
from lather.parallel.exchange_plan import Way
from lather.parallel.expert_exchange import ExpertExchange
from lather.pipeline import overlap
from lather.pipeline.model_part import Stage
from lather.pipeline.segments import ChunkTape, MicroBatch, Segments
from lather.pipeline.tape import Frees
from models.tiny import error, random_normal

D_BLOCK = 24

# --- what happens to buffers that nobody reads any more -------------------------------------------


@contextlib.contextmanager
def all_to_alls() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside this context, note the received and the sent buffer of every all-to-all in the list
    that is yielded."""
    travels, original = [], dist.all_to_all_single

    def note(received: Tensor, sent: Tensor, *splits: Any, **options: Any) -> Any:
        travels.append((received, sent))
        return original(received, sent, *splits, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", note)
        yield travels


class GivesBackTooEarly(ExpertExchange):
    """An exchange with one mistake: it gives a buffer back while the buffer has still to be
    read."""

    def __init__(self, mistake: str, group: dist.ProcessGroup, num_experts: int) -> None:
        super().__init__(group, num_experts, free_buffer=Frees(poison=True).free_buffer)
        self.mistake = mistake

    def _launch(self, rows: Tensor, *splits: Any, own: bool) -> Any:
        if self.mistake == "what is sent" and own:
            self.free_buffer(rows)
        travel = super()._launch(rows, *splits, own=own)
        is_routing = not rows.is_floating_point()
        if self.mistake == ("routing that came" if is_routing else "rows that came"):
            return Pending(lambda: self._given_back(travel.wait()))
        return travel

    def _given_back(self, buffer: Tensor) -> Tensor:
        self.free_buffer(buffer)
        return buffer

    def _sum_per_token(self, way: Way, rows_SD: Tensor) -> Tensor:
        if self.mistake == "rows to be added":
            self.free_buffer(rows_SD)
        return super()._sum_per_token(way, rows_SD)


MISTAKES = ("what is sent", "routing that came", "rows that came", "rows to be added")


def is_found_out(case: Case, me: int, exchange: ExpertExchange) -> bool:
    x, routing = case.x(me), case.routing(me)
    dispatched = exchange.start_dispatch(x, routing).wait()
    partial = from_tables(case, me, case.d, case.dtype, seed=3)
    results = [
        dispatched.x_RD,
        dispatched.weights_RK,
        exchange.start_combine(partial, dispatched.way).wait(),
        *exchange.start_dispatch_backward(partial, dispatched.weights_RK, dispatched.way).wait(),
    ]
    in_range = (dispatched.experts_RK >= -1) & (dispatched.experts_RK < exchange.num_local_experts)
    return not (in_range.all() and all(result.isfinite().all() for result in results))


def buffers(case: Case, me: int, group: dist.ProcessGroup) -> dict[str, bool]:
    """Go there and back in the two modes that keep buffers; returns whether the buffers end up
    poisoned, or hold their values."""
    found = {}
    for name, frees in (("poisoned", Frees(poison=True)), ("held", Frees(enabled=False))):
        exchange = ExpertExchange(group, case.e, free_buffer=frees.free_buffer)
        with all_to_alls() as travels:
            way = exchange.start_dispatch(case.x(me), case.routing(me)).wait().way
            exchange.start_combine(from_tables(case, me, case.d, case.dtype, seed=3), way).wait()
        _, (packed_there, packed), (_, sent), (back, _) = travels
        read = (packed, sent, packed_there, back)
        gone = [
            bool((x.isnan() if x.is_floating_point() else x == torch.iinfo(x.dtype).max).all())
            for x in read
        ]
        found[name] = all(gone) if name == "poisoned" else not any(gone)
    return found


# --- under autocast -------------------------------------------------------------------------------


class Wide(Segments):
    """Segments that send rows in the dtype of the residual stream."""

    def _cast_for_exchange(self, x: Tensor) -> Tensor:
        return x


class NotesTheWay(ExpertExchange):
    """Notes in `to_one_T` which of the last tokens went to one rank alone, and in `received` how
    many rows came."""

    def start_combine(self, partial_RD: Tensor, way: Way) -> Any:
        self.to_one_T, self.received = (way.row_TK >= 0).sum(1) == 1, len(partial_RD)
        return super().start_combine(partial_RD, way)


@dataclass
class Ran:
    """The results and counts of a block's forward and backward."""

    results: list[Tensor]
    """Output, the input's gradient, (T, D) both, and the gradients of the weights, but those of
    routed experts, which have tokens of one rank alone."""
    sent: list[tuple[torch.dtype, int]]
    """Dtype and bytes of the rows with D columns, for every time that some were sent."""
    kept: int


def run_block(block: Block, segments: Segments, me: int) -> Ran:
    x_BSD, grad_BSD = (random_normal(3, 9, D_BLOCK, seed=seed + me).float() for seed in (10, 20))
    tokens = torch.zeros(3, 9, dtype=torch.int64)
    tape = ChunkTape(
        MicroBatch(tokens, tokens, SequenceLayout(3, 9, tokens.device), balance_weight=0.1)
    )
    sent, original = [], dist.all_to_all_single

    def note(received: Tensor, rows: Tensor, *args: Any, **options: Any) -> Any:
        if rows.is_floating_point() and rows.shape[1] == D_BLOCK:
            sent.append((rows.dtype, rows.nbytes))
        return original(received, rows, *args, **options)

    with pytest.MonkeyPatch.context() as patch, PeakBytes() as alive:
        patch.setattr(dist, "all_to_all_single", note)
        out_BSD = overlap.run(segments.forward(Stage(1, (block,)), x_BSD, tape, []))
        kept = alive.now
        grad_x_BSD = overlap.run(segments.backward(tape, grad_BSD))
    assert grad_x_BSD is not None
    gradients = [
        p.grad
        for name, p in block.named_parameters()
        if "mlp.experts." not in name and p.grad is not None
    ]
    block.zero_grad()
    return Ran([out_BSD.flatten(0, 1), grad_x_BSD.flatten(0, 1), *gradients], sent, kept)


def half_the_bytes(blocks: list[Block], me: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Compare a block with a share of the experts with the same block whose rows travel in fp32,
    and with a block that has all experts."""
    exchange, options = NotesTheWay(group, 8), {"autocast": torch.bfloat16}
    wide = run_block(blocks[0], Wide(exchange, **options), me)
    narrow = run_block(blocks[0], Segments(exchange, **options), me)
    local = run_block(blocks[1], Segments(**options), me)
    full = run_block(blocks[0], Segments(exchange), me)
    alone_T = exchange.to_one_T
    return {
        "wide": wide.sent,
        "narrow": narrow.sent,
        "full": full.sent,
        "kept": wide.kept - narrow.kept - 2 * exchange.received * D_BLOCK,
        "alone": int(alone_T.sum()),
        "same bits": torch.equal(narrow.results[0][alone_T], local.results[0][alone_T]),
        "dtypes": {result.dtype for result in narrow.results},
        "errors": [
            error(mine, theirs) for mine, theirs in zip(narrow.results, local.results, strict=True)
        ],
    }
