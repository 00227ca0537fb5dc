"""Streams of a GPU for what happens to units of parameters beside the computation: gathers, and
sums of gradients over ranks. On a CPU the work is done at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lather.device import gpu_module, is_gpu
from lather.optim.batched.pinned import PinnedMemory


class SideStream:
    """A GPU's stream for work beside the computation; on a CPU the work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._module = gpu_module(device) if is_gpu(device) else None
        self._stream = self._module.Stream(device) if self._module else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Queue the work of the block behind all that the current stream has been given."""
        if self._module is None or self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def record(self) -> Any:
        """Return an event behind the work so far; None on a CPU."""
        return self._stream.record_event() if self._stream else None

    def record_in(self, event: Any) -> None:
        """Record a GPU's event behind the work so far."""
        assert self._stream is not None
        self._stream.record_event(event)

    def keep(self, x: Tensor) -> None:
        """Keep the memory of a tensor that is freed until the work so far is done."""
        if self._stream is not None:
            x.record_stream(self._stream)

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event of `record`."""
        if self._module is not None and event is not None:
            self._module.current_stream().wait_event(event)


class Reductions:
    """Sums of gradients over ranks; those of one unit are under way at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = SideStream(device)
        self._event: Any = None
        self._buffers: tuple[Tensor, ...] = ()

    @contextmanager
    def start(self, *buffers: Tensor) -> Iterator[None]:
        """Queue the work of the block, which needs the buffers, behind the current stream."""
        with self.stream.after_current():
            yield
            self._event, self._buffers = self.stream.record(), (*self._buffers, *buffers)

    def finish(self) -> None:
        """Make the current stream wait for the reductions, and free what they needed."""
        self.stream.wait(self._event)
        # the current stream allocated them, and may use their memory again once it waits
        self._event, self._buffers = None, ()

    def drop(self) -> None:
        """Free what reductions needed when they are done, if ever, without waiting for them."""
        for x in self._buffers:
            self.stream.keep(x)
        self._event, self._buffers = None, ()


class Streams:
    """The streams for what happens to units beside the computation, its device, and the memory of
    the host for frozen parameters, of which so many bytes are needed."""

    def __init__(self, device: torch.device, host_bytes: int = 0) -> None:
        self.device, self.host = device, PinnedMemory(host_bytes)
        self.gathers, self.reductions = SideStream(device), Reductions(device)
