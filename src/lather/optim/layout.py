"""How a parameter of any shape becomes a batch of tensors whose dims are preconditioned.

    tensor      a parameter is one tensor, with one Kronecker factor per dim
    per_expert  the leading dim of three or more is a batch of independent tensors (experts), each with factors of its own
    stacked     three dims (b, m, n) are one matrix, merged along the smaller edge: (m, b*n) if n <= m, else (b*m, n)
    elements    no dim has a factor: every element is a tensor of its own (a scalar), so that parameters of any shape share one batch

The first three are the user's choice; `elements` is found. The batch dim is always there, also when it has size one.

Letters: B batch (experts, elements, or 1), n_i the size of inner dim i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

MATRIX_LAYOUTS = ("tensor", "per_expert", "stacked")


@dataclass(frozen=True)
class Layout:
    """A parameter's view as a batch: `batch` tensors of shape `inner`, preconditioned on `factor_dims`."""

    kind: str
    """tensor, per_expert, stacked or elements."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    batch: int
    """Number of independent tensors in the parameter."""
    inner: tuple[int, ...]
    """Shape of each."""
    factor_dims: tuple[int, ...]
    """Inner dims that have a Kronecker factor, ascending."""

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Tensors start to stop of a parameter-shaped `x` as (B, n_0, n_1, ...): a view, except where stacking or `elements` must copy."""
        if self.kind == "per_expert":
            return x[start:stop]
        if self.kind == "elements":
            return x.reshape(-1, 1)[start:stop]
        if self.kind == "stacked" and len(self.shape) == 3:
            columns = self.shape[2] <= self.shape[1]
            return (x.movedim(0, 1) if columns else x).reshape(1, *self.inner)
        return x.unsqueeze(0)

    def as_parameter(self, u: Tensor) -> Tensor:
        """The inverse of `as_batch`, always a view of `u` (B, ...): in the shape that `part` gives for the same range."""
        if self.kind == "per_expert":
            return u
        if self.kind == "elements":
            return u.squeeze(-1)
        if self.kind == "stacked" and len(self.shape) == 3:
            b, m, n = self.shape
            return u.view(m, b, n).movedim(1, 0) if n <= m else u.view(b, m, n)
        return u.squeeze(0)

    def part(self, p: Tensor, start: int, stop: int) -> Tensor:
        """View of the parameter `p` that holds its tensors start to stop."""
        if self.kind == "per_expert":
            return p[start:stop]
        if self.kind == "elements":
            return p.view(-1)[start:stop]
        return p

    @property
    def moment_shape(self) -> tuple[int, ...]:
        """Shape under which moments are kept: the parameter's; for `stacked` the merged matrix's, in whose eigenbasis they live."""
        return self.inner if self.kind == "stacked" else self.shape

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dims of a factor, basis or eigenvalues: one of experts under `per_expert`, otherwise none."""
        return (self.batch,) if self.kind == "per_expert" else ()


def limits_whole_update(options: Mapping[str, Any]) -> bool:
    """Whether a group's options look at the update of a whole matrix, which therefore may not be taken to its elements."""
    return bool(options["max_update_rms"] > 0 or options.get("normalize_preconditioned_grads", False))


def layout_of(shape: tuple[int, ...], options: Mapping[str, Any], *, contiguous: bool = True) -> Layout:
    """The layout of a parameter under a group's `matrix_layout`, `max_precond_dim`, `precondition_1d` and its limits on the update.

    Raises:
        ValueError: `stacked` for more than three dims.
    """
    kind, batch, inner = options["matrix_layout"], 1, shape
    if kind == "per_expert":
        if len(shape) > 2:
            batch, inner = shape[0], shape[1:]
        else:
            kind = "tensor"
    elif kind == "stacked":
        if len(shape) > 3:
            raise ValueError(f"matrix_layout='stacked' takes (experts, m, n), not {len(shape)} dims: use 'per_expert', or 'tensor'")
        if len(shape) == 3:
            b, m, n = shape
            inner = (m, b * n) if n <= m else (b * m, n)
    empty = 0 in shape
    if empty or (len(shape) < 2 and not options["precondition_1d"]):
        factor_dims: tuple[int, ...] = ()
    else:
        factor_dims = tuple(dim for dim, n in enumerate(inner) if n <= options["max_precond_dim"])
    if not factor_dims and contiguous and not limits_whole_update(options) and not empty:
        return Layout("elements", tuple(shape), math.prod(shape), (1,), ())
    return Layout(kind, tuple(shape), batch, tuple(inner), factor_dims)
