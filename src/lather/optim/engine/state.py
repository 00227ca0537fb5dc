"""State that the optimizer keeps per parameter: names, shapes and dtypes.

Flat keys: `step`, and what the rule names (`Rule.state`). Statistics are at least fp32; moments and bases may be kept in bf16 to save
memory and are then widened for the computation, chunk by chunk.
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
"""Entry of the Frobenius norm that a matrix had at its first step, where a rule keeps it (`keep_norm`)."""


@dataclass(frozen=True)
class KeptEntry:
    """One tensor of state, per matrix of the batch, as it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float | None
    """Initial value; None: the identity matrix."""
    is_moment: bool

    def allocate(self, batch: int, device: torch.device) -> Tensor:
        """A stack (B, *shape) with the initial value."""
        size = (batch, *self.shape)
        if self.initial is not None:
            return torch.full(size, self.initial, dtype=self.dtype, device=device)
        return torch.eye(self.shape[-1], dtype=self.dtype, device=device).expand(size).clone()

    def shape_in(self, layout: Layout) -> tuple[int, ...]:
        """Shape of this entry in `optimizer.state[p]`."""
        return layout.moment_shape if self.is_moment else (*layout.lead, *self.shape)


def compute_dtype(rule: Rule) -> torch.dtype:
    """dtype of all arithmetic and of statistics: fp64 if any state is, else fp32."""
    return torch.float64 if torch.float64 in _kept_dtypes(rule) else torch.float32


def _kept_dtypes(rule: Rule) -> tuple[torch.dtype, torch.dtype]:
    """dtypes of moments and of bases."""
    given = rule.state_dtype
    if isinstance(given, Mapping):
        return given.get("moments", torch.float32), given.get("bases", torch.float32)
    assert isinstance(given, torch.dtype)
    return given, given


def kept_entries(layout: Layout) -> dict[str, KeptEntry]:
    """Name -> entry of the state of a parameter, `step` aside."""
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
    """Bytes of state of a parameter, the step counter included; if its rows are cut among ranks, of the one that has most."""
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
    if found.get("step") in ("int", "float"):  # as torch's optimizers take it
        found["step"] = ()
    if found != expected:
        key = next(key for key in (*expected, *found) if expected.get(key) != found.get(key))
        raise ValueError(
            f"{what} has {key} {found.get(key, 'missing')}, expected {expected.get(key, 'none')}: "
            "it belongs to another parameter or to other options; give the parameters in the same order and options as when it was made"
        )


@dataclass(frozen=True)
class StatePiece:
    """The part that a rank keeps of an entry of a parameter's state."""

    param: Tensor
    """The parameter, as the optimizer was given it."""
    key: str
    """Name of the entry: `step`, `exp_avg`, `factor_0`, ..."""
    value: Tensor
    """A live view: to copy into it is to load it."""
    offset: tuple[int, ...]
    """Offset of `value` in the whole entry."""
    shape: tuple[int, ...]
    """Shape of the whole entry."""
