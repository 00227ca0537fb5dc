"""The layout of a parameter, by its shape, its rule and the rule's `matrix_layout`: one of those in
`lather.optim.batched.matrix_layout`, or

    per_head    the rows of a matrix of attention, or its columns, are those of one head after the
                other, and every head is a matrix of its own

Source: "Muon Split" of GLM-5 (arXiv:2602.15763). A step of the whole matrix mixes heads, whose
gradients may differ much in size. The price: a basis knows nothing of what heads have in common,
and matrices are flat (a head has fewer rows than columns).

Letters: H heads, m rows, n columns, r rows of a head or c columns of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lather.optim.batched.formats import CODES, StateEntry, is_coded
from lather.optim.batched.matrix_layout import (
    ElementLayout,
    ExpertLayout,
    Layout,
    RowLayout,
    StackedLayout,
)
from lather.optim.rule import Matrix, Rule


class HeadLayout(Layout):
    """The rows of a parameter (H r, n) are H matrices (r, n). Entries of the state have the shape
    (H, ...), moments too."""

    batch_dim = 0
    is_joined = False

    def of_part(self, shape: tuple[int, ...], *, contiguous: bool = True) -> Layout:
        return replace(self, shape=shape, batch=shape[0] // self.inner[0])

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        return x.unflatten(0, (self.batch, self.inner[0]))[start:stop]

    def as_parameter(self, u: Tensor) -> Tensor:
        return u

    def part(self, p: Tensor, start: int, stop: int) -> Tensor:
        return self.as_batch(p, start, stop)

    def shape_of(self, entry: StateEntry) -> tuple[int, ...]:
        return self.batch, *entry.shape


class HeadColumnLayout(HeadLayout):
    """The columns of a parameter (m, H c) are H matrices (m, c)."""

    batch_dim = 1

    def of_part(self, shape: tuple[int, ...], *, contiguous: bool = True) -> Layout:
        return replace(self, shape=shape, batch=shape[1] // self.inner[1])

    def as_batch(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        return x.unflatten(1, (self.batch, self.inner[1])).movedim(1, 0)[start:stop]


def rule_for_dtype(rule: Rule, dtype: torch.dtype) -> Rule:
    """Return the rule for parameters of this dtype: the same rule, in fp64 for fp64 parameters
    unless it has a `state_dtype`, and with a `weight_rounding` for bf16 parameters alone."""
    if rule.state_dtype is None and dtype == torch.float64:
        rule = replace(rule, state_dtype=torch.float64)
    if rule.weight_rounding != "nearest" and dtype != torch.bfloat16:
        rule = replace(rule, weight_rounding="nearest")
    return rule


def layout_of(shape: tuple[int, ...], rule: Rule, *, contiguous: bool = True) -> Layout:
    """Return the layout of a parameter for a rule with its `matrix_layout`.

    Raises:
        ValueError: `stacked` for more than three dims; `per_head` for other than two, or for heads
            of a size that does not divide the parameter.
    """
    layout: type[Layout] = Layout
    batch, inner = 1, tuple(shape)
    if rule.matrix_layout == "per_expert" and len(shape) > 2:
        layout, batch, inner = ExpertLayout, shape[0], inner[1:]
    elif rule.matrix_layout == "stacked" and len(shape) > 3:
        raise ValueError(
            f"matrix_layout='stacked' takes (experts, m, n), not {len(shape)} dims: use "
            "'per_expert', or 'tensor'"
        )
    elif rule.matrix_layout == "stacked" and len(shape) == 3:
        b, m, n = shape
        layout, inner = StackedLayout, (m, b * n) if n <= m else (b * m, n)
    elif rule.matrix_layout == "per_head":
        layout, batch, inner = _heads_of(tuple(shape), rule)
    matrix = Matrix(inner, len(shape))
    rule = rule.on(matrix)
    is_controlled = rule.controls_matrices and len(inner) > 1
    is_8_bit = rule.elementwise and rule.dtypes["moment"] in CODES
    if is_8_bit and not is_coded(shape):
        rule, is_8_bit = replace(rule, state_dtype=torch.float32), False
    if rule.elementwise and contiguous and 0 not in shape and not is_controlled:
        if is_8_bit:
            rows = math.prod(shape[:-1])
            return RowLayout(tuple(shape), rows, tuple(shape[-1:]), (), rule, len(shape))
        return ElementLayout(tuple(shape), math.prod(shape), (1,), (), rule, len(shape))
    return layout(tuple(shape), batch, inner, rule.dims(matrix), rule, len(shape))


def _heads_of(shape: tuple[int, ...], rule: Rule) -> tuple[type[HeadLayout], int, tuple[int, ...]]:
    """Return the layout `per_head` of a parameter, with the number of its heads and their shape."""
    dim = 0 if rule.head_columns is None else 1
    what, size = ("rows", "columns")[dim], (rule.head_rows, rule.head_columns)[dim]
    assert size is not None
    if len(shape) != 2:
        raise ValueError(
            f"shape {shape} with matrix_layout='per_head': heads are rows or columns of a "
            "parameter of two dims; put it in a group with matrix_layout='tensor' or 'per_expert'"
        )
    if shape[dim] % size:
        raise ValueError(
            f"head_{what}={size} does not divide the {shape[dim]} {what} of shape {shape}: give "
            f"the number of {what} of a head, or put the parameter in a group with "
            "matrix_layout='tensor'"
        )
    inner = (*shape[:dim], size, *shape[dim + 1 :])
    return (HeadLayout, HeadColumnLayout)[dim], shape[dim] // size, inner
