"""Runs steps of a rank on the stand-in device and looks for what a pipelined step launches for the
first time. Worker processes import it without pytest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planned_runs import run_config
from torch import Tensor

from lather.memory.dry_rank import LedgerMode, dry_rank
from lather.memory.workers import Assumed
from lather.pipeline.chunk import MicroBatch
from lather.pipeline.executor import StepOutput
from lather.pipeline.schedule import Schedule
from lather.standin.operations import RanOperation

TRANSFERS = ("send", "recv_")
"""Operations that a prelude leaves out."""


class FirstLaunches(LedgerMode):
    """Notes the kinds of kernels that are launched for the first time between the first and the
    last transfer of a step: names, dtypes and numbers of dims."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known: set[tuple[object, ...]] = set()
        self.unsure: list[tuple[object, ...]] = []
        """Kinds launched for the first time since the last transfer."""
        self.found: list[tuple[object, ...]] = []
        self.under_way = False
        """Whether a transfer of the current step has been started."""

    def _saw(self, *kind: object) -> None:
        if kind[0] in TRANSFERS:
            self.found += self.unsure if self.under_way else []
            self.under_way, self.unsure = True, []
        elif kind not in self.known:
            self.unsure.append(kind)
            self.known.add(kind)

    def ran(self, operation: RanOperation) -> None:
        super().ran(operation)
        tensors = (*operation.inputs, *operation.made)
        self._saw(operation.name, *((x.dtype, x.dim()) for x in tensors))

    def launch(self, name: str, read: int, written: int, *, flops: int = 0) -> None:
        super().launch(name, read, written, flops=flops)
        self._saw(name)

    def launch_triton(self, function: Any, arguments: Any) -> None:
        tensors = ((name, x) for name, x in arguments.items() if isinstance(x, Tensor))
        self._saw(function, *((name, x.dtype, x.dim()) for name, x in tensors))


def first_launches(
    rank: int, world_size: int, changes: dict[str, Any], has_prelude: bool
) -> tuple[list[str], int, int]:
    """Return what a rank launches for the first time among the transfers of a validation and of the
    passes of a step, and the peak bytes of the prelude and of the rest, without optimizer state."""
    config = run_config(precision="bf16", length=128, **changes)
    with dry_rank(config, world_size, Assumed("gpu"), rank, make_mode=FirstLaunches) as dry:
        mode, engine, batch = dry.mode, dry.engine, dry.batch
        assert isinstance(mode, FirstLaunches)
        run = engine._executor.run

        def watched(batches: Sequence[MicroBatch], schedule: Schedule | None = None) -> StepOutput:
            mode.under_way, mode.unsure = False, []
            output = run(batches, schedule)
            mode.under_way, mode.unsure = False, []
            return output

        engine._executor.run = watched  # type: ignore[method-assign]
        start = mode.ledger.time
        if has_prelude:
            engine.run_prelude(batch)
        peak_of_prelude = mode.ledger.timeline(start).peak
        start = mode.ledger.time
        engine.validation_loss(batch)
        engine.launch_gradients(batch)
        return [str(kind) for kind in mode.found], peak_of_prelude, mode.ledger.timeline(start).peak
