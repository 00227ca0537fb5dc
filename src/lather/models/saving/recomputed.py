"""Tensors that autograd does not keep for backward because they are made again there, from others that it keeps anyway.

What is cheap to make and large to keep: a norm's output (from its input), the keys and values of latent attention (from the latent), the
rotated and normed heads (from the projections). It is less than activation checkpointing: only what is registered is made again, nothing
is run for the sake of its graph. The values are those of the forward pass, by the same operations (with compiled parts: within rounding).

`Remaking` stands on `torch.autograd.graph.saved_tensors_hooks`. Hooks that were in force outside see everything else, as without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lather.torch_private import Hooks, saved_tensors_hooks_in_force

Make = Callable[..., tuple[Tensor, ...]]
Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]


class Remaking:
    """Knows, inside `watch`, which tensors are made again. With `enabled` False autograd keeps everything."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._again: dict[Place, Again] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._hooks: Hooks = (_as_it_is, _as_it_is)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside the block autograd asks before it keeps a tensor."""
        if not self.enabled or not torch.is_grad_enabled():
            yield
            return
        self._hooks = pack_outside, unpack_outside = saved_tensors_hooks_in_force() or (_as_it_is, _as_it_is)
        again = self._again

        def pack(x: Tensor) -> Any:
            made = again.get(_place(x))
            return pack_outside(x) if made is None else made.kept_once_more()

        def unpack(kept: Any) -> Tensor:
            x: Tensor = kept() if isinstance(kept, Again) else unpack_outside(kept)
            return x

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            again.clear()  # the hooks live as long as the graph
            self._storages.clear()

    def add(self, tensors: tuple[Tensor, ...], make: Make, *sources: Tensor) -> None:
        """`make(*sources)` gives `tensors` again. The sources should be what autograd keeps anyway.

        It runs in backward, without autograd, under the autocast of this moment. To be called inside `watch`.
        """
        if self.enabled and torch.is_grad_enabled():
            pack, unpack = self._hooks
            packed = [pack(x.detach()) for x in sources]
            group = _Group(lambda: make(*map(unpack, packed)), tensors[0].device.type)
            for number, x in enumerate(tensors):
                self._enter(x, Again(group, number))

    def _enter(self, x: Tensor, again: Again) -> None:
        self._again[_place(x)] = again
        self._storages.append(x.untyped_storage())

    def norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        """`norm(x)`, which is made again from x."""
        y: Tensor = norm(x)
        self.add((y,), lambda x: (norm(x),), x)
        return y

    def again(self, x: Tensor) -> Again | None:
        """How x is made again, for other graphs that read it; None if it is not. To be called inside `watch`."""
        return self._again.get(_place(x))


class _Group:
    """Tensors that are made together, once, and go when each was taken as often as autograd would have kept it."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], device: str) -> None:
        self._make, self._context = make, _same_autocast(device)
        self.uses: Counter[int] = Counter()
        self._made: dict[int, Tensor] = {}
        self._left: Counter[int] = Counter()

    def take(self, number: int) -> Tensor:
        if number not in self._made:
            with torch.no_grad(), self._context():
                self._made = {each: x for each, x in enumerate(self._make()) if self.uses[each]}
            self._left = Counter(self.uses)
        self._left[number] -= 1
        return self._made[number] if self._left[number] else self._made.pop(number)


class Again:
    """Stands for one of a group in autograd's graph."""

    def __init__(self, group: _Group, number: int) -> None:
        self._group, self._number = group, number

    @contextmanager
    def instead_of(self, x: Tensor) -> Iterator[None]:
        """Inside the block it is kept in the place of x, the tensor that it makes again, by whatever graph reads x or a detached x.

        All graphs have to run backward before any of their forward passes is run again: x goes when each has had it.
        """
        remaking = Remaking()
        with remaking.watch():
            if torch.is_grad_enabled():
                remaking._enter(x, self)
            yield

    def kept_once_more(self) -> Again:
        self._group.uses[self._number] += 1
        return self

    def __call__(self) -> Tensor:
        return self._group.take(self._number)


def _place(x: Tensor) -> Place:
    """Tells tensors apart whose storages are alive."""
    return id(x.untyped_storage()), int(x.storage_offset()), tuple(x.shape), x.stride()


def _same_autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    if device == "meta":
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled)


def _as_it_is(x: Tensor) -> Tensor:
    return x


NEVER = Remaking(enabled=False)
"""Autograd keeps everything."""
