"""Runs steps of a rank on the stand-in device and looks for what a pipelined step launches for the
first time. Worker processes import it without pytest."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from planned_runs import run_config
from torch import Tensor

from lather.engine.engine import build_engine
from lather.memory.dry_run import (
    Bookkeeper,
    LedgerMode,
    Load,
    _group,
    batch_of,
    shortened,
)
from lather.memory.ledger import Ledger
from lather.memory.work import WorkTally
from lather.parallel.mesh import Mesh
from lather.pipeline.executor import StepOutput
from lather.pipeline.schedule import Schedule
from lather.pipeline.segments import MicroBatch
from lather.standin.device import standin

TRANSFERS = ("send", "recv_")
"""Operations that a prelude leaves out."""


class FirstLaunches(LedgerMode):
    """Notes the kinds of kernels that are launched for the first time between the first and the
    last transfer of a step: names, dtypes and numbers of dims."""

    def __init__(self, load: Load) -> None:
        super().__init__(Ledger(), load, WorkTally(1.0))
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

    def ran(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        made: list[Tensor],
        out: Any,
    ) -> None:
        super().ran(func, name, args, kwargs, inputs, made, out)
        self._saw(name, *((x.dtype, x.dim()) for x in (*inputs, *made)))

    def launch(self, name: str, read: int, written: int, *, flops: int = 0) -> None:
        super().launch(name, read, written, flops=flops)
        self._saw(name)

    def launch_triton(self, function: Any, tensors: Any) -> None:
        self._saw(function, *((name, x.dtype, x.dim()) for name, x in tensors.items()))


def first_launches(
    rank: int, world_size: int, changes: dict[str, Any], has_prelude: bool
) -> tuple[list[str], int, int]:
    """Return what a rank launches for the first time among the transfers of a validation and of the
    passes of a step, and the peak bytes of the prelude and of the rest, without optimizer state."""
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels would read values
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    config = shortened(run_config(precision="bf16", length=128, **changes), world_size)
    data_size = config.parallel.data_ranks(world_size)
    number = config.num_micro_batches(data_size)
    sequences = config.train.batch_size // data_size
    load = Load(config, config.train.sequence_length * sequences // number, 1.0)
    device, mode = standin("gpu"), FirstLaunches(load)
    with _group(rank, world_size, device), mode:
        mesh = Mesh.build(config.parallel, device)
        engine = build_engine(config, mesh, record=Bookkeeper(mode.ledger, mode.tally))
        engine._executor.record.engine = engine  # type: ignore[attr-defined]
        batch, run = batch_of(config, sequences, engine.micro_batch_size), engine._executor.run

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
