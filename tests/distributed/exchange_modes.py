"""Tests the buffers of an exchange, which it frees, poisons or holds. It runs in ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchange_cases import Case, from_tables
from torch import Tensor

from lather.models.pending import Pending
from lather.parallel.exchange_plan import DispatchHandle
from lather.parallel.expert_exchange import ExpertExchange
from lather.pipeline.tape import Frees


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

    def _all_to_all(self, rows: Tensor, *splits: Any, free: bool) -> Any:
        if self.mistake == "what is sent" and free:
            self.free_buffer(rows)
        travel = super()._all_to_all(rows, *splits, free=free)
        is_routing = not rows.is_floating_point()
        if self.mistake == ("routing that came" if is_routing else "rows that came"):
            return Pending(lambda: self._given_back(travel.wait()))
        return travel

    def _given_back(self, buffer: Tensor) -> Tensor:
        self.free_buffer(buffer)
        return buffer

    def _sum_per_token(self, handle: DispatchHandle, rows_SD: Tensor) -> Tensor:
        if self.mistake == "rows to be added":
            self.free_buffer(rows_SD)
        return super()._sum_per_token(handle, rows_SD)


MISTAKES = ("what is sent", "routing that came", "rows that came", "rows to be added")


def is_found_out(case: Case, me: int, exchange: ExpertExchange) -> bool:
    x, routing = case.x(me), case.routing(me)
    dispatched = exchange.start_dispatch(x, routing).wait()
    partial = from_tables(case, me, case.d, case.dtype, seed=3)
    results = [
        dispatched.x_RD,
        dispatched.weights_RK,
        exchange.start_combine(partial, dispatched.handle).wait(),
        *exchange.start_dispatch_backward(partial, dispatched.weights_RK, dispatched.handle).wait(),
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
            handle = exchange.start_dispatch(case.x(me), case.routing(me)).wait().handle
            exchange.start_combine(from_tables(case, me, case.d, case.dtype, seed=3), handle).wait()
        _, (packed_there, packed), (_, sent), (back, _) = travels
        read = (packed, sent, packed_there, back)
        gone = [
            bool((x.isnan() if x.is_floating_point() else x == torch.iinfo(x.dtype).max).all())
            for x in read
        ]
        found[name] = all(gone) if name == "poisoned" else not any(gone)
    return found
