"""What the optimizer keeps per parameter: names, shapes and dtypes, and the batched form in which a rule sees it.

Flat keys: `step`, `exp_avg`, `exp_avg_sq`, and for each inner dim i with a factor `factor_i`, `basis_i` and, for the KL rules,
`eigenvalues_i`. Factors and eigenvalues are at least fp32; moments and bases may be kept in bf16 to save memory and are then widened
for the computation, chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lather.optim.kronecker import Factors
from lather.optim.layout import Layout

STEP_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class Entry:
    """One tensor of state, per matrix of the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None
    """Its value before the first step; None: the identity matrix."""

    def allocate(self, batch: int, device: torch.device) -> Tensor:
        """A stack (B, *shape) with the initial value."""
        size = (batch, *self.shape)
        if self.fill is not None:
            return torch.full(size, self.fill, dtype=self.dtype, device=device)
        return torch.eye(self.shape[-1], dtype=self.dtype, device=device).expand(size).clone()


def compute_dtype(options: Mapping[str, Any]) -> torch.dtype:
    """dtype of all arithmetic, of factors and of eigenvalues: fp64 if any state is, else fp32."""
    return torch.float64 if torch.float64 in _kept_dtypes(options) else torch.float32


def _kept_dtypes(options: Mapping[str, Any]) -> tuple[torch.dtype, torch.dtype]:
    """dtypes of moments and of bases."""
    given = options["state_dtype"]
    if isinstance(given, torch.dtype):
        return given, given
    return given.get("moments", torch.float32), given.get("bases", torch.float32)


def state_entries(layout: Layout, options: Mapping[str, Any]) -> dict[str, Entry]:
    """Name -> entry of the state of a parameter, `step` aside."""
    moments, bases = _kept_dtypes(options)
    wide = compute_dtype(options)
    entries = {"exp_avg": Entry(layout.inner, moments, 0.0), "exp_avg_sq": Entry(layout.inner, moments, 0.0)}
    for dim in layout.factor_dims:
        n = layout.inner[dim]
        entries[f"factor_{dim}"] = Entry((n, n), wide, 0.0)
        entries[f"basis_{dim}"] = Entry((n, n), bases, None)
        if "initial_eigenvalue" in options:
            entries[f"eigenvalues_{dim}"] = Entry((n,), wide, float(options["initial_eigenvalue"]))
    return entries


def kept_shape(name: str, entry: Entry, layout: Layout) -> tuple[int, ...]:
    """Shape of `optimizer.state[p][name]`."""
    return layout.moment_shape if name.startswith("exp_avg") else (*layout.lead, *entry.shape)


def layout_bytes(layout: Layout, options: Mapping[str, Any], num_ranks: int = 1) -> int:
    """Bytes of state of a parameter, the step counter included; if its rows are cut among ranks, of the one that has most."""
    total = STEP_BYTES
    for name, entry in state_entries(layout, options).items():
        shape = kept_shape(name, entry, layout)
        rows = -(-shape[0] // num_ranks) if shape else 1
        total += rows * math.prod(shape[1:]) * entry.dtype.itemsize
    return total


@dataclass(frozen=True)
class StatePiece:
    """What a rank keeps of an entry of a parameter's state."""

    param: Tensor
    """As the optimizer was given it."""
    key: str
    """`step`, `exp_avg`, `factor_0`, ..."""
    value: Tensor
    """A live view: to copy into it is to load it."""
    offset: tuple[int, ...]
    """Of `value` in the whole entry."""
    shape: tuple[int, ...]
    """Of the whole entry."""


@dataclass
class MatrixState:
    """The state of a batch of equal tensors in the dtype of computation; a rule changes it in place."""

    step: int
    """t: 1 at the first gradient."""
    exp_avg: Tensor
    """(B, n_0, n_1, ...), as is exp_avg_sq."""
    exp_avg_sq: Tensor
    factors: Factors
    """Inner dim i -> (B, n_i, n_i), as are the bases."""
    bases: Factors
    eigenvalues: Factors = field(default_factory=dict)
    """Inner dim i -> (B, n_i); empty for rules without."""
    active: Tensor | None = None
    """Indices of the batch entries whose factors change in this step; None: all. An expert without tokens is left out."""


def matrix_state(stack: Mapping[str, Tensor], step: int, dtype: torch.dtype, active: Tensor | None = None) -> MatrixState:
    """A rule's view of (a slice of) stacked state. Entries of another dtype are copies: `write_back` returns them."""
    wide = {name: x.to(dtype) for name, x in stack.items()}

    def by_dim(prefix: str) -> Factors:
        return {int(name.removeprefix(prefix)): x for name, x in wide.items() if name.startswith(prefix)}

    by_name = {"factors": by_dim("factor_"), "bases": by_dim("basis_"), "eigenvalues": by_dim("eigenvalues_")}
    return MatrixState(step, wide["exp_avg"], wide["exp_avg_sq"], **by_name, active=active)


def write_back(state: MatrixState, stack: Mapping[str, Tensor]) -> None:
    """Round what `matrix_state` had widened into the kept tensors."""
    for name, x in _named(state):
        if stack[name] is not x and stack[name].dtype != x.dtype:
            stack[name].copy_(x)


def _named(state: MatrixState) -> Iterator[tuple[str, Tensor]]:
    yield "exp_avg", state.exp_avg
    yield "exp_avg_sq", state.exp_avg_sq
    for prefix, tensors in (("factor_", state.factors), ("basis_", state.bases), ("eigenvalues_", state.eigenvalues)):
        for dim, x in tensors.items():
            yield f"{prefix}{dim}", x
