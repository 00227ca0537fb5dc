"""How a parameter of any shape becomes a batch of tensors whose dims are preconditioned.

Under `tensor` a parameter is one tensor (a batch of one) with one Kronecker factor per dim. Under `per_expert` the leading dim of a
parameter with three or more dims is a batch of independent tensors (experts), each with factors of its own. The batch dim is always
there, also when it has size one: batched products, QR and eigh then give a matrix the same bits alone as in company.

Letters: B batch (experts, or 1), n_i the size of inner dim i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

MATRIX_LAYOUTS = ("tensor", "per_expert")


@dataclass(frozen=True)
class Layout:
    """A parameter's view as a batch: `batch` tensors of shape `inner`, preconditioned on `factor_dims`."""

    shape: tuple[int, ...]
    """Shape of the parameter."""
    num_batch_dims: int
    """Leading dims of the parameter that are batch: 1 for a stack of experts, otherwise 0."""
    factor_dims: tuple[int, ...]
    """Inner dims that have a Kronecker factor, ascending."""

    @property
    def batch(self) -> int:
        return math.prod(self.shape[: self.num_batch_dims])

    @property
    def inner(self) -> tuple[int, ...]:
        return self.shape[self.num_batch_dims :]

    def as_batch(self, x: Tensor) -> Tensor:
        """View of a parameter-shaped `x` as (B, n_0, n_1, ...)."""
        return x if self.num_batch_dims else x.unsqueeze(0)

    def factor_shape(self, dim: int) -> tuple[int, ...]:
        """Shape under which the factor of inner dim `dim` is kept: (n, n), for experts (B, n, n)."""
        n = self.inner[dim]
        return (*self.shape[: self.num_batch_dims], n, n)

    def state_numel(self) -> int:
        """Elements of optimizer state: two moments, and a factor and a basis per preconditioned dim."""
        factors = sum(self.batch * self.inner[dim] ** 2 for dim in self.factor_dims)
        return 2 * (math.prod(self.shape) + factors)


def layout_of(shape: tuple[int, ...], options: Mapping[str, Any]) -> Layout:
    """The layout of a parameter of `shape` under a group's `matrix_layout`, `max_precond_dim` and `precondition_1d`."""
    num_batch_dims = 1 if options["matrix_layout"] == "per_expert" and len(shape) > 2 else 0
    inner = shape[num_batch_dims:]
    if 0 in shape or (len(shape) < 2 and not options["precondition_1d"]):
        factor_dims: tuple[int, ...] = ()
    else:
        factor_dims = tuple(dim for dim, n in enumerate(inner) if n <= options["max_precond_dim"])
    return Layout(tuple(shape), num_batch_dims, factor_dims)
