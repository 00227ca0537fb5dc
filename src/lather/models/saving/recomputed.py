"""Recomputes tensors in backward from other tensors that autograd saves anyway, instead of saving
them.

It is meant for tensors that are cheap to compute and large to save: a norm's output (from its
input), the keys and values of latent attention (from the latent), the normalized and rotated heads
(from the projections). Unlike activation checkpointing, it recomputes only registered tensors and
builds no graph again. The same operations give the same values as in the forward pass (in compiled
parts, up to rounding).

`Remaking` uses `torch.autograd.graph.saved_tensors_hooks`. Hooks that were active outside still get
all other tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lather.torch_private import Hooks, saved_tensors_hooks_in_force

Make = Callable[..., tuple[Tensor, ...]]
Place = tuple[torch.UntypedStorage, int, tuple[int, ...], tuple[int, ...]]


class Remaking:
    """Registers the tensors to recompute; use it inside `watch`. With `enabled` False autograd
    saves everything."""

    def __init__(self, *, enabled: bool = True, warmed_up: set[Hashable] | None = None) -> None:
        """`warmed_up`: the recomputations that have run once in a forward pass; each one that has
        not runs in this pass too, and is added. None: none needs to.

        Compiled parts need this: without autograd a function is compiled anew, and on CUDA backward
        runs in a thread of autograd, where the compiler's settings of this thread do not hold."""
        self.enabled = enabled
        self._warmed_up = warmed_up
        self._num_added = 0
        self._again: dict[Place, Again] = {}
        self._hooks: Hooks = (_as_it_is, _as_it_is)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside this context, autograd does not save registered tensors."""
        if not self.enabled or not torch.is_grad_enabled():
            yield
            return
        self._hooks = pack_outside, unpack_outside = saved_tensors_hooks_in_force() or (
            _as_it_is,
            _as_it_is,
        )
        again = self._again

        def pack(x: Tensor) -> Any:
            made = again.get(_place(x))
            return pack_outside(x) if made is None else made.kept_once_more()

        def unpack(kept: Any) -> Tensor:
            return kept() if isinstance(kept, Again) else unpack_outside(kept)

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            again.clear()  # the hooks live as long as the graph, but the table is no longer needed

    def add(self, tensors: tuple[Tensor, ...], make: Make, *sources: Tensor) -> None:
        """Register `tensors`, which `make(*sources)` recomputes. The sources should be tensors that
        autograd saves anyway.

        `make` runs in backward, without autograd, with the present state of autocast. Call this
        inside `watch`.
        """
        if self.enabled and torch.is_grad_enabled():
            pack, unpack = self._hooks
            packed = [pack(x.detach()) for x in sources]
            group = _Group(lambda: make(*map(unpack, packed)), tensors[0].device.type)
            self._warm_up(group, make, sources)
            for number, x in enumerate(tensors):
                self._again[_place(x)] = Again(group, number)

    def _warm_up(self, group: _Group, make: Make, sources: tuple[Tensor, ...]) -> None:
        """Recompute the group now, unless the same has been done before."""
        if self._warmed_up is None:
            return
        self._num_added += 1
        key = (self._num_added, group.autocast, *((x.shape, x.dtype) for x in sources))
        if key not in self._warmed_up:
            self._warmed_up.add(key)
            with group.as_in_backward():
                make(*(x.detach() for x in sources))

    def norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return `norm(x)`, and register it to be recomputed from x."""
        y: Tensor = norm(x)
        self.add((y,), lambda x: (norm(x),), x)
        return y

    def again(self, x: Tensor) -> Again | None:
        """Return the object that recomputes x, for other graphs that use x; None if x is not
        registered. Call this inside `watch`."""
        return self._again.get(_place(x))


class _Group:
    """Tensors that are recomputed together, once; each is freed when it has been used as often as
    autograd would have saved it."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], device: str) -> None:
        self._make, self._device = make, device
        self.autocast = None if device == "meta" else _autocast(device)
        """Whether products were in another dtype when the group was registered, and in which."""
        self.uses: Counter[int] = Counter()
        self._made: dict[int, Tensor] = {}
        self._left: Counter[int] = Counter()

    @contextmanager
    def as_in_backward(self) -> Iterator[None]:
        """Inside this context the tensors are recomputed: without autograd, with the autocast of
        the registration."""
        with torch.no_grad():
            if self.autocast is None:
                yield
                return
            enabled, dtype = self.autocast
            with torch.autocast(self._device, dtype=dtype, enabled=enabled):
                yield

    def take(self, number: int) -> Tensor:
        if number not in self._made:
            with self.as_in_backward():
                self._made = {each: x for each, x in enumerate(self._make()) if self.uses[each]}
            self._left = Counter(self.uses)
        self._left[number] -= 1
        return self._made[number] if self._left[number] else self._made.pop(number)


class Again:
    """A placeholder in autograd's graph for one tensor of a group."""

    def __init__(self, group: _Group, number: int) -> None:
        self._group, self._number = group, number

    @contextmanager
    def instead_of(self, x: Tensor) -> Iterator[None]:
        """Inside this context, every graph that would save x, or a detached x, saves this
        placeholder instead, which recomputes x.

        All these graphs have to run backward before any of their forward passes is repeated,
        because x is freed after its last use."""
        remaking = Remaking()
        with remaking.watch():
            if torch.is_grad_enabled():
                remaking._again[_place(x)] = self
            yield

    def kept_once_more(self) -> Again:
        self._group.uses[self._number] += 1
        return self

    def __call__(self) -> Tensor:
        return self._group.take(self._number)


def _place(x: Tensor) -> Place:
    """Return a key that identifies a tensor; it keeps the storage alive, so that no other one takes
    its place."""
    return x.untyped_storage(), int(x.storage_offset()), tuple(x.shape), x.stride()


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _as_it_is(x: Tensor) -> Tensor:
    return x


NEVER = Remaking(enabled=False)
"""Recomputes nothing: autograd saves everything."""
