"""Runs the real code on the stand-in device: `with StandInMode() as mode: ...` around work on
`mode.device`.

CPU operations run on real tensors. Tensors on the device are fake: an operation yields shape, dtype
and strides. Values that the host reads from them are assumed: numbers are finite, flags are not
set, and integers are those of `StandInMode.integers`. Operations of process groups complete at
once.

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
from lather.standin import device, operations
from lather.standin.functions import Functions, counted_compile, counted_triton
from lather.storages import tensors_in
from lather.torch_private import TorchDispatchMode, fake_tensors, fake_tensors_behave

SOURCE = os.path.dirname(lather.__file__) + os.sep
BESIDES = tuple(SOURCE + name for name in ("torch_private.py", "storages.py", "memory", "standin"))
"""Code that observes, and is left out of the places."""


class StandInMode(TorchDispatchMode):
    """The mode that the module docstring describes. Only one can use the device at a time."""

    def __init__(
        self,
        integers: Callable[[Tensor], Tensor] | None = None,
        trues: Callable[[Tensor], int] | None = None,
    ) -> None:
        """`integers`: the values of an integer tensor that the host reads; None: 1, 2, 3 and so on.
        `trues`: the number of true elements of a tensor of flags that determines the size of a
        result; None: all."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.standin()
        self.trues = trues or Tensor.numel
        self.integers = integers or (lambda x: torch.arange(1, x.numel() + 1).view(x.shape))
        self.fake, mode = fake_tensors()
        self._mode: Any = mode()
        self._pinned: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._around = ExitStack()

    def __enter__(self) -> Self:
        told = patch.multiple(device.module, waited=self.wait, peak=lambda: self.peak_bytes)
        unmarked = patch.object(
            Tensor, "record_stream", lambda x, stream: None
        )  # torch accepts only its own streams
        for context in (
            told,
            fake_tensors_behave(),
            counted_triton(self),
            counted_compile(self),
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

    # --- what a subclass is told ------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """Value of `max_memory_allocated` of the device."""
        return 0

    def wait(self, what: str) -> None:
        """Called when the host waits for the device."""

    def note(self, what: str) -> None:
        """Called for something remarkable, such as a slow path."""

    def launch(self, name: str, read: int, written: int, *, flops: int = 0) -> None:
        """Called when a kernel is launched that is not one of torch's operations."""

    def launch_triton(self, function: Any, tensors: Mapping[str, Tensor]) -> None:
        """Called when a Triton kernel is launched with these tensors, by the names of its
        parameters."""

    def entered(self, name: str) -> None:
        """Called when a `record_function` range begins."""

    def left(self) -> None:
        """Called when the innermost range ends."""

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on fake tensors."""
        return func(*args, **kwargs)

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
        """Called after an operation on the device with its `inputs` and its result `out`, which
        contains the tensors `made`."""

    # --- operations -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if (
            func is torch.ops.prim.device.default
        ):  # half of all operations, and none of the device's
            (x,) = args
            return torch.device("meta") if x.fake_mode.in_kernel_invocation else x.fake_device
        kwargs, name = dict(kwargs or {}), operations.name_of(func)
        if name == "_record_function_enter_new":
            self.entered(args[0])
        elif name == "_record_function_exit":
            self.left()
        made_here = torch.device(kwargs.get("device") or "cpu").type == self.device.type
        if not made_here and not any(isinstance(x, self.fake) for x in tensors_in([args, kwargs])):
            return self._on_cpu(func, name, args, kwargs)
        if name == "_local_scalar_dense":
            self.wait("item()")
            return self._values(args[0]).item()
        if name in operations.COPIES:
            return self._copied(func, name, args, kwargs)
        return self._run(func, name, args, kwargs)

    def _on_cpu(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if name == "is_pinned":
            return id(args[0].untyped_storage()) in self._pinned
        if name == "_pin_memory":
            pinned = args[0].clone()
            self._pinned[id(pinned.untyped_storage())] = pinned.untyped_storage()
            return pinned
        if name in operations.RANDOM and isinstance(args[0], Tensor):
            return args[0]  # random weights, whose values do not matter
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
            if not waits_not:
                self.wait("copy to the host")
            self.launch("copy to the host", operations.nbytes(source), 0)
            values = self._values(source)
            return (
                args[0].copy_(values)
                if name == "copy_"
                else values.to(kwargs.get("dtype") or source.dtype)
            )
        if not waits_not:
            self.wait("blocking copy to the device")
        elif id(source.untyped_storage()) not in self._pinned:
            self.wait("copy of pageable memory to the device")
        return self._run(func, name, args, kwargs)

    def _values(self, x: Tensor) -> Tensor:
        """Return the assumed values of a tensor that the host reads."""
        if x.dtype == torch.bool:
            return torch.full(x.shape, bool(getattr(x, "lather_truth", None)))
        return (
            torch.ones(x.shape, dtype=x.dtype)
            if x.is_floating_point()
            else self.integers(x).to(x.dtype)
        )

    def _run(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        operands: list[Any]
        operands, kwargs = operations.mapped(
            lambda x: x if isinstance(x, self.fake) else self._mode.from_tensor(x),
            (list(args), kwargs),
        )
        with self._mode:
            out = self._of_flags(name, operands)
            if out is None:
                out = self.run(operations.SHAPES.get(name) or func, operands, kwargs)
        made = list(tensors_in(out))
        for x in made:
            if x.dtype == torch.bool:
                x.lather_truth = operations.truth(func, name, operands)  # type: ignore[attr-defined]
        inputs = list(tensors_in([operands, kwargs]))
        if any(map(self.is_here, (*inputs, *made))):
            self.ran(func, name, operands, kwargs, inputs, made, out)
        return out

    def _of_flags(self, name: str, args: list[Any]) -> Any:
        """Return the result of an operation whose size depends on flags; replace masks in `args`
        that are indices by positions."""
        if name == "nonzero":
            return args[0].new_empty(self.trues(args[0]), args[0].dim(), dtype=torch.int64)
        if name in operations.TAKE_INDICES and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        ):
            args[1] = [one for x in args[1] for one in self._positions(x)]
        return None

    def _positions(self, index: Tensor | None) -> list[Tensor | None]:
        if index is None or index.dtype != torch.bool:
            return [index]
        count = self.trues(index)
        return [index.new_empty(count, dtype=torch.int64) for _ in range(index.dim())]


def places() -> Iterator[str]:
    """Yield "file:line function" of Lather's frames, innermost first, without code that
    observes."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(SOURCE) and not file.startswith(BESIDES):
            yield f"{file[len(SOURCE) :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
