"""Does the work of a rank of `lather bench pipeline`: runs every contestant, compares it with the
first, counts bytes or takes times."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.live_bytes import PeakBytes
from benchmarks.pipeline_ranks import (
    Contestant,
    OurRuntime,
    PipelineCase,
    clear_gradients,
    make_contestant,
)
from lather.config.config import ParallelConfig
from lather.parallel.launch.world import World
from lather.parallel.mesh import Mesh
from lather.pipeline.timeline import TimelineRecorder

TOLERANCE = 1e-4
"""The largest difference of loss or gradient from torch's runtime, relative (for gradients in the
Frobenius norm)."""
RECORDED_STEPS = 5


@dataclass(frozen=True)
class BytesJob:
    """A job that counts the bytes that contestants keep; the others are checked against the
    first."""

    pp: int
    ep: int
    case: PipelineCase
    contestants: tuple[str, ...]

    def run(self, mesh: Mesh) -> dict[str, Any]:
        """Return for each contestant the counts of this rank's first step, and how far its results
        are from the first contestant's."""
        measured: dict[str, Any] = {}
        batch = self.case.batch_of(mesh.data_rank)
        expected = Results(0.0, {})
        for name in self.contestants:
            contestant = make_contestant(name, self.case, mesh)
            loss, counts = counted_step(contestant, batch)
            results = Results.of(contestant, loss)
            expected = results if name == self.contestants[0] else expected
            measured[name] = {"counts": counts, "check": results.compare(expected)}
            del contestant, results
            gc.collect()
        return measured


def counted_step(
    contestant: Contestant, batch: tuple[Tensor, Tensor]
) -> tuple[float, dict[str, int]]:
    """Take the first step of a contestant whose parameters have gradients; return its loss and the
    bytes that it makes.

    Bytes are `saved` if they are alive between two actions of the schedule, when nothing runs:
    autograd or a deferred weight gradient needs them, they travel or wait for their reader.
    `with_temporaries` are alive at any time, `after` at the end of the step."""
    between = [0]
    with PeakBytes() as alive:
        loss = contestant.step(*batch, lambda: between.append(alive.now))
        after = alive.now
    return loss, {"saved": max(between), "with_temporaries": alive.bytes, "after": after}


@dataclass(frozen=True)
class TimeJob:
    """A job that times a step of each contestant in a round, in an order that turns
    round by round."""

    pp: int
    ep: int
    case: PipelineCase
    contestants: tuple[str, ...]
    rounds: int = 5

    def run(self, mesh: Mesh) -> dict[str, Any]:
        """Return for each contestant this rank's milliseconds of every round, and the events of our
        executor in some more steps."""
        batch = self.case.batch_of(mesh.data_rank)
        contestants = {name: make_contestant(name, self.case, mesh) for name in self.contestants}
        measured: dict[str, Any] = {}
        expected = Results(0.0, {})
        for name, contestant in contestants.items():  # this step also warms up
            results = Results.of(contestant, contestant.step(*batch))
            expected = expected if expected.gradients else results
            measured[name] = {"check": results.compare(expected), "ms": []}
        order = list(contestants)
        for index in range(self.rounds + 1):
            for name in order:
                milliseconds = _time_step(contestants[name], batch)
                if index:  # in the first round torch's stages have just made their buffers
                    measured[name]["ms"].append(milliseconds)
            order.append(order.pop(0))
        measured["events"] = _events(contestants["ours"], batch, mesh)
        return measured


def _time_step(contestant: Contestant, batch: tuple[Tensor, Tensor]) -> float:
    clear_gradients(contestant.part)
    dist.barrier()
    start = time.perf_counter()
    contestant.step(*batch)
    return 1e3 * (time.perf_counter() - start)


def _events(
    ours: Contestant, batch: tuple[Tensor, Tensor], mesh: Mesh
) -> list[list[tuple[int, str, float, float]]]:
    """Record some steps; returns their events as (rank, action, start, end)."""
    assert isinstance(ours, OurRuntime)
    recorder = TimelineRecorder(mesh.device, mesh.pp_rank, mesh.size)
    ours.executor.record = recorder
    steps = []
    for _ in range(RECORDED_STEPS):
        recorder.begin()
        ours.step(*batch)
        steps.append(
            [(event.rank, str(event.action), event.start, event.end) for event in recorder.end()]
        )
    return steps


@dataclass(frozen=True)
class Results:
    """The results of a step on this rank."""

    loss: float
    gradients: Mapping[str, Tensor]

    @classmethod
    def of(cls, contestant: Contestant, loss: float) -> Results:
        return cls(
            loss,
            {
                name: p.grad.clone()
                for name, p in contestant.part.named_parameters()
                if p.grad is not None
            },
        )

    def compare(self, expected: Results) -> dict[str, float]:
        """Return the relative differences from `expected`; of the gradients' the largest."""
        assert self.gradients.keys() == expected.gradients.keys()
        tiny = 1e-30
        errors = [
            torch.dist(g, expected.gradients[name]) / (expected.gradients[name].norm() + tiny)
            for name, g in self.gradients.items()
        ]
        loss = abs(self.loss - expected.loss) / (abs(expected.loss) + tiny)
        return {"error_of_loss": loss, "error_of_gradients": largest(map(float, errors))}


def largest(values: Iterable[float]) -> float:
    """Return the largest value; NaN if any is NaN."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def measure(jobs: tuple[BytesJob | TimeJob, ...], folder: str, world: World) -> int:
    """Run the jobs on a rank, as a worker of `launch`; rank 0 writes the results of job n, by rank,
    to n.json. Returns 0 always: the caller checks the results."""
    torch.set_num_threads(1)
    mesh = Mesh.build(ParallelConfig(pp=jobs[0].pp, ep=jobs[0].ep), torch.device("cpu"))
    for number, job in enumerate(jobs):
        everybody: list[Any] | None = [None] * world.size if world.rank == 0 else None
        dist.gather_object(job.run(mesh), everybody)
        if everybody is not None:
            (Path(folder) / f"{number}.json").write_text(json.dumps(everybody))
    return 0
