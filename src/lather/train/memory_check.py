"""A run's memory plan: reported before the first step, and compared at the end with the memory that
the ranks used (`memory.json`).

With `parallel.partition = "memory"`, rank 0 first assigns the layers to stages. It makes the plan
in separate processes while the run starts (`lather.memory.plan`), and waits for it before the
first step. Kinds of memory that persist between steps are compared on every planned rank; the peak
only on GPUs, whose allocator records it. A run that does not fit is not refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lather.boxes import local
from lather.config.config import Config
from lather.device import gpu_module, is_gpu
from lather.durations import duration
from lather.engine.engine import Engine
from lather.files import optional_file, write_aside
from lather.memory.dry_rank import kind_of_state
from lather.memory.dry_run import RankRun
from lather.memory.plan import MemoryPlan, plan
from lather.memory.stage_bytes import memory_partition
from lather.memory.workers import Assumed
from lather.parallel.agreement import gather, on_rank_0
from lather.parallel.mesh import Mesh
from lather.pipeline.partition import Partition

FILE = "memory.json"
TOLERANCE = 0.05
"""Fraction of the planned bytes by which the measured bytes may differ without a warning."""
PATIENCE = 180.0
"""Seconds that the first step waits for the plan. The other ranks wait for rank 0 meanwhile, at
most `parallel.timeout`."""
GIB = 2**30


class MemoryCheck:
    """The memory check on one rank. All ranks call the same methods in the same order."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        note: Callable[[str], None],
        partition: Partition | None = None,
    ) -> None:
        """`partition`: the result of `agreed_partition`."""
        self.mesh, self.note, self.path = mesh, note, Path(config.run_dir) / FILE
        self.timeout = config.parallel.timeout
        when = config.log.memory_plan
        self.is_on = when == "always" or (when == "auto" and is_gpu(mesh.device))
        self.peak = 0
        """Peak bytes of this rank's allocator over all steps."""
        self._planning: Future[MemoryPlan] | None = None
        self._memory = device_memory(mesh.device)
        if self.is_on and mesh.rank == 0:
            thread = ThreadPoolExecutor(1, "memory-plan")
            self._planning = thread.submit(
                plan, config, mesh.size, assumed_for(mesh.device), partition
            )
            thread.shutdown(wait=False)

    def before_first_step(self) -> None:
        """Report the bytes that the run will need, and whether they exceed the device's memory."""
        if self._planning is None:
            return
        patience = min(PATIENCE, self.timeout / 2)
        try:
            planned = self._planning.result(patience)
        except TimeoutError:
            self.note(
                f"memory plan: not finished after {duration(patience)}; run lather plan, which has "
                "no time limit"
            )
        except Exception as error:
            self.note(f"memory plan: failed: {type(error).__name__}: {error}")
        else:
            self.note(f"memory plan: {_verdict(planned, self._memory)}")

    def record_peak(self, peak: int) -> None:
        """Record the peak of a step, in bytes, from `take_peak_memory_bytes`; on a CPU that is the
        peak of the whole process and is ignored."""
        if is_gpu(self.mesh.device):
            self.peak = max(self.peak, peak)

    def finish(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        averages: Collection[torch.Tensor] = (),
    ) -> None:
        """Write planned and measured bytes, and warn where they differ."""
        if not self.is_on:
            return
        measured = dict(measured_bytes(engine, optimizer, averages)), self.peak
        of_ranks = gather(measured, self.mesh.control_group)
        planning = self._planning
        if planning is None or not planning.done() or planning.exception():
            return
        ranks = [_compared(run, *of_ranks[run.rank]) for run in planning.result().ranks]
        content = json.dumps({"world_size": self.mesh.size, "ranks": ranks}, indent=1) + "\n"
        with optional_file(self.path, self.note):
            write_aside(self.path, content)
        for warning in (text for row in ranks for text in differences(row)):
            self.note(f"memory plan: {warning}")


def _verdict(planned: MemoryPlan, memory: int | None) -> str:
    """Describe the bytes of the rank that needs most, of a device with so much memory."""
    rank, needed = planned.largest.rank, f"{planned.needed / GIB:.2f}"
    if memory is None:
        return f"rank {rank} needs most, {needed} GiB"
    if planned.needed <= memory:
        return f"rank {rank} needs most, {needed} of {memory / GIB:.2f} GiB"
    return (
        f"this run will not fit: rank {rank} needs {needed} GiB, and its device has "
        f"{memory / GIB:.2f}; lather plan --memory finds settings that do"
    )


def agreed_partition(config: Config, mesh: Mesh) -> Partition | None:
    """Return the partition for `parallel.partition = "memory"`, which rank 0 searches while the
    others wait; None if layers are assigned uniformly. Raises ConfigError on all ranks if the
    search is not possible for this model."""
    if config.parallel.partition == "uniform" or mesh.pp == 1:
        return None
    return on_rank_0(
        lambda: memory_partition(config, mesh.size, assumed_for(mesh.device)), mesh.control_group
    )


def assumed_for(device: torch.device) -> Assumed:
    """Return the assumptions of a plan for ranks with this kind of device."""
    return Assumed("gpu" if is_gpu(device) else "cpu", memory=device_memory(device))


def device_memory(device: torch.device) -> int | None:
    """Return the memory of the device in bytes if it is a GPU, else None."""
    return (
        int(gpu_module(device).get_device_properties(device).total_memory)
        if is_gpu(device)
        else None
    )


def measured_bytes(
    engine: Engine, optimizer: torch.optim.Optimizer, averages: Collection[torch.Tensor] = ()
) -> Counter[str]:
    """Return the bytes of this rank's parameters, their averages and the optimizer state, by the
    kinds of a plan; each storage counts once."""
    parameters = (*engine.part.parameters(), *engine.part.buffers(), *averages)
    labeled = [("parameters", x) for x in parameters]
    states = (item for state in optimizer.state.values() for item in state.items())
    labeled += [(kind_of_state(name), x) for name, x in states if isinstance(x, torch.Tensor)]
    sizes: Counter[str] = Counter()
    storages: set[int] = set()
    for kind, x in labeled:
        storage = local(x).untyped_storage()
        if storage.data_ptr() not in storages and x.device.type == engine.mesh.device.type:
            storages.add(storage.data_ptr())
            sizes[kind] += storage.nbytes()
    return sizes


def _compared(run: RankRun, kinds: dict[str, int], peak: int) -> dict[str, Any]:
    """Return a row of memory.json: planned and measured bytes of persistent kinds, and of the peak
    if it was measured."""
    last = list(run.steps.values())[-1].at(-1)
    sizes = {name: {"planned": last.get(name, 0), "seen": size} for name, size in kinds.items()}
    return {"rank": run.rank, "kinds": sizes, "peak": {"planned": run.peak, "seen": peak or None}}


def sizes_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the planned and measured bytes of a row of memory.json, by kind and at the peak."""
    return {**row["kinds"], "peak": row["peak"]}


def differences(row: dict[str, Any]) -> list[str]:
    """Describe each size of a row that differs from the plan by more than `TOLERANCE`."""
    return [
        f"rank {row['rank']} had {size['seen'] / GIB:.3f} GiB of {name} where "
        f"{size['planned'] / GIB:.3f} were planned"
        for name, size in sizes_of(row).items()
        if size["seen"] is not None
        and abs(size["seen"] - size["planned"]) > TOLERANCE * size["planned"]
    ]
