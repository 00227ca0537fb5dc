"""Rounds weights to the dtype of products once per step, not once for each product.

Under autocast every product rounds its weight: in forward and in backward, for every micro-batch.
Inside `RoundedWeights.caching`, which encloses the forward and backward passes of a step, the first
product caches the rounded weight and all others use it. The results have the same bits; the cache
takes 2 bytes per weight until the context ends or `forget` is called.

Only copies of `nn.Parameter`s are cached, with the parameter's version: a weight that has been
written to is rounded again. The version is not sufficient, because FSDP gathers into the same
parameters without increasing it; so copies must be dropped after a step, and when FSDP frees the
gathered weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lather.boxes import gradient_dtype
from lather.storages import tensors_in

T = TypeVar("T")


class RoundedWeights:
    """A cache of weights in the dtype of products."""

    def __init__(self) -> None:
        self._is_caching = False
        self._copies: dict[tuple[int, Hashable], tuple[Tensor, int, Any]] = {}
        """By id of the weight, and by dtype or conversion: the weight (a reference, so that its id
        is not reused), its version, and the copy, a tensor or a tuple of tensors."""

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Inside this context, copies are cached. A weight may only change there with a new
        version, or if `forget` is called for it."""
        before, self._is_caching = self._is_caching, True
        try:
            yield
        finally:
            self._is_caching = before
            if not before:
                self._copies.clear()

    def round(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight.to(dtype)`, for use without autograd."""
        if weight.dtype == dtype or not self.caches(weight):
            return weight.to(dtype)
        return self._cached(weight, dtype, lambda: weight.detach().to(dtype))

    def converted(self, weight: Tensor, convert: Callable[[Tensor], T]) -> T:
        """Return `convert(weight)`, a tuple of tensors, for use without autograd."""
        if not self.caches(weight):
            return convert(weight.detach())
        return self._cached(weight, convert, lambda: convert(weight.detach()))

    def _cached(self, weight: Tensor, how: Hashable, make: Callable[[], T]) -> T:
        key = id(weight), how
        cached = self._copies.get(key)
        if cached is None or cached[1] != weight._version:
            cached = self._copies[key] = (weight, weight._version, make())
        copy: T = cached[2]
        return copy

    def caches(self, weight: Tensor | None) -> bool:
        """Tell whether a copy of this weight would be cached now."""
        return self._is_caching and isinstance(weight, nn.Parameter)

    def in_backward(self, weight: Tensor | None, saved: Tensor | None) -> Any:
        """Return the weight if its copy is cached, else the tensor that autograd saved for it (with
        hooks this may be another object)."""
        return weight if self.caches(weight) else saved

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Drop the copies of these weights, whose values are freed or change."""
        dropped = {id(weight) for weight in weights}
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] not in dropped}

    def copies(self) -> list[Tensor]:
        return list(tensors_in([copy for _, _, copy in self._copies.values()]))


NO_CACHE = RoundedWeights()
"""Caches nothing: each product rounds its weight. `caching` is never called on it."""


class Rounding:
    """A module whose products round weights with the cache `self.rounded_weights`."""

    rounded_weights: RoundedWeights = NO_CACHE
    products_read: ClassVar[tuple[str, ...]] = ()
    """Names of its parameters that nothing but these products reads."""
    memory: str


def set_rounded_weights(module: nn.Module, cache: RoundedWeights) -> None:
    """Set the cache of rounded weights of every layer inside `module`."""
    for layer in module.modules():
        if isinstance(layer, Rounding):
            layer.rounded_weights = cache


def narrow_product_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights that only products read, which round them to this dtype anyway. Their
    gradients stay in the dtype that they had."""
    for p in product_weights([module]):
        of_gradients = gradient_dtype(p)
        p.data = p.data.to(dtype)
        if p.requires_grad:
            p.grad_dtype = of_gradients


def product_weights(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters inside the modules that only products read, which round them: they may
    be rounded before. A head that is also the embedding is not one of them."""
    of_products, others = set[nn.Parameter](), set[nn.Parameter]()
    for layer in (layer for module in modules for layer in module.modules()):
        names: tuple[str, ...] = ()
        if isinstance(layer, Rounding) and layer.memory != "reference":
            names = layer.products_read
        for name, p in layer.named_parameters(recurse=False):
            (of_products if name in names else others).add(p)
    return of_products - others
