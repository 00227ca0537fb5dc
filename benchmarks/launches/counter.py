"""Counts what code asks of a GPU: `with Counter() as counter: ...` around work on the stand-in
device.

    launches    kernels: every operation that is neither a view nor only makes memory; every Triton
                kernel; for a factorization that CUDA's libraries do matrix by matrix, one for each
                matrix (there are more inside)
    bytes       bytes that those kernels read and write, each tensor of a kernel once. A gather
                counts the rows that it reads, a Triton kernel the tensors that its source loads and
                stores, whole
    flops       flops of products, attention and factorizations; causal masks save nothing here,
                elementwise work counts nothing
    seconds     the time that the launches would take on an H100, each the longest of three times
                (`lather.time_model.rates`), by kind of kernel (`lather.time_model.kinds`);
                causal attention computes half of its flops
    waits       times that the host waits for the device, each with the place in Lather: reads of
                values, blocking copies, copies of memory that is not pinned, synchronization
    peak        the most bytes of tensors made inside the block that are alive together, temporaries
                among them

Counts are kept by phase: the innermost `record_function` range whose name begins with
"lather.optim.". The device's values are made up (`lather.standin`). Counts are exact; times are
predictions, from rates of which most are assumed.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.live_bytes import PeakBytes
from lather.device import Read
from lather.standin.mode import StandInMode, places
from lather.standin.operations import COPIES, TAKE_INDICES, VIEWS, RanOperation
from lather.storages import following_resizes
from lather.time_model import operations
from lather.time_model.launches import (
    TRITON,
    KernelLaunch,
    launch_named,
    launch_of,
    launch_of_triton,
)
from lather.time_model.rates import H100, TABLES, UNKNOWN

OUTSIDE = "outside of Lather's ranges"
RANGES = "lather.optim."
"""The names of ranges that are phases begin so."""


@dataclass
class CountedPhase:
    """The counts of a phase."""

    launches: int = 0
    triton: int = 0
    """How many of these launches are Lather's kernels."""
    views: int = 0
    """Operations that launch no kernel."""
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    host_waits: int = 0
    peak_bytes: int = 0
    """The most bytes made since counting began that were alive together during the phase."""
    kernels: Tally[str] = field(default_factory=Tally)
    seconds: dict[str, float] = field(default_factory=dict)
    """Predicted seconds of an H100, by kind of kernel."""
    of_devices: dict[str, float] = field(default_factory=dict)
    """Predicted seconds of all kinds together, by name of the device."""
    unknown: Tally[str] = field(default_factory=Tally)
    """Launches of kernels whose kind the model does not know."""

    def add_seconds(self, seconds: Mapping[str, float], of_devices: Mapping[str, float]) -> None:
        """Add times by kind, and by device."""
        for sums, added in ((self.seconds, seconds), (self.of_devices, of_devices)):
            for key, time in added.items():
                sums[key] = sums.get(key, 0.0) + time


class Counter(StandInMode):
    """Counts launches, bytes, flops, waits and peak, as the head of this file says. The device
    serves one counter at a time."""

    rows_of_expert = 1
    """Number of rows that each expert has."""
    rows_and_pairs = (1, 1)
    """Number of rows that each expert rank receives from each, and of pairs of these and its
    experts."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: defaultdict[str, CountedPhase] = defaultdict(CountedPhase)
        self.waits: Tally[tuple[str, str]] = Tally()
        """How often the host waited, by (reason, place)."""
        self.notes: Tally[str] = Tally()
        """How often something odd happened: operands of two devices, unfused attention, products of
        fp64."""
        self._ranges: list[str] = []
        self._memory = PeakBytes(count_meta=False)

    def __enter__(self) -> Self:
        def resized(storage: torch.UntypedStorage) -> None:
            self._memory.resized(storage)  # of the newest count: `restart` makes another

        self._around.enter_context(following_resizes(resized))
        return super().__enter__()

    def restart(self) -> None:
        """Forget all counts; memory that exists now does not count from here on."""
        self.phases.clear()
        self.waits.clear()
        self.notes.clear()
        self._memory = PeakBytes(count_meta=False)

    @property
    def total(self) -> CountedPhase:
        """The counts of all phases together."""
        sums = CountedPhase()
        for phase in self.phases.values():
            for name in (
                "launches",
                "triton",
                "views",
                "bytes_read",
                "bytes_written",
                "flops",
                "host_waits",
            ):
                setattr(sums, name, getattr(sums, name) + getattr(phase, name))
            sums.kernels.update(phase.kernels)
            sums.unknown.update(phase.unknown)
            sums.add_seconds(phase.seconds, phase.of_devices)
        sums.peak_bytes = self.peak_bytes
        return sums

    @property
    def peak_bytes(self) -> int:
        return max((phase.peak_bytes for phase in self.phases.values()), default=0)

    @property
    def phase(self) -> CountedPhase:
        """The phase that is running."""
        return self.phases[
            next((name for name in reversed(self._ranges) if name.startswith(RANGES)), OUTSIDE)
        ]

    def values_of(self, x: Tensor, what: Read) -> Tensor:
        if what is Read.SIZES:
            return torch.tensor(self.rows_and_pairs).expand(x.shape).contiguous()
        values = super().values_of(x, what)
        return values * self.rows_of_expert if what is Read.ENDS else values

    def wait(self, what: str) -> None:
        """Note that the host waits here."""
        self.phase.host_waits += 1
        self.waits[what, place()] += 1

    def note(self, what: str) -> None:
        self.notes[f"{what} at {place()}"] += 1

    def launch(
        self, name: str, read: int, written: int, *, flops: int = 0, kind: str | None = None
    ) -> None:
        launch = launch_named(name, read, written, flops=flops)
        self.add(launch if kind is None else replace(launch, kind=kind))

    def launch_triton(self, function: Any, arguments: Mapping[str, Any]) -> None:
        self.add(launch_of_triton(function, arguments))

    def add(self, launch: KernelLaunch) -> None:
        """Count a launch."""
        phase, name, kind = self.phase, launch.name, launch.kind
        phase.launches += launch.times
        phase.triton += name.startswith(TRITON)
        phase.kernels[name] += launch.times
        phase.bytes_read += launch.read
        phase.bytes_written += launch.written
        phase.flops += launch.flops
        if kind == UNKNOWN:
            phase.unknown[name] += launch.times
        seconds = {table.name: launch.seconds(table) for table in TABLES}
        phase.add_seconds({kind: seconds[H100.name]}, seconds)

    # --- what the device is asked for -------------------------------------------------------------

    def entered(self, name: str) -> None:
        self._ranges.append(name)

    def left(self) -> None:
        self._ranges.pop()

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._memory.observe(func, args, kwargs)

    def ran(self, operation: RanOperation) -> None:
        name, made = operation.name, operation.made
        phase = self.phase
        phase.peak_bytes = max(phase.peak_bytes, self._memory.now)
        if name not in COPIES:
            self._check_devices(name, operation.inputs)
        launch = launch_of(*operation)
        if launch is not None:
            self.add(launch)
            if launch.flops and made and made[0].dtype == torch.float64:
                self.note(f"{name} in fp64")
            if why := operations.WAIT_INSIDE.get(name):
                self.wait(why)
        elif operation.func.is_view or name in VIEWS:
            phase.views += 1

    def _check_devices(self, name: str, inputs: list[Tensor]) -> None:
        """Note operands on the CPU: an index is copied, which the host waits for, and so may be a
        scalar. Torch raises for all others."""
        for x in inputs:
            if x.device.type == "cpu" and x.dim() and name in TAKE_INDICES:
                self.wait("index on the CPU")
            elif x.device.type == "cpu" and not x.dim() and name not in operations.WITHOUT_KERNEL:
                self.note(f"scalar on the CPU in {name}")


def place() -> str:
    """Return the innermost place in Lather's code; in backward, autograd."""
    return next(places(), "backward: autograd")
