"""Walks along the table: the tensors that are alive at each moment, and none after a step."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import Case, Pair, make_pair
from ranks import run_ranks
from torch import Tensor

from benchmarks.live_bytes import PeakBytes
from lather.parallel.fsdp_units import FsdpUnit
from lather.pipeline import executor as executor_module
from lather.pipeline.chunk import MicroBatch
from lather.pipeline.executor import MOST_SENDS_UNDER_WAY, Executor
from lather.pipeline.recorder import Recorder
from lather.pipeline.schedule import Action, Kind
from lather.pipeline.tape import Cut

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def executor_of(pair: Pair) -> Executor:
    return pair.engine._executor


def micro_batches(pair: Pair) -> list[MicroBatch]:
    number = pair.engine.schedule.num_micro_batches
    return pair.engine.shares.micro_batches(
        pair.share_of(pair.tokens()), 10.0, [1 / number] * number
    )


# --- one process ----------------------------------------------------------------------------------


def test_validation_keeps_nothing_and_leaves_nothing() -> None:
    pair = make_pair(Case(layers=3))
    pair.engine.validation_loss(pair.share_of(pair.tokens()))
    with PeakBytes() as alive:
        pair.engine.validation_loss(pair.share_of(pair.tokens()))
        gc.collect()
        assert alive.now == 0


def test_no_step_follows_one_that_an_error_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(Case(layers=2))
    with monkeypatch.context() as patch:
        patch.setattr(Cut, "backward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.run(pair.tokens())
    with pytest.raises(RuntimeError, match=r"interrupted .*make the engine again"):
        pair.run(pair.tokens())


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
def test_an_interrupted_step_leaves_no_gradients_and_no_sums(
    monkeypatch: pytest.MonkeyPatch, gradient_dtype: str
) -> None:
    pair = make_pair(
        Case(layers=2, gather="block", gradient_dtype=gradient_dtype, dtype=torch.float32)
    )
    units, calls, backward = pair.engine.units.values(), [0], Cut.backward
    seen: list[bool] = []

    def fails(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 20:
            seen.append(any(unit.sums or has_gradients(unit) for unit in units))
            raise ZeroDivisionError
        return backward(*args)

    monkeypatch.setattr(Cut, "backward", fails)
    with pytest.raises(ZeroDivisionError):
        pair.run(pair.tokens())
    assert seen == [True]
    assert not any(unit.sums or has_gradients(unit) for unit in units)


def has_gradients(unit: FsdpUnit) -> bool:
    return any(p.grad is not None for p in (*unit.modules.parameters(), *unit.gathered))


def test_masks_and_tables_of_packed_micro_batches_are_those_of_the_live_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair(Case(layers=2, num_micro_batches=6))
    batch = pair.share_of(pair.tokens())
    begins_BS = torch.zeros(batch.inputs_BS.shape, dtype=torch.bool)
    begins_BS[:, 4] = True
    batch = replace(batch, begins_BS=begins_BS)
    batches: list[MicroBatch] = []
    prepare, forward = pair.engine.shares.micro_batches, pair.engine._segments.forward
    alive = [0]

    def prepared(*args: Any) -> list[MicroBatch]:
        batches[:] = prepare(*args)
        return batches

    def counting_forward(*args: Any) -> Any:
        alive.append(sum(bool(batch.layout._made) for batch in batches))
        return forward(*args)

    monkeypatch.setattr(pair.engine.shares, "micro_batches", prepared)
    monkeypatch.setattr(pair.engine._segments, "forward", counting_forward)
    pair.engine.launch_gradients(batch)
    assert len({id(batch.layout) for batch in batches}) == 6
    assert 1 <= max(alive) <= pair.engine.schedule.peak_live_chunks(0)
    assert not any(batch.layout._made for batch in batches)
    pair.engine.validation_loss(batch)
    assert not any(batch.layout._made for batch in batches)


# --- four ranks -----------------------------------------------------------------------------------

CASES = {
    "2 x 2 data": Case(pp=2),
    "2 x 2 experts, held": Case(pp=2, ep=2, layers=4, frees=False),
    "4": Case(pp=4, layers=9),
}


class TrackedWork:
    """A send that remembers whether it was waited for."""

    def __init__(self, work: dist.Work, x: Tensor) -> None:
        self.work: dist.Work | None = work
        self.storage, self.waited = weakref.ref(x.untyped_storage()), False

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work, self.waited = None, True  # gloo's work has a reference to what it sent

    def bytes_left(self) -> int:
        storage = self.storage()
        return 0 if storage is None else storage.nbytes()


class Watch(Recorder):
    """A recorder that checks the walk after every action; `problems` must stay empty."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.problems: list[str] = []
        self.peak_tapes = self.most_sends = self.deferred = 0
        self.received: dict[tuple[Kind, int, int], Any] = {}
        self.done: set[tuple[Kind, int, int]] = set()
        self.sends: list[TrackedWork] = []

    def new_step(self) -> None:
        self.received, self.done, self.sends = {}, set(), []

    def count_tapes(self) -> None:
        assert self.executor.walk is not None
        self.peak_tapes = max(self.peak_tapes, len(self.executor.walk.tapes))

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        yield
        walk = self.executor.walk
        assert walk is not None
        self.most_sends = max(self.most_sends, len(walk.sends))
        for chunk in action.chunks:
            if chunk.micro_batch is not None:
                self.done.add((chunk.kind, chunk.stage, chunk.micro_batch))
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            assert action.micro_batch is not None
            key = (action.stage, action.micro_batch)
            buffer, _ = walk.incoming[action.kind, key]
            self.received[(action.kind, *key)] = weakref.ref(buffer.untyped_storage())
        if action.kind is Kind.BACKWARD_INPUT:
            assert action.micro_batch is not None
            self.deferred += len(walk.waiting[action.stage, action.micro_batch])
        queue = walk.segments.weight_gradients
        if len(queue.entries) or queue.deferring:
            self.problems.append(f"{action} left something in the queue")
        self.look_at_receives(str(action))

    def look_at_receives(self, when: str) -> None:
        """Check that an input is gone after its chunk's backward, and a gradient after the backward
        and the work that this put off."""
        for (kind, *key), storage in self.received.items():
            stage, micro_batch = key
            backward = any((one, stage, micro_batch) in self.done for one in BACKWARDS)
            put_off = (Kind.BACKWARD_INPUT, stage, micro_batch) in self.done
            weights = (Kind.BACKWARD_WEIGHT, stage, micro_batch) in self.done
            over = backward and (weights or not put_off) if kind is Kind.RECV_B else backward
            if over and storage() is not None:
                self.problems.append(
                    f"after {when} the buffer of {stage}{kind}{micro_batch} is alive"
                )

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


def watch(pair: Pair) -> Watch:
    """Put a watch into the engine's executor."""
    executor = executor_of(pair)
    watched = Watch(executor)
    executor.record = watched
    forward = executor.segments.forward

    def counting_forward(*args: Any) -> Any:
        watched.count_tapes()
        return forward(*args)

    executor.segments.forward = counting_forward  # type: ignore[method-assign]
    return watched


def settled(alive: PeakBytes, expected: tuple[int, int], patience: float) -> tuple[int, int]:
    """Return the alive bytes and tensors, as soon as they are no more than expected or after
    `patience` seconds: gloo's threads let go of what was reduced some time after the wait for
    it."""
    deadline = time.monotonic() + patience
    while True:
        gc.collect()
        found = (alive.now, sum(issubclass(type(x), Tensor) for x in gc.get_objects()))
        if all(a <= b for a, b in zip(found, expected, strict=True)) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def walk_through(case: Case) -> dict[str, Any]:
    """Take three steps; returns what the watch saw."""
    pair = make_pair(case)
    executor = executor_of(pair)
    watched = watch(pair)
    start = executor_module.StepWalk._start

    def tracked_start(self: Any, operation: Any, x: Tensor, peer: int) -> Any:
        work = start(self, operation, x, peer)
        if operation is not dist.isend:
            return work
        watched.sends.append(TrackedWork(work, x))
        return watched.sends[-1]

    executor_module.StepWalk._start = tracked_start  # type: ignore[method-assign]
    after_second = after_third = (0, 0)
    tokens = pair.tokens()
    try:
        with PeakBytes() as alive:
            for step in (1, 2, 3):
                watched.new_step()
                pair.run(tokens)
                pair.engine.parameters.clear_gradients()
                if step == 2:
                    after_second = settled(alive, (0, 0), patience=0.3)
                elif step == 3:
                    after_third = settled(alive, after_second, patience=20)
    finally:
        executor_module.StepWalk._start = start  # type: ignore[method-assign]
    row = executor.schedule.ranks[executor.rank]
    return {
        "problems": watched.problems,
        "tapes": (
            watched.peak_tapes,
            executor.schedule.peak_live_chunks(executor.rank),
            2 * case.pp + 1,
        ),
        "most sends": watched.most_sends,
        "put off": (
            watched.deferred > 0,
            any(action.kind is Kind.BACKWARD_INPUT for action in row),
        ),
        "received": len(watched.received),
        "receives": sum(action.kind in (Kind.RECV_F, Kind.RECV_B) for action in row),
        "sends": (
            len(watched.sends),
            sum(action.kind in (Kind.SEND_F, Kind.SEND_B) for action in row),
        ),
        "waited": all(send.waited for send in watched.sends),
        "sent bytes left": sum(send.bytes_left() for send in watched.sends),
        "alive": (after_second, after_third),
        "walk": executor.walk is None,
    }


def walks(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {name: walk_through(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def walks_of_ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(walks, 4, timeout=200)


@pytest.mark.parametrize("name", CASES)
def test_tensors_live_as_long_as_the_table_needs_them(
    name: str, walks_of_ranks: list[dict[str, dict[str, Any]]]
) -> None:
    """Tapes are those of the table; no receive buffer outlives its reader, no weight gradient its
    queue, no sent tensor its send, and nothing its step. (The first step makes things that
    stay.)"""
    assert any(rank[name]["put off"][1] for rank in walks_of_ranks)
    for of_ranks in walks_of_ranks:
        rank = of_ranks[name]
        tapes, of_table, limit = rank["tapes"]
        assert tapes == of_table <= limit
        assert rank["problems"] == []
        assert rank["received"] == rank["receives"] > 0
        assert rank["put off"][0] == rank["put off"][1]
        assert rank["sends"][0] == rank["sends"][1] > 0
        assert rank["waited"]
        assert rank["sent bytes left"] == 0
        assert rank["most sends"] <= MOST_SENDS_UNDER_WAY
        second, third = rank["alive"]
        assert third[0] <= second[0]
        assert third[1] <= second[1]
        assert rank["walk"]
