"""Executes one rank's row of the schedule: forward and backward passes, weight gradients, sends,
receives, and FSDP actions.

Tensors that travel exist no longer than necessary: the buffer of a receive is allocated when its
action comes and is passed to its only reader; a sent tensor is freed when the send is complete. Of
a micro-batch's forward pass only its tape is kept, until its backward pass. At most 2P + 1 chunks
(a chunk is a micro-batch in a stage) are alive on a rank.

Letters: B sequences of a micro-batch, S positions, D hidden size, P pipeline ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.device import is_gpu
from lather.models.block import Block
from lather.models.saving.weight_gradients import DeferredGradient, WeightGradients
from lather.optim import PendingRefreshes
from lather.parallel.mesh import Mesh
from lather.pipeline import overlap
from lather.pipeline.chunk import ChunkTape, MicroBatch, RoutingSummary
from lather.pipeline.gathering import Gathering, Leave, Pass, Units, Visit
from lather.pipeline.model_part import Stage
from lather.pipeline.recorder import Recorder
from lather.pipeline.schedule import COMPUTE, RECEIVED_AS, TRANSFERS, Action, Kind, Schedule
from lather.pipeline.segments import Segments, Steps
from lather.pipeline.transfer_queues import MOST_SENDS_UNDER_WAY
from lather.profiled import profiled

Key = tuple[int, int]
"""Stage and micro-batch."""

Passing = tuple[Kind, Key]
"""A tensor that passes between stages, by the action that receives it or sends it; also where both
stages are on one rank and there is no such action."""


@dataclass(frozen=True)
class Activation:
    """Shape and type of the tensors that one stage passes to the next."""

    shape: tuple[int, int, int]
    """(B, S, D), for every micro-batch."""
    dtype: torch.dtype
    travels_as: torch.dtype | None = None
    """Dtype in which it is sent between ranks; None: unchanged."""


@dataclass
class StepOutput:
    """The results of one execution of the schedule on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    """Losses of the micro-batches, on the rank of the last stage."""
    routings: dict[Key, list[RoutingSummary]] = field(default_factory=dict)
    """Summaries for each stage and micro-batch, one per MoE block."""


class Executor:
    """Executes a schedule on one rank, step after step."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        segments: Segments,
        activation: Activation,
        mesh: Mesh,
        units: Units,
        record: Recorder | None = None,
    ) -> None:
        """`stages`: the stages of this rank; `units`: the FSDP units of their parameters."""
        self.stages = {stage.index: stage for stage in stages}
        self.schedule, self.segments, self.activation = schedule, segments, activation
        self.mesh, self.rank = mesh, mesh.pp_rank
        self.units = units
        self.record = record or Recorder()
        self.refreshes: PendingRefreshes | None = None
        """An optimizer's deferred refreshes, set by the engine: after each computation one batch is
        started, on a GPU beside the other streams and unless the last one still runs."""
        self.walk: StepWalk | None = None
        """The current step, for code that counts live tensors."""
        self._is_broken = False
        assert tuple(self.stages) == schedule.stages_of(self.rank)

    def run(
        self, micro_batches: Sequence[MicroBatch], schedule: Schedule | None = None
    ) -> StepOutput:
        """Execute all actions of this rank in order, by the executor's schedule or by another one
        with the same stages. Without grad mode the schedule must consist of forward passes alone.

        After an error inside a step gradients and transfers are incomplete, and every further step
        raises RuntimeError.
        """
        if self._is_broken:
            raise RuntimeError(
                "an error interrupted an earlier step, so its gradients are incomplete and ranks "
                "are out of step: make the engine again, on all ranks"
            )
        schedule = self.schedule if schedule is None else schedule
        assert schedule.num_stages == self.schedule.num_stages
        assert len(micro_batches) == schedule.num_micro_batches
        walk = self.walk = StepWalk(self, micro_batches, schedule)
        try:
            with self.segments.rounded_weights.caching():
                for action, following in walk.gathering.begin(schedule.ranks[self.rank]):
                    walk.wait_for_input(action)
                    with profiled(f"action.{action}"), self.record.action(action):
                        walk.do(action, following)
                    if action.kind in COMPUTE and self.refreshes and not self.refreshes.is_busy:
                        self._refresh()
                walk.finish()
            while self.refreshes:  # the remaining batches have to be done before the next step
                self._refresh()
        except BaseException:
            self._is_broken = True
            for unit in self.units.values():
                unit.drop_gradients()
            raise
        finally:
            self.walk = None
        return walk.output

    def _refresh(self) -> None:
        """Do one batch of the deferred refreshes."""
        assert self.refreshes
        with profiled("refresh"), self.record.action(Action(min(self.stages), Kind.REFRESH)):
            self.refreshes.work()


class StepWalk:
    """The state of one step."""

    def __init__(
        self, executor: Executor, micro_batches: Sequence[MicroBatch], schedule: Schedule
    ) -> None:
        self.executor, self.micro_batches, self.schedule = executor, micro_batches, schedule
        self.stages, self.segments = executor.stages, executor.segments
        self.output = StepOutput()
        self.incoming: dict[Passing, tuple[Tensor, dist.Work | None]] = {}
        """Inputs (RECV_F) and gradients of outputs (RECV_B) that were not read yet, with the
        receive that must be waited for."""
        self.tapes: dict[Key, ChunkTape] = {}
        self.waiting: defaultdict[Key, list[tuple[list[DeferredGradient], Visit]]]
        self.waiting = defaultdict(list)
        """Deferred weight gradients, and the units whose gradients are complete after them."""
        self.outgoing: dict[Passing, Tensor] = {}
        self.sends: deque[tuple[dist.Work, Tensor, ChunkTape | None]] = deque()
        self.gathering = Gathering(
            self.stages,
            executor.units,
            len(micro_batches[0].depths),
            self.segments.rounded_weights,
            executor.record,
            by_block=schedule.gathers_blocks,
            async_op=is_gpu(executor.mesh.device),
        )

    def wait_for_input(self, action: Action) -> None:
        """Wait for the parameters and for the received input of a computation. For an overlapped
        pair, wait only for the input of the forward pass; the input of the backward pass may arrive
        until its first turn."""
        if action.kind not in COMPUTE:
            return
        if not self.schedule.gathers_blocks:
            for chunk in action.chunks:
                self.gathering.wait_for(self.gathering.units_of(chunk.stage))
        first = action.chunks[0]
        passing = (Kind.RECV_F if first.kind is Kind.FORWARD else Kind.RECV_B, _key(first))
        if passing in self.incoming:
            self.incoming[passing] = self._received(*self.incoming[passing]), None

    def do(self, action: Action, following: Action | None) -> None:
        """Execute an action; `following`: the next one that passes through a stage."""
        passes = self.gathering.passes(action, following, self._leave)
        if action.kind == Kind.OVERLAP:
            forward, backward = action.parts
            results = overlap.run_both(
                self._forward(forward, passes[0]), self._backward(backward, passes[1])
            )
            self._pass(Kind.SEND_F, forward, results[0])
            self._pass(Kind.SEND_B, backward, results[1])
        elif action.kind == Kind.FORWARD:
            self._pass(
                Kind.SEND_F, action, overlap.run(self._forward(action, passes[0]), "forward")
            )
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self._pass(
                Kind.SEND_B, action, overlap.run(self._backward(action, passes[0]), "backward")
            )
        elif action.kind == Kind.BACKWARD_WEIGHT:
            for entries, units in self.waiting.pop(_key(action)):
                WeightGradients.run(entries)
                self.gathering.reduce(units)
        elif action.kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD):
            self._shard(action)
        else:
            self._transfer(action)

    def finish(self) -> None:
        while self.sends:
            self._finish_oldest_send()
        for left in (self.incoming, self.tapes, self.waiting, self.outgoing):
            assert not left

    def _forward(self, action: Action, parameters: Pass) -> Steps[Tensor]:
        key = _key(action)
        tape, routings = ChunkTape(self.micro_batches[key[1]]), list[RoutingSummary]()
        self.output.routings[key] = routings
        if torch.is_grad_enabled():
            self.tapes[key] = tape
        return (
            yield from self.segments.forward(
                self.stages[action.stage],
                self._take((Kind.RECV_F, key)),
                tape,
                routings,
                parameters,
            )
        )

    def _backward(self, action: Action, parameters: Pass) -> Steps[Tensor | None]:
        key, defer = _key(action), action.kind == Kind.BACKWARD_INPUT
        grad_BSD = yield from self.segments.backward(
            self.tapes.pop(key), self._take((Kind.RECV_B, key)), parameters, defer=defer
        )
        if defer:
            self._defer(key)
        return grad_BSD

    def _leave(self, chunk: Action) -> Leave:
        """Return what a pass does when it leaves units: a backward pass sums their gradients over
        data ranks; those of blocks whose weight gradients are deferred, after these."""
        match chunk.kind:
            case Kind.BACKWARD:
                return self.gathering.reduce
            case Kind.BACKWARD_INPUT:
                return partial(self._defer, _key(chunk))
        return lambda _: None

    def _defer(self, key: Key, units: Visit = ()) -> None:
        blocks = [unit for unit in units if isinstance(unit.modules[0], Block)]
        self.waiting[key].append((self.segments.weight_gradients.take(), blocks))
        self.gathering.reduce([unit for unit in units if unit not in blocks])

    def _pass(self, sends: Kind, action: Action, x: Tensor | None) -> None:
        """Pass an output to the next stage, or the gradient of an input to the previous one, on
        this rank or another. The output of the last stage is the loss; the first stage has no
        gradient (None)."""
        stage, micro_batch = _key(action)
        to = stage + TRANSFERS[sends]
        if x is None:
            return
        if to == self.schedule.num_stages:
            self.output.losses.append(x)
        elif to in self.stages:
            self.incoming[RECEIVED_AS[sends], (to, micro_batch)] = x, None
        else:
            self.outgoing[sends, (stage, micro_batch)] = x

    def _transfer(self, action: Action) -> None:
        key = _key(action)
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            x = self._narrowed(self.outgoing.pop((action.kind, key)).contiguous(), key)
            self.sends.append(
                (self._start(dist.isend, x, self.schedule.peer_of(action)), x, self.tapes.get(key))
            )
            while len(self.sends) > MOST_SENDS_UNDER_WAY or (
                is_gpu(x) and self.sends and self.sends[0][0].is_completed()
            ):
                self._finish_oldest_send()
            return
        like, device = self.executor.activation, self.executor.mesh.device
        buffer = torch.empty(like.shape, dtype=like.travels_as or like.dtype, device=device)
        work = self._start(dist.irecv, buffer, self.schedule.peer_of(action))
        self.incoming[action.kind, key] = buffer, work

    def _start(self, operation: Callable[..., Any], x: Tensor, peer: int) -> dist.Work:
        mesh = self.executor.mesh
        group = mesh.pp_group
        if pair := mesh.neighbor_groups.get(peer):
            group, peer = pair, int(peer > mesh.pp_rank)
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, x, group=group, group_peer=peer)])
        return work

    def _narrowed(self, x: Tensor, key: Key) -> Tensor:
        """Return an output or gradient in the dtype in which it is sent; if that is a copy, free
        the original."""
        narrow = x.to(self.executor.activation.travels_as or x.dtype)
        if narrow is not x:
            self._free_buffer(x, self.tapes.get(key))
        return narrow

    def _free_buffer(self, x: Tensor, tape: ChunkTape | None) -> None:
        self.segments.frees.release(x, held=[] if tape is None else tape.held)

    def _finish_oldest_send(self) -> None:
        work, x, tape = self.sends.popleft()
        with profiled("wait"):
            work.wait()
        self._free_buffer(x, tape)

    def _shard(self, action: Action) -> None:
        gathering = self.gathering
        does = {
            Kind.UNSHARD: gathering.gather,
            Kind.RESHARD: gathering.free,
            Kind.REDUCE_GRAD: gathering.reduce,
        }
        does[action.kind](gathering.units_of(action.stage))

    def _take(self, passing: Passing) -> Tensor | None:
        """Remove and return the tensor that arrived; None for the input of the first stage and the
        gradient of the last."""
        x, work = self.incoming.pop(passing, (None, None))
        if x is None or work is None:
            return x
        with self.executor.record.waiting():
            return self._received(x, work)

    def _received(self, x: Tensor, work: dist.Work | None) -> Tensor:
        """Return the tensor after its receive; on a GPU only the stream waits, not the host."""
        if work is None:
            return x
        with profiled("wait"):
            work.wait()
        return x.to(self.executor.activation.dtype)


def _key(action: Action) -> Key:
    assert action.micro_batch is not None
    return action.stage, action.micro_batch
