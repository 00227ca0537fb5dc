"""The prelude to the first pipelined step on GPUs: every rank runs two micro-batches through its
own stages, without the transfers between them.

What happens for the first time takes long. Kernels are compiled and loaded, for which the host may
wait until nothing runs on the device, and NCCL connects ranks at their first operation of a kind.
In a step each stage would do this only when its first input arrives, one after the other, while
receives of the other ranks occupy their devices and the time limit of operations runs. In the
prelude all ranks do it at once. A step then does nothing for the first time, except for what
depends on sizes: with other numbers of rows a library may choose another kernel.

Ranks with the same stages communicate as in a step, and start the same operations in the same
order. The first micro-batch takes the split backward pass; the second, which has padding, the whole
one, and adds to the gradients of the first. Received tensors are replaced by random numbers, which
spread over the experts. At most one micro-batch is alive in each stage, fewer than in any step, so
that the peak of memory stays that of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.pipeline.chunk import MicroBatch
from lather.pipeline.executor import Executor, StepWalk
from lather.pipeline.schedule import TRANSFERS, Action, Kind, Schedule

BACKWARDS = ((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), (Kind.BACKWARD,))
"""Backward passes of the two micro-batches."""


def run_prelude(executor: Executor, micro_batches: Sequence[MicroBatch]) -> None:
    """Run two micro-batches forward and, in grad mode, backward through the rank's stages.

    Collective over the ranks with the same stages. The caller encloses the call like a step and
    drops the gradients; nothing else remains.
    """
    assert len(micro_batches) == len(BACKWARDS)
    walk = _Prelude(executor, micro_batches, executor.schedule)
    with executor.segments.rounded_weights.caching():
        row = actions(executor.schedule, executor.rank, trains=torch.is_grad_enabled())
        for action, following in walk.gathering.begin(row):
            walk.wait_for_input(action)
            walk.do(action, following)
        walk.finish()


def actions(schedule: Schedule, rank: int, *, trains: bool) -> Iterator[Action]:
    """Yield the actions of a rank in the prelude to its row of the table."""
    stages = schedule.stages_of(rank)
    has = {(action.kind, action.stage) for action in schedule.ranks[rank]}

    def chunk(number: int, stage: int, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            if kind not in TRANSFERS or (kind, stage) in has:
                yield Action(stage, kind, number)

    whole = not schedule.gathers_blocks
    for stage in stages if whole else ():
        yield Action(stage, Kind.UNSHARD)
    for number, backwards in enumerate(BACKWARDS):
        for stage in stages:
            yield from chunk(number, stage, Kind.RECV_F, Kind.FORWARD, Kind.SEND_F)
        for stage in reversed(stages if trains else ()):
            yield from chunk(number, stage, Kind.RECV_B, *backwards, Kind.SEND_B)
    for stage in stages if whole else ():
        if trains:
            yield Action(stage, Kind.REDUCE_GRAD)
        yield Action(stage, Kind.RESHARD)


class _Nothing(dist.Work):
    """A transfer that is complete."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Prelude(StepWalk):
    """A step that transfers nothing."""

    def __init__(
        self, executor: Executor, micro_batches: Sequence[MicroBatch], schedule: Schedule
    ) -> None:
        super().__init__(executor, micro_batches, schedule)
        shape, device = executor.activation.shape, executor.mesh.device
        noise = torch.randn(shape[1:], generator=torch.Generator().manual_seed(0))
        self._noise_SD = noise.to(device)

    def _start(self, operation: Callable[..., Any], x: Tensor, peer: int) -> dist.Work:
        if operation is dist.irecv:
            x.copy_(self._noise_SD)
        return _Nothing()
