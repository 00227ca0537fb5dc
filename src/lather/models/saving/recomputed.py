"""Recomputes tensors in backward from other tensors that autograd saves anyway, instead of saving
them.

It is meant for tensors that are cheap to compute and large to save: a norm's output (from its
input), the keys and values of latent attention (from the latent), the normalized and rotated heads
(from the projections). Unlike activation checkpointing, it recomputes only registered tensors and
builds no graph again. The same operations give the same values as in the forward pass (in compiled
parts, up to rounding).

`Recomputation` uses `torch.autograd.graph.saved_tensors_hooks`. Hooks that were active outside
still get all other tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lather.torch_private import Hooks, saved_tensors_hooks_in_force

Make = Callable[..., tuple[Tensor, ...]]
Key = tuple[torch.UntypedStorage, int, tuple[int, ...], tuple[int, ...]]


class Recomputation:
    """Registers the tensors to recompute; use it inside `watch`. With `enabled` False autograd
    saves everything."""

    def __init__(self, *, enabled: bool = True, warmed_up: set[Hashable] | None = None) -> None:
        """`warmed_up`: the recomputations that have run in a forward pass; any other runs in this
        pass too, and is added. None: no recomputation runs in a forward pass.

        Compiled parts need this: without autograd a function is compiled anew, and on CUDA backward
        runs in a thread of autograd, where the compiler's settings of this thread do not hold."""
        self.enabled = enabled
        self._warmed_up = warmed_up
        self._num_added = 0
        self._placeholders: dict[Key, Placeholder] = {}
        self._outer_hooks: Hooks = (_unchanged, _unchanged)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside this context, autograd does not save registered tensors."""
        if not self._is_active():
            yield
            return
        self._outer_hooks = saved_tensors_hooks_in_force() or (_unchanged, _unchanged)
        outer_pack, outer_unpack = self._outer_hooks
        placeholders = self._placeholders

        def pack(x: Tensor) -> Any:
            placeholder = placeholders.get(_key(x))
            return outer_pack(x) if placeholder is None else placeholder.count_use()

        def unpack(packed: Any) -> Tensor:
            return packed() if isinstance(packed, Placeholder) else outer_unpack(packed)

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            placeholders.clear()  # the hooks live as long as the graph; they need it no longer

    def _is_active(self) -> bool:
        return self.enabled and torch.is_grad_enabled()

    def add(self, tensors: tuple[Tensor, ...], make: Make, *sources: Tensor) -> None:
        """Register `tensors`, which `make(*sources)` recomputes. The sources should be tensors that
        autograd saves anyway, or registered themselves; then they are recomputed, too, once for all
        that need them.

        `make` runs in backward, without autograd, with the present state of autocast. Call this
        inside `watch`.
        """
        if not self._is_active():
            return
        kept = [self.keep(x) for x in sources]
        group = _Group(lambda: make(*(x() for x in kept)), tensors[0].device.type)
        if self._warmed_up is not None:
            self._num_added += 1
            key = (self._num_added, group.autocast, *((x.shape, x.dtype) for x in sources))
            if key not in self._warmed_up:
                self._warmed_up.add(key)
                with group.as_in_backward():
                    make(*(x.detach() for x in sources))
        self._register(tensors, group)

    def keep(self, x: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns x in backward: recomputed, if x is registered, or else as
        autograd keeps it. Call this inside `watch`."""
        if (placeholder := self.placeholder(x)) is not None:
            return placeholder.count_use()
        pack, unpack = self._outer_hooks
        return partial(unpack, pack(x.detach()))

    def given_again(self, tensors: tuple[Tensor, ...]) -> Given | None:
        """Register tensors that the caller makes again and gives to the result before backward;
        None if autograd saves everything. Call this inside `watch`."""
        if not self._is_active():
            return None
        given = Given(tensors[0].device.type)
        self._register(tensors, given)
        return given

    def _register(self, tensors: tuple[Tensor, ...], group: _Group) -> None:
        for number, x in enumerate(tensors):
            self._placeholders[_key(x)] = Placeholder(group, number)

    def placeholder(self, x: Tensor) -> Placeholder | None:
        """Return the placeholder of x, for other graphs that use x; None if x is not registered.
        Call this inside `watch`."""
        return self._placeholders.get(_key(x))


class _Group:
    """Tensors that are recomputed together, once; each is freed when it has been used as often as
    autograd would have saved it."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], device: str) -> None:
        self._make, self._device = make, device
        self.autocast: tuple[bool, torch.dtype] | None = None
        """Whether products were in another dtype when the group was registered, and in which."""
        if device != "meta":
            self.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.num_saved: Counter[int] = Counter()
        """How often autograd would have saved each tensor."""
        self._tensors: dict[int, Tensor] = {}
        self._num_left: Counter[int] = Counter()

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

    def use(self, number: int) -> Tensor:
        """Return the tensor with this number, recomputed if need be."""
        if number not in self._tensors:
            with self.as_in_backward():
                tensors = enumerate(self._make())
                self._tensors = {each: x for each, x in tensors if self.num_saved[each]}
            self._num_left = Counter(self.num_saved)
        self._num_left[number] -= 1
        return self._tensors[number] if self._num_left[number] else self._tensors.pop(number)


class Given(_Group):
    """Tensors that are not recomputed here, but given again before their first use in backward."""

    def __init__(self, device: str) -> None:
        given: list[tuple[Tensor, ...]] = []
        super().__init__(given.pop, device)
        self._given = given

    @property
    def is_needed(self) -> bool:
        """Whether autograd would have saved any of them."""
        return bool(self.num_saved.total())

    def give(self, tensors: tuple[Tensor, ...]) -> None:
        """Take the tensors that backward will use, in the order of their registration."""
        self._given[:] = [tensors]


class Placeholder:
    """Stands in autograd's graph for one tensor of a group."""

    def __init__(self, group: _Group, number: int) -> None:
        self._group, self._number = group, number

    @contextmanager
    def instead_of(self, x: Tensor) -> Iterator[None]:
        """Inside this context, every graph that would save x, or a detached x, saves this
        placeholder instead, which recomputes x.

        All these graphs have to run backward before any of their forward passes is repeated,
        because x is freed after its last use."""
        recomputation = Recomputation()
        with recomputation.watch():
            if torch.is_grad_enabled():
                recomputation._placeholders[_key(x)] = self
            yield

    def count_use(self) -> Placeholder:
        """Count one more use in backward; return this placeholder."""
        self._group.num_saved[self._number] += 1
        return self

    def __call__(self) -> Tensor:
        return self._group.use(self._number)


def _key(x: Tensor) -> Key:
    """Return a key that identifies a tensor; it keeps the storage alive, so that no other storage
    gets its address."""
    return x.untyped_storage(), int(x.storage_offset()), tuple(x.shape), x.stride()


def _unchanged(x: Tensor) -> Tensor:
    return x


NO_RECOMPUTATION = Recomputation(enabled=False)
"""Recomputes nothing: autograd saves everything."""
