"""Walks one rank's row of the schedule: forwards, backwards, weight gradients, sends, receives, and the unsharding of parameters.

What travels exists as long as it has to: a receive's buffer is made when its action comes and handed to its one reader; what was sent is
given back when the send is done. Of a micro-batch's forward only its tape stays, until its backward. At most 2P + 1 chunks (a micro-batch
in a stage) are alive on a rank.

Letters: B sequences of a micro-batch, S positions, D hidden size, P pipeline ranks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from lather.device import is_gpu
from lather.models.saving.weight_gradients import DeferredGradient, WeightGradients
from lather.parallel.fsdp_units import FsdpUnit
from lather.pipeline import overlap
from lather.pipeline.model_part import Stage
from lather.pipeline.schedule import COMPUTE, Action, Kind, Schedule
from lather.pipeline.segments import ChunkTape, MicroBatch, RoutingSummary, Segments, Steps

MOST_SENDS_UNDER_WAY = 2
"""Sends of a rank that may be under way. With one more the oldest is waited for: gloo does not say when a send is done, and what was sent
must not pile up."""

Key = tuple[int, int]
"""Stage and micro-batch."""

Arrival = tuple[bool, Key]
"""Whether a gradient arrives (else an input), and of what."""


@runtime_checkable
class Recorder(Protocol):
    """Is told what a rank does."""

    def action(self, action: Action) -> AbstractContextManager[Any]:
        """Entered around every action, once its input is there."""

    def waiting(self) -> AbstractContextManager[Any]:
        """Entered inside an overlapped pair, around the wait for its backward's input."""


class Filler(Protocol):
    """Work that a rank does while it waits for another, in pieces."""

    @property
    def is_busy(self) -> bool:
        """Whether a GPU is still at the last piece."""

    def __len__(self) -> int:
        """Pieces that are left."""

    def next_seconds(self) -> float:
        """How long the next piece is expected to take on a CPU; there must be one."""

    def work(self) -> None:
        """Do the next one, or give it to the GPU."""


@dataclass(frozen=True)
class Activation:
    """A tensor that a stage gives to the next."""

    shape: tuple[int, int, int]
    """(B, S, D) of every micro-batch."""
    dtype: torch.dtype
    device: torch.device
    travels_as: torch.dtype | None = None
    """To another rank and back; None: as it is."""


@dataclass
class StepOutput:
    """The results of a walk over the schedule on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    """Losses of the micro-batches, where the last stage is."""
    routings: dict[Key, list[RoutingSummary]] = field(default_factory=dict)
    """Summaries of each stage and micro-batch, one per MoE block."""


class Executor:
    """Runs one schedule on one rank, step after step."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        segments: Segments,
        activation: Activation,
        *,
        group: dist.ProcessGroup | None = None,
        units: Sequence[Sequence[FsdpUnit]] | None = None,
        record: Recorder | None = None,
    ) -> None:
        """`stages`: this rank's, `units`: the parameters of each; `group`: the pipeline's, None for one rank."""
        self.stages = {stage.index: stage for stage in stages}
        self.schedule, self.segments, self.activation = schedule, segments, activation
        self.rank = 0 if group is None else dist.get_rank(group)
        self.group = group
        self.units = dict(zip(self.stages, units or [[] for _ in stages], strict=True))
        self.record = record or _NoRecord()
        self.filler: Filler | None = None
        """Set by whoever has such work. Of a walk's time it takes what the rank would wait, on a GPU what its other streams leave."""
        self.last_waits: dict[tuple[int, Arrival], float] = {}
        """Seconds that the rank waited for each input in the last walk of so many micro-batches: it will wait about as long in the next."""
        self.walk: _Walk | None = None
        """The step that is under way, for whoever counts what is alive."""
        shared = any(unit.has_peers for units in self.units.values() for unit in units)
        self._has_peers = group is not None or segments.exchange.num_ranks > 1 or shared
        self._is_out_of_step = False
        assert tuple(self.stages) == schedule.stages_of(self.rank)

    def run(self, micro_batches: Sequence[MicroBatch], schedule: Schedule | None = None) -> StepOutput:
        """All actions of this rank, in order: by the executor's schedule, or by another one of the same stages. Without grad mode it must
        be one of forwards alone.

        Raises ValueError, before anything travels, if the number or the shape of the micro-batches is not the schedule's. An error on the
        way leaves gradients that are no step's; clear them. Several ranks are out of step after that: RuntimeError in the next step.
        """
        schedule = self.schedule if schedule is None else schedule
        assert schedule.num_stages == self.schedule.num_stages
        self._check(micro_batches, schedule.num_micro_batches)
        if self._is_out_of_step:
            raise RuntimeError("an error ended an earlier step half-way, and what other ranks sent since is unknown: restart all ranks")
        walk = self.walk = _Walk(self, micro_batches, schedule)
        try:
            with self.segments.rounded_weights.kept():
                for action in schedule.ranks[self.rank]:
                    walk.wait_for_input(action)
                    with self.record.action(action):
                        walk.do(action)
                    if self.is_on_gpu and action.kind in COMPUTE and self.filler and not self.filler.is_busy:
                        self.fill()
                walk.finish()
            while self.filler:  # others may still compute, and what is left has to be done before the next step
                self.fill()
        except BaseException:
            self._is_out_of_step = self._has_peers
            for unit in (unit for units in self.units.values() for unit in units):
                unit.abandon()
            self.segments.weight_gradients.take()
            raise
        finally:
            self.walk = None
        return walk.output

    @property
    def is_on_gpu(self) -> bool:
        return is_gpu(self.activation.device)

    def fill(self) -> None:
        """Do a piece of the filler's work."""
        assert self.filler
        with self.record.action(Action(min(self.stages), Kind.REFRESH)):
            self.filler.work()

    def _check(self, micro_batches: Sequence[MicroBatch], expected_number: int) -> None:
        if len(micro_batches) != expected_number:
            raise ValueError(f"got {len(micro_batches)} micro-batches: this schedule is for {expected_number}")
        expected = self.activation.shape[:2]
        for number, batch in enumerate(micro_batches):
            for name, x in (("tokens", batch.tokens_BS), ("labels", batch.labels_BS)):
                if tuple(x.shape) != expected:
                    raise ValueError(f"{name} of micro-batch {number} have shape {tuple(x.shape)}: every micro-batch must have {expected}")


class _NoRecord:
    def action(self, action: Action) -> AbstractContextManager[Any]:
        return nullcontext()

    def waiting(self) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass
class _Arriving:
    """A receive that was posted."""

    buffer: Tensor
    work: dist.Work


class _Walk:
    """The state of one step."""

    def __init__(self, executor: Executor, micro_batches: Sequence[MicroBatch], schedule: Schedule) -> None:
        self.executor, self.micro_batches, self.schedule = executor, micro_batches, schedule
        self.stages, self.segments = executor.stages, executor.segments
        self.output = StepOutput()
        self.inputs: dict[Key, Tensor | _Arriving] = {}
        self.gradients: dict[Key, Tensor | _Arriving] = {}
        """Gradients of the outputs."""
        self.tapes: dict[Key, ChunkTape] = {}
        self.waiting: dict[Key, list[DeferredGradient]] = {}
        """Weight gradients."""
        self.outgoing: dict[tuple[Kind, Key], Tensor] = {}
        self.sends: deque[tuple[dist.Work, Tensor, ChunkTape | None]] = deque()

    def wait_for_input(self, action: Action) -> None:
        """For parameters and for what another rank sends, before a computation begins. Of an overlapped pair only the forward's input: the
        backward's may come until it has its turn."""
        if action.kind not in COMPUTE:
            return
        for chunk in action.chunks:
            for unit in self.executor.units[chunk.stage]:
                unit.wait()
        first = action.chunks[0]
        arrivals, key = self.inputs if first.kind is Kind.FORWARD else self.gradients, _key(first)
        if isinstance(arriving := arrivals.get(key), _Arriving):
            arrivals[key] = self._received(arriving, (arrivals is self.gradients, key))

    def do(self, action: Action) -> None:
        if action.kind == Kind.OVERLAP:
            forward, backward = action.parts
            results = overlap.run_both(self._forward(forward), self._backward(backward, defer=False))
            self._pass_on(forward, results[0])
            self._pass_back(backward, results[1])
        elif action.kind == Kind.FORWARD:
            self._pass_on(action, overlap.run(self._forward(action)))
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self._pass_back(action, overlap.run(self._backward(action, defer=action.kind == Kind.BACKWARD_INPUT)))
        elif action.kind == Kind.BACKWARD_WEIGHT:
            WeightGradients.run(self.waiting.pop(_key(action)))
        elif action.kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD):
            self._shard(action)
        else:
            self._travel(action)

    def finish(self) -> None:
        while self.sends:
            self._finish_oldest_send()
        for left in (self.inputs, self.gradients, self.tapes, self.waiting, self.outgoing):
            assert not left

    def _forward(self, action: Action) -> Steps[Tensor]:
        key = _key(action)
        tape = ChunkTape(self.micro_batches[key[1]])
        if torch.is_grad_enabled():
            self.tapes[key] = tape
        routings = self.output.routings.setdefault(key, [])
        return (yield from self.segments.forward(self.stages[action.stage], self._take(self.inputs, key), tape, routings))

    def _pass_on(self, action: Action, result: Tensor) -> None:
        """An output to the next stage, here or elsewhere; of the last stage it is the loss."""
        stage, micro_batch = _key(action)
        if stage == self.schedule.num_stages - 1:
            self.output.losses.append(result)
        elif stage + 1 in self.stages:
            self.inputs[stage + 1, micro_batch] = result
        else:
            self.outgoing[Kind.SEND_F, (stage, micro_batch)] = result

    def _backward(self, action: Action, *, defer: bool) -> Steps[Tensor | None]:
        key = _key(action)
        return (yield from self.segments.backward(self.tapes.pop(key), self._take(self.gradients, key), defer=defer))

    def _pass_back(self, action: Action, grad_BSD: Tensor | None) -> None:
        """An input's gradient to the stage before, here or elsewhere."""
        stage, micro_batch = _key(action)
        if action.kind == Kind.BACKWARD_INPUT:
            self.waiting[stage, micro_batch] = self.segments.weight_gradients.take()
        if grad_BSD is None:
            return
        if stage - 1 in self.stages:
            self.gradients[stage - 1, micro_batch] = grad_BSD
        else:
            self.outgoing[Kind.SEND_B, (stage, micro_batch)] = grad_BSD

    def _travel(self, action: Action) -> None:
        key = _key(action)
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            x = self._narrowed(self.outgoing.pop((action.kind, key)).contiguous(), key)
            self.sends.append((self._start(dist.isend, x, self.schedule.sends_to(action)), x, self.tapes.get(key)))
            while len(self.sends) > MOST_SENDS_UNDER_WAY or (is_gpu(x) and self.sends and self.sends[0][0].is_completed()):
                self._finish_oldest_send()
            return
        like = self.executor.activation
        buffer = torch.empty(like.shape, dtype=like.travels_as or like.dtype, device=like.device)
        arriving = _Arriving(buffer, self._start(dist.irecv, buffer, self.schedule.receives_from(action)))
        (self.inputs if action.kind == Kind.RECV_F else self.gradients)[key] = arriving

    def _start(self, operation: Callable[..., Any], x: Tensor, peer: int) -> dist.Work:
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, x, group=self.executor.group, group_peer=peer)])
        return work

    def _narrowed(self, x: Tensor, key: Key) -> Tensor:
        """The tensor that travels of a chunk's output or gradient, which is given back if that is a copy."""
        narrow = x.to(self.executor.activation.travels_as or x.dtype)
        if narrow is not x:
            self._give_back(x, self.tapes.get(key))
        return narrow

    def _give_back(self, x: Tensor, tape: ChunkTape | None) -> None:
        self.segments.frees.release(x, held=[] if tape is None else tape.held)

    def _finish_oldest_send(self) -> None:
        work, x, tape = self.sends.popleft()
        work.wait()
        self._give_back(x, tape)

    def _shard(self, action: Action) -> None:
        for unit in self.executor.units[action.stage]:
            if action.kind == Kind.UNSHARD:
                unit.unshard(async_op=self.executor.is_on_gpu)
            elif action.kind == Kind.RESHARD:
                unit.reshard()
                if not unit.is_gathered:
                    self.segments.rounded_weights.forget(unit.modules.parameters())
            else:
                unit.reduce_gradients()

    def _take(self, arrivals: dict[Key, Tensor | _Arriving], key: Key) -> Tensor | None:
        """None where nothing arrives: the first stage has no input, the last no gradient."""
        x = arrivals.pop(key, None)
        if not isinstance(x, _Arriving):
            return x
        with self.executor.record.waiting():
            return self._received(x, (arrivals is self.gradients, key))

    def _received(self, arriving: _Arriving, arrival: Arrival) -> Tensor:
        """The tensor that arrives. On a CPU pieces of the filler's work are done as long as the last step's wait says that there is time
        for them;
        on a GPU it is the stream that waits, not the host."""
        executor = self.executor
        if executor.filler and not executor.is_on_gpu:
            key, start = (self.schedule.num_micro_batches, arrival), time.perf_counter()
            expected_end = start + executor.last_waits.get(key, 0.0)
            arrived = in_thread(arriving.work.wait)
            while executor.filler and time.perf_counter() + executor.filler.next_seconds() <= expected_end and not arrived.done():
                executor.fill()
            executor.last_waits[key] = arrived.result() - start
        else:
            arriving.work.wait()
        return arriving.buffer.to(executor.activation.dtype)


def in_thread(wait: Callable[[], object]) -> Future[float]:
    """When `wait` has returned, by `time.perf_counter`; it is called in a thread of its own, which ends with the process."""
    result: Future[float] = Future()

    def call() -> None:
        try:
            wait()
            result.set_result(time.perf_counter())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return result


def _key(action: Action) -> Key:
    assert action.micro_batch is not None
    return action.stage, action.micro_batch
