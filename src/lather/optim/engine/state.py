"""The optimizer state of a parameter: names, shapes and dtypes of its entries.

The keys are flat: `step`, and the entries that the rule names (`Rule.state`). Statistics are at least fp32; moments and bases may be stored
in bf16 to save memory, and each chunk of them is then converted to fp32 for the computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lather.optim.engine.matrix_layout import Layout
from lather.optim.rule import Entry, Rule

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
        """Return the shape of this entry in `optimizer.state[p]`."""
        return layout.moment_shape if self.is_moment else (*layout.lead, *self.shape)


def compute_dtype(rule: Rule) -> torch.dtype:
    """Return the dtype of all arithmetic and of statistics: fp64 if moments or bases are, otherwise fp32."""
    return torch.float64 if torch.float64 in _kept_dtypes(rule) else torch.float32


def _kept_dtypes(rule: Rule) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of moments and of bases."""
    given = rule.state_dtype
    if isinstance(given, Mapping):
        return given.get("moments", torch.float32), given.get("bases", torch.float32)
    assert isinstance(given, torch.dtype)
    return given, given


def kept_entries(layout: Layout) -> dict[str, KeptEntry]:
    """Return the entries of the state of a parameter by name, without `step`."""
    moments, bases = _kept_dtypes(layout.rule)
    dtypes = {"moment": moments, "basis": bases, "statistic": compute_dtype(layout.rule)}
    entries, is_flat = layout.rule.state(layout.matrix), layout.kind == "elements"
    if layout.rule.keep_norm and len(layout.inner) > 1:
        entries = {**entries, NORM: Entry(())}
    return {
        name: KeptEntry(entry.shape, dtypes[entry.kind], entry.initial, entry.kind == "moment" or is_flat)
        for name, entry in entries.items()
    }


def layout_bytes(layout: Layout, num_ranks: int = 1) -> int:
    """Return the bytes of state of a parameter, including the step counter; if `num_ranks` share its rows, those of the rank with the
    most."""
    total = STEP_BYTES
    for entry in kept_entries(layout).values():
        shape = entry.shape_in(layout)
        rows = -(-shape[0] // num_ranks) if shape else 1
        total += rows * math.prod(shape[1:]) * entry.dtype.itemsize
    return total


def check_state(state: Mapping[str, Any], layout: Layout, what: str) -> None:
    """Raise ValueError unless `state` has the entries and shapes that a parameter of this layout has."""
    expected: dict[str, tuple[int, ...]] = {"step": ()}
    expected |= {key: entry.shape_in(layout) for key, entry in kept_entries(layout).items()}
    found = {key: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for key, x in state.items()}
    if found.get("step") in ("int", "float"):  # torch's optimizers accept numbers, too
        found["step"] = ()
    if found != expected:
        key = next(key for key in (*expected, *found) if expected.get(key) != found.get(key))
        raise ValueError(
            f"{what} has {key} {found.get(key, 'missing')}, expected {expected.get(key, 'none')}: "
            "it belongs to another parameter or to other options; give the same parameters in the same order, with the same options"
        )
