"""Layouts: how a parameter of any shape becomes a batch of matrices of equal shape.

    tensor      a parameter is one tensor
    per_expert  the leading dim of three or more is a batch of independent tensors (experts)
    stacked     three dims (b, m, n) are one matrix, merged along the smaller edge: (m, b*n) if n <= m, else (b*m, n)
    elements    the rule is elementwise: every element is a tensor of its own (a scalar), so that parameters of any shape share one batch

Users choose among the first three; `elements` follows from the rule. There is always a batch dim, even if its size is 1.

Letters: B batch (experts, elements, or 1), n_i the size of inner dim i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from lather.optim.rule import Matrix, Rule


@dataclass(frozen=True)
class Layout:
    """A parameter viewed as a batch: `batch` tensors of shape `inner`, with bases on `dims`."""

    kind: str
    """tensor, per_expert, stacked or elements."""
    shape: tuple[int, ...]
    """Shape of the parameter, or of this rank's part of it."""
    batch: int
    """Number of independent tensors in it."""
    inner: tuple[int, ...]
    """Shape of each of these tensors."""
    dims: tuple[int, ...]
    """Inner dims that have a basis, ascending."""
    rule: Rule = field(compare=False, repr=False)
    """Rule of these tensors: the rule of the group, or the one that it returns for them (`Rule.on`)."""
    num_dims: int = field(compare=False, repr=False)
    """Number of dims of the whole parameter."""

    @property
    def matrix(self) -> Matrix:
        """One of these tensors as an argument of the rule's methods; even for elements, `num_dims` is that of the parameter."""
        return Matrix(self.inner, self.num_dims)

    def of_part(self, shape: tuple[int, ...], *, contiguous: bool = True) -> Layout:
        """Return the layout of a part of the parameter: some of its experts, some rows of elements, or all of it."""
        if self.kind == "per_expert":
            return replace(self, shape=shape, batch=shape[0])
        if self.kind == "elements" and contiguous:
            return replace(self, shape=shape, batch=math.prod(shape))
        return replace(self, kind="tensor", shape=shape, batch=1, inner=shape) if self.kind == "elements" else self

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return tensors start to stop of a parameter-shaped `x` as (B, n_0, n_1, ...): a view, unless `stacked` or `elements` must
        copy."""
        if self.kind == "per_expert":
            return x[start:stop]
        if self.kind == "elements":
            return x.reshape(-1, 1)[start:stop]
        if self.kind == "stacked" and len(self.shape) == 3:
            columns = self.shape[2] <= self.shape[1]
            return (x.movedim(0, 1) if columns else x).reshape(1, *self.inner)
        return x.unsqueeze(0)

    def as_parameter(self, u: Tensor) -> Tensor:
        """Invert `as_batch`: return a view of `u` (B, ...) with the shape that `part` has for the same range."""
        if self.kind == "per_expert":
            return u
        if self.kind == "elements":
            return u.squeeze(-1)
        if self.kind == "stacked" and len(self.shape) == 3:
            b, m, n = self.shape
            return u.view(m, b, n).movedim(1, 0) if n <= m else u.view(b, m, n)
        return u.squeeze(0)

    def part(self, p: Tensor, start: int, stop: int) -> Tensor:
        """Return the view of the parameter `p` that holds tensors start to stop."""
        if self.kind == "per_expert":
            return p[start:stop]
        if self.kind == "elements":
            return p.view(-1)[start:stop]
        return p

    @property
    def moment_shape(self) -> tuple[int, ...]:
        """Shape of moments: that of the parameter, or for `stacked` that of the merged matrix, in whose eigenbases they are kept."""
        return self.inner if self.kind == "stacked" else self.shape

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dims of all other entries: the number of experts for `per_expert`, otherwise none."""
        return (self.batch,) if self.kind == "per_expert" else ()


def layout_of(shape: tuple[int, ...], rule: Rule, *, contiguous: bool = True) -> Layout:
    """Return the layout of a parameter for a rule with its `matrix_layout`.

    Raises:
        ValueError: `stacked` for more than three dims.
    """
    kind, batch, inner = str(rule.matrix_layout), 1, tuple(shape)
    if kind == "per_expert":
        if len(shape) > 2:
            batch, inner = shape[0], inner[1:]
        else:
            kind = "tensor"
    elif kind == "stacked":
        if len(shape) > 3:
            raise ValueError(f"matrix_layout='stacked' takes (experts, m, n), not {len(shape)} dims: use 'per_expert', or 'tensor'")
        if len(shape) == 3:
            b, m, n = shape
            inner = (m, b * n) if n <= m else (b * m, n)
    matrix = Matrix(inner, len(shape))
    own = rule.on(matrix)
    if own.elementwise and contiguous and 0 not in shape and not (own.keep_norm and len(inner) > 1):
        return Layout("elements", tuple(shape), math.prod(shape), (1,), (), own, len(shape))
    return Layout(kind, tuple(shape), batch, inner, own.dims(matrix), own, len(shape))
