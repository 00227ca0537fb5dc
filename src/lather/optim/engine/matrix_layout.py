"""Layouts: how a parameter of any shape becomes a batch of matrices of equal shape, and which
tensors its optimizer state has.

    tensor      a parameter is one tensor
    per_expert  the leading dim of three or more is a batch of independent tensors (experts)
    stacked     three dims (b, m, n) are one matrix, merged along the smaller edge: (m, b*n) if n <=
                m, else (b*m, n)
    elements    the rule is elementwise: every element is a tensor of its own (a scalar), so that
                parameters of any shape share one batch

Users choose among the first three; `elements` follows from the rule. There is always a batch dim,
even if its size is 1.

The keys of a parameter's state are flat: `step`, and the entries that the rule names
(`Rule.state`). Statistics are at least fp32; moments and bases may be stored in bf16 to save
memory, and each chunk of them is then converted to fp32 for the computation.

Letters: B batch (experts, elements, or 1), n_i the size of inner dim i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lather.optim.plain import plain
from lather.optim.rule import Entry, Matrix, Rule

STEP_BYTES = torch.float32.itemsize

NORM = "norm"
"""Name of the entry that holds the Frobenius norm of a matrix at its first step (`keep_norm`)."""


@dataclass(frozen=True)
class KeptEntry:
    """One tensor of the optimizer state of a matrix, as it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float | None
    """Initial value; None: the identity matrix."""
    is_moment: bool

    def allocate(self, batch: int, device: torch.device) -> Tensor:
        """Return a stack (B, *shape) with the initial value."""
        size = (batch, *self.shape)
        if self.initial is not None:
            return torch.full(size, self.initial, dtype=self.dtype, device=device)
        return torch.eye(self.shape[-1], dtype=self.dtype, device=device).expand(size).clone()

    def shape_in(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of this entry in `optimizer.state[p]`: moments have the shape of the
        parameter, or for `stacked` that of the merged matrix, in whose eigenbases they are kept;
        all others lead with the number of experts for `per_expert`."""
        if self.is_moment:
            return layout.inner if layout.kind == "stacked" else layout.shape
        return (layout.batch, *self.shape) if layout.kind == "per_expert" else self.shape


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
    """Rule of these tensors: the rule of the group, or the one that it returns for them
    (`Rule.on`)."""
    num_dims: int = field(compare=False, repr=False)
    """Number of dims of the whole parameter."""

    @property
    def matrix(self) -> Matrix:
        """One of these tensors as an argument of the rule's methods; even for elements, `num_dims`
        is that of the parameter."""
        return Matrix(self.inner, self.num_dims)

    def of_part(self, shape: tuple[int, ...], *, contiguous: bool = True) -> Layout:
        """Return the layout of a part of the parameter: some of its experts, some rows of elements,
        or all of it."""
        if self.kind == "per_expert":
            return replace(self, shape=shape, batch=shape[0])
        if self.kind == "elements" and contiguous:
            return replace(self, shape=shape, batch=math.prod(shape))
        return (
            replace(self, kind="tensor", shape=shape, batch=1, inner=shape)
            if self.kind == "elements"
            else self
        )

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return tensors start to stop of a parameter-shaped `x` as (B, n_0, n_1, ...): a view,
        unless `stacked` or `elements` must copy."""
        if self.kind == "per_expert":
            return x[start:stop]
        if self.kind == "elements":
            return x.reshape(-1, 1)[start:stop]
        if self.kind == "stacked" and len(self.shape) == 3:
            columns = self.shape[2] <= self.shape[1]
            return (x.movedim(0, 1) if columns else x).reshape(1, *self.inner)
        return x.unsqueeze(0)

    def as_parameter(self, u: Tensor) -> Tensor:
        """Invert `as_batch`: return a view of `u` (B, ...) with the shape that `part` has for the
        same range."""
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

    @cached_property
    def has_experts(self) -> bool:
        """Whether the tensors are experts with bases of their own; experts without gradient keep
        their statistics."""
        return self.kind == "per_expert" and bool(self.dims)

    @cached_property
    def keeps_norm(self) -> bool:
        """Whether the update is the new weights, scaled to the norm that they had at the first step
        (`keep_norm`)."""
        return self.rule.keep_norm and len(self.inner) > 1

    @cached_property
    def entries(self) -> dict[str, KeptEntry]:
        """Entries of the state of the parameter by name, without `step`."""
        own = {**self.rule.state(self.matrix), **({NORM: Entry(())} if self.keeps_norm else {})}
        return {
            name: KeptEntry(
                entry.shape,
                self.rule.dtypes[entry.kind],
                entry.initial,
                entry.kind == "moment" or self.kind == "elements",
            )
            for name, entry in own.items()
        }

    def state_bytes(self, num_ranks: int = 1) -> int:
        """Return the bytes of state of the parameter, including the step counter; if `num_ranks`
        share its rows, those of the rank with the most."""
        total = STEP_BYTES
        for entry in self.entries.values():
            shape = entry.shape_in(self)
            rows = -(-shape[0] // num_ranks) if shape else 1
            total += rows * math.prod(shape[1:]) * entry.dtype.itemsize
        return total

    def check_state(self, state: Mapping[str, Any], what: str) -> None:
        """Raise ValueError unless `state` has the entries and shapes that a parameter of this
        layout has."""
        expected = {
            "step": (),
            **{key: entry.shape_in(self) for key, entry in self.entries.items()},
        }
        found = {
            key: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            for key, x in state.items()
        }
        step = state.get("step")
        if not isinstance(step, Tensor) and isinstance(plain(step), int | float):  # as in torch
            found["step"] = ()
        if found != expected:
            key = next(key for key in (*expected, *found) if expected.get(key) != found.get(key))
            raise ValueError(
                f"{what} has {key} {found.get(key, 'missing')}, expected "
                f"{expected.get(key, 'none')}: "
                "it belongs to another parameter or to other options; give the same parameters in "
                "the same order, with the same options"
            )


def rule_for_dtype(rule: Rule, dtype: torch.dtype) -> Rule:
    """Return the rule for parameters of this dtype: this rule, or the same one in fp64."""
    is_wide = rule.state_dtype is None and dtype == torch.float64
    return replace(rule, state_dtype=torch.float64) if is_wide else rule


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
            raise ValueError(
                f"matrix_layout='stacked' takes (experts, m, n), not {len(shape)} dims: use "
                "'per_expert', or 'tensor'"
            )
        if len(shape) == 3:
            b, m, n = shape
            inner = (m, b * n) if n <= m else (b * m, n)
    matrix = Matrix(inner, len(shape))
    own = rule.on(matrix)
    if own.elementwise and contiguous and 0 not in shape and not (own.keep_norm and len(inner) > 1):
        return Layout("elements", tuple(shape), math.prod(shape), (1,), (), own, len(shape))
    return Layout(kind, tuple(shape), batch, inner, own.dims(matrix), own, len(shape))
