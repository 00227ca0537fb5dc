"""Runs the real code on the stand-in device: `with StandInMode() as mode: ...` around work on
`mode.device`.

CPU operations run on real tensors. Tensors on the device are fake: an operation yields shape, dtype
and strides. Values that the host reads from them (`lather.device.read`) are those of
`StandInMode.values_of`; code that reads values by another way raises RuntimeError. Operations of
process groups complete at once.

A subclass is notified of every operation (`ran`), kernel (`launch`), wait of the host (`wait`) and
remark (`note`), with the place in Lather.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import Tensor

import lather
from lather.device import Read
from lather.standin import device, operations
from lather.standin.functions import Functions, counted_compile, counted_triton
from lather.standin.operations import RanOperation
from lather.storages import tensors_in
from lather.torch_private import TorchDispatchMode, fake_tensors, fake_tensors_behave

SOURCE = os.path.dirname(lather.__file__) + os.sep
OBSERVERS = ("device.py", "torch_private.py", "storages.py", "memory", "standin")
BESIDES = tuple(SOURCE + name for name in OBSERVERS)
"""Code that observes, and is left out of the places."""


class StandInMode(TorchDispatchMode):
    """The mode that the module docstring describes. It has the device for itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.standin()
        self.fake, mode = fake_tensors()
        self._mode: Any = mode()
        self._pinned: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._around = ExitStack()

    def __enter__(self) -> Self:
        observed = patch.multiple(
            device.module,
            create=True,
            waited=self.wait,
            launched=self.launch,
            peak=lambda: self.peak_bytes,
            read=self._read,
            positions=self._positions_of,
            masked=self._masked,
        )
        # torch rejects the streams of the stand-in
        unmarked = patch.object(Tensor, "record_stream", lambda x, stream: None)
        for context in (
            observed,
            fake_tensors_behave(),
            counted_triton(self),
            counted_compile(),
            unmarked,
            Functions(self),
        ):
            self._around.enter_context(context)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._around.close()

    def is_here(self, x: object) -> bool:
        """Return whether x is a tensor on the device."""
        return isinstance(x, self.fake) and x.fake_device.type == self.device.type  # type: ignore[attr-defined]

    @property
    def pinned_bytes(self) -> int:
        """Pinned bytes of the host."""
        return sum(storage.nbytes() for storage in self._pinned.values())

    # --- notifications of a subclass --------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """Value of `max_memory_allocated` of the device."""
        return 0

    def wait(self, what: str) -> None:
        """Called when the host waits for the device."""

    def note(self, what: str) -> None:
        """Called for an oddity, for example a slow path."""

    def launch(self, name: str, read: int, written: int, *, flops: int = 0) -> None:
        """Called when a kernel is launched that is no operation of torch."""

    def launch_triton(self, function: Any, arguments: Mapping[str, Any]) -> None:
        """Called when a Triton kernel is launched with these arguments, by the names of its
        parameters."""

    def entered(self, name: str) -> None:
        """Called when a `record_function` range begins."""

    def left(self) -> None:
        """Called when the innermost range ends."""

    def values_of(self, x: Tensor, what: Read) -> Tensor:
        """Return the values that the host reads: numbers that are finite and the same on all ranks,
        and a row for each expert; no flag is true but `FINITE`."""
        if what is Read.SAME:
            return torch.tensor([1, -1])
        if x.dtype == torch.bool:
            return torch.full(x.shape, what is Read.FINITE)
        if what is Read.RANGE:
            return torch.zeros(x.shape, dtype=x.dtype)
        if x.is_floating_point():
            return torch.ones(x.shape, dtype=x.dtype)
        return torch.arange(1, x.numel() + 1, dtype=x.dtype).view(x.shape)

    def num_true(self, flags: Tensor, what: Read) -> int:
        """Return how many of these flags are true; they determine the size of a result."""
        return flags.numel()

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on fake tensors."""
        return func(*args, **kwargs)

    def ran(self, operation: RanOperation) -> None:
        """Called after an operation on the device."""

    # --- operations -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # half of all operations, and none of the device's
        if func is torch.ops.prim.device.default:
            (x,) = args
            return torch.device("meta") if x.fake_mode.in_kernel_invocation else x.fake_device
        kwargs, name = dict(kwargs or {}), operations.name_of(func)
        if name == "is_pinned":
            return id(args[0].untyped_storage()) in self._pinned
        if name == "_record_function_enter_new":
            self.entered(args[0])
        elif name == "_record_function_exit":
            self.left()
        to = torch.device(kwargs.get("device") or "cpu")
        if to.type != self.device.type and not any(
            isinstance(x, self.fake) for x in tensors_in([args, kwargs])
        ):
            return self._on_cpu(func, name, args, kwargs)
        if name in operations.READS or (name in operations.TAKE_INDICES and _is_masked(args[1])):
            raise _unseen("a value")
        if name in operations.COPIES:
            return self._copied(func, name, args, kwargs)
        return self._run(func, name, args, kwargs)

    def _on_cpu(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if kwargs.pop("pin_memory", None):  # the host may not have as much memory
            with self._mode:
                pinned = func(*args, **kwargs)
            self._pinned[id(pinned.untyped_storage())] = pinned.untyped_storage()
            return pinned
        if name == "_pin_memory":
            pinned = args[0].clone()
            self._pinned[id(pinned.untyped_storage())] = pinned.untyped_storage()
            return pinned
        if name in operations.RANDOM and isinstance(args[0], Tensor):
            return args[0]  # random weights, whose values do not matter
        if name == "empty_like" and args[0].is_meta:
            # nor does their memory: a stack of experts may be larger than the host's
            return torch.empty((), dtype=args[0].dtype).expand(args[0].shape)
        return func(*args, **kwargs)

    def _copied(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a copy, which may be from the device to the host, from the host to the device, or
        neither."""
        source, to = (
            (args[1], args[0].device)
            if name == "copy_"
            else (args[0], torch.device(kwargs.get("device") or args[0].device))
        )
        waits_not = kwargs.get("non_blocking", False) or (
            name == "copy_" and len(args) > 2 and args[2]
        )
        if self.is_here(source) == (to.type == self.device.type) or source.device.type == "meta":
            return self._run(func, name, args, kwargs)
        if self.is_here(source):
            if name != "copy_":
                raise _unseen("values")
            if not waits_not:
                self.wait("copy to the host")
            self.launch("copy to the host", operations.nbytes(source), 0)
            return args[0].zero_()  # stored, not read: the values do not matter
        if not waits_not:
            self.wait("blocking copy to the device")
        elif id(source.untyped_storage()) not in self._pinned:
            self.wait("copy of pageable memory to the device")
        return self._run(func, name, args, kwargs)

    def _read(self, x: Tensor, what: Read, wait: bool) -> Tensor:
        if wait:
            self.wait(f"reads {what.name}")
        if x.dim():
            self.launch("copy to the host", operations.nbytes(x), 0)
        return self.values_of(x, what).to(x.dtype)

    def _positions_of(self, flags: Tensor, what: Read) -> tuple[Tensor, ...]:
        self.wait(f"reads {what.name}")
        self.launch("nonzero", operations.nbytes(flags), 0)
        size = (self.num_true(flags, what), flags.dim())
        return flags.new_empty(size, dtype=torch.int64).unbind(1)

    def _masked(self, x: Tensor, flags: Tensor, what: Read) -> Tensor:
        self.wait(f"reads {what.name}")
        self.launch("masked", operations.nbytes(x), 0)
        return x.new_empty(self.num_true(flags, what))

    def _run(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        operands: list[Any]
        operands, kwargs = operations.mapped(
            lambda x: x if isinstance(x, self.fake) else self._mode.from_tensor(x),
            (list(args), kwargs),
        )
        with self._mode:
            out = self.run(operations.SHAPES.get(name) or func, operands, kwargs)
        made = list(tensors_in(out))
        inputs = list(tensors_in([operands, kwargs]))
        if any(map(self.is_here, (*inputs, *made))):
            self.ran(RanOperation(func, name, operands, kwargs, inputs, made, out))
        return out


def _is_masked(indices: Sequence[Tensor | None]) -> bool:
    """Return whether a mask is among the indices; the size of the result is then the number of its
    true elements."""
    return any(index is not None and index.dtype == torch.bool for index in indices)


def _unseen(what: str) -> RuntimeError:
    place = next(places(), "code outside of Lather")
    return RuntimeError(
        f"{place} reads {what} of the stand-in device, which has none: read them with "
        "lather.device.read"
    )


def places() -> Iterator[str]:
    """Yield "file:line function" of Lather's frames, innermost first, without code that
    observes."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(SOURCE) and not file.startswith(BESIDES):
            yield f"{file[len(SOURCE) :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
