"""Counts what code asks of a GPU: `with Counter() as counter: ...` around work on the stand-in device.

    launches    kernels: every operation that is no view and makes no memory alone; every Triton kernel; a factorisation that CUDA's
                libraries do matrix by matrix once for each matrix (inside each there are more)
    bytes       read and written by those kernels, each tensor of a kernel once. Of gathers the rows that are read; of a Triton kernel what
                its source loads and stores, whole tensors
    flops       of products, attention and factorisations; causal masks save nothing here, elementwise work counts nothing
    waits       of the host for the device, each with the place in Lather: reads of values, blocking copies, copies of memory that is not
                pinned, synchronisation
    peak        the largest sum of bytes of tensors that are made inside the block, temporaries among them

by phase: the innermost `record_function` range whose name begins with "lather.". What the CPU does is done, on real tensors; what is read
from the device is made up: finite, no flag set, integers as `Counter.integers` says.

It is a count. No time follows from it: a kernel of 4 bytes and one of 4 GiB are one launch each.
"""

from __future__ import annotations

import os
import sys
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import lather
from lather.bench.launches import device, operations
from lather.bench.launches.functions import Functions, counted_compile, counted_triton, unmarked_for_streams
from lather.memory.live_bytes import PeakBytes
from lather.torch_private import TorchDispatchMode, fake_tensors, fake_tensors_behave

SOURCE = os.path.dirname(lather.__file__) + os.sep
BESIDES = (SOURCE + "bench", SOURCE + "torch_private.py", SOURCE + "memory")
"""What counts is not what is counted."""
OUTSIDE = "outside of Lather's ranges"
RANGES = "lather."
"""Beginning of the names of ranges that are phases."""


@dataclass
class Phase:
    """What one phase asked for."""

    launches: int = 0
    triton: int = 0
    """Of these, kernels of Lather's own."""
    views: int = 0
    """Operations without a kernel."""
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    host_waits: int = 0
    peak_bytes: int = 0
    """Largest sum while the phase ran of bytes that were made since counting began."""
    kernels: Tally[str] = field(default_factory=Tally)


class Counter(TorchDispatchMode):
    """See the head of this file. The device is for one counter at a time."""

    def __init__(self, integers: Callable[[Tensor], Tensor] | None = None) -> None:
        """`integers`: the values of an integer tensor that the host reads; None: 1, 2, 3 and so on."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.standin()
        self.integers = integers or (lambda x: torch.arange(1, x.numel() + 1).view(x.shape))
        self.phases: defaultdict[str, Phase] = defaultdict(Phase)
        self.waits: Tally[tuple[str, str]] = Tally()
        """(what, where) -> how often the host waited."""
        self.notes: Tally[str] = Tally()
        """Oddities: operands of two devices, unfused attention, products of fp64."""
        self.fake, mode = fake_tensors()
        self._mode: Any = mode()
        self._ranges: list[str] = []
        self._memory = PeakBytes(count_meta=False)
        self._pinned: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._around = ExitStack()

    def __enter__(self) -> Counter:
        device.module.waited, device.module.peak = self.wait, lambda: self.peak_bytes
        for context in (fake_tensors_behave(), counted_triton(self), counted_compile(self), unmarked_for_streams(), Functions(self)):
            self._around.enter_context(context)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        super().__exit__(kind, error, where)  # type: ignore[no-untyped-call]
        self._around.close()
        device.module.waited, device.module.peak = lambda what: None, lambda: 0

    def restart(self) -> None:
        """Forget all counts. Memory that exists by now counts for nothing from here on."""
        self.phases.clear()
        self.waits.clear()
        self.notes.clear()
        self._memory = PeakBytes(count_meta=False)

    @property
    def total(self) -> Phase:
        """All phases together."""
        sums = Phase()
        for phase in self.phases.values():
            for name in ("launches", "triton", "views", "bytes_read", "bytes_written", "flops", "host_waits"):
                setattr(sums, name, getattr(sums, name) + getattr(phase, name))
            sums.kernels.update(phase.kernels)
        sums.peak_bytes = self.peak_bytes
        return sums

    @property
    def peak_bytes(self) -> int:
        return max((phase.peak_bytes for phase in self.phases.values()), default=0)

    @property
    def phase(self) -> Phase:
        """The one that goes on."""
        return self.phases[next((name for name in reversed(self._ranges) if name.startswith(RANGES)), OUTSIDE)]

    def wait(self, what: str) -> None:
        """Note that the host waits here."""
        self.phase.host_waits += 1
        self.waits[what, place()] += 1

    def note(self, what: str) -> None:
        self.notes[f"{what} at {place()}"] += 1

    def launch(self, name: str, read: int, written: int, *, flops: int = 0, times: int = 1, triton: bool = False) -> None:
        """Count a kernel."""
        phase = self.phase
        phase.launches += times
        phase.triton += triton
        phase.kernels[name] += times
        phase.bytes_read += read
        phase.bytes_written += written
        phase.flops += flops

    def is_here(self, x: object) -> bool:
        """Whether x is a tensor on the device."""
        return isinstance(x, self.fake) and x.device.type == device.NAME

    # --- operations -------------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), operations.name_of(func)
        if name == "_record_function_enter_new":
            self._ranges.append(args[0])
        elif name == "_record_function_exit":
            self._ranges.pop()
        tensors = list(operations.tensors_in([args, kwargs]))
        made_here = torch.device(kwargs.get("device") or "cpu").type == device.NAME
        if not made_here and not any(isinstance(x, self.fake) for x in tensors):
            return self._on_cpu(func, name, args, kwargs)
        if name == "_local_scalar_dense":
            self.wait("item()")
            return self._values(args[0]).item()
        if name in operations.COPIES:
            return self._copied(func, name, args, kwargs)
        self._check_devices(name, tensors)
        return self._run(func, name, args, kwargs)

    def _on_cpu(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name == "is_pinned":
            return id(args[0].untyped_storage()) in self._pinned
        if name == "_pin_memory":
            pinned = args[0].clone()
            self._pinned[id(pinned.untyped_storage())] = pinned.untyped_storage()
            return pinned
        if name in operations.RANDOM and isinstance(args[0], Tensor):
            return args[0]  # weights that nobody will read
        return func(*args, **kwargs)

    def _copied(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """From here to the host, from the host to here, or neither."""
        source, to = (args[1], args[0].device) if name == "copy_" else (args[0], torch.device(kwargs.get("device") or args[0].device))
        waits_not = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        if self.is_here(source) == (to.type == device.NAME) or source.device.type == "meta":
            return self._run(func, name, args, kwargs)
        if self.is_here(source):
            if not waits_not:
                self.wait("copy to the host")
            self.launch("copy to the host", operations.nbytes(source), 0)
            values = self._values(source)
            return args[0].copy_(values) if name == "copy_" else values.to(kwargs.get("dtype") or source.dtype)
        if not waits_not:
            self.wait("blocking copy to the device")
        elif id(source.untyped_storage()) not in self._pinned:
            self.wait("copy of pageable memory to the device")
        return self._run(func, name, args, kwargs)

    def _values(self, x: Tensor) -> Tensor:
        """What the host is told of a tensor."""
        if x.dtype == torch.bool:
            return torch.full(x.shape, bool(getattr(x, "lather_truth", None)))
        return torch.ones(x.shape, dtype=x.dtype) if x.is_floating_point() else self.integers(x).to(x.dtype)

    def _check_devices(self, name: str, tensors: Sequence[Tensor]) -> None:
        """An index may be on the CPU: then it is copied first, and waited for. So may a scalar. Else torch raises."""
        for x in tensors:
            if x.device.type == "cpu" and x.dim() and name in operations.TAKE_INDICES:
                self.wait("index on the CPU")
            elif x.device.type == "cpu" and not x.dim() and name not in operations.WITHOUT_KERNEL:
                self.note(f"scalar on the CPU in {name}")

    def _run(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args, kwargs = operations.mapped(self._faked, (list(args), kwargs))
        with self._mode:
            shapes = operations.SHAPES.get(name)
            out = self._memory.observe(shapes or func, args, kwargs)
        made = list(operations.tensors_in(out))
        for x in made:
            if x.dtype == torch.bool:
                x.lather_truth = operations.truth(name, args)  # type: ignore[attr-defined]
        inputs = list(operations.tensors_in([args, kwargs]))
        if any(map(self.is_here, (*inputs, *made))):
            self._count(func, name, args, kwargs, inputs, made, out)
        return out

    def _faked(self, x: Tensor) -> Tensor:
        return x if isinstance(x, self.fake) else self._mode.from_tensor(x)

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor], made: list[Tensor], out: Any) -> None:
        phase = self.phase
        phase.peak_bytes = max(phase.peak_bytes, self._memory.now)
        if func.is_view or name in operations.VIEWS:
            phase.views += 1
        elif name not in operations.WITHOUT_KERNEL:
            read, written = operations.traffic(func, name, args, kwargs, inputs, made)
            formula = None if name.startswith(operations.ATTENTION) else flop_registry.get(func.overloadpacket)
            flops = formula(*args, **kwargs, out_val=out) if formula else operations.flops(name, args, out)
            times = operations.launches(name, args)
            self.launch(name, read, written, flops=flops, times=times)
            if flops and made and made[0].dtype == torch.float64:
                self.note(f"{name} in fp64")
            if why := operations.WAIT_INSIDE.get(name):
                self.wait(why)


def place() -> str:
    """Where Lather's own code is, from the innermost frame outward; in backward, what autograd runs."""
    return next(places(), f"backward: {_running_node()}")


def places() -> Iterator[str]:
    """ "file:line function" of Lather's frames, innermost first, without this folder's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(SOURCE) and not file.startswith(BESIDES):
            yield f"{file[len(SOURCE) :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]


def _running_node() -> str:
    return "autograd"
