"""Notices that experts have collapsed: that the router sends nearly all tokens to few of them.

A mixture of experts that starts from random weights passes through such a state within the first
tens of steps, and leaves it if the load is balanced strongly enough. So the first steps do not
count, and a block is called collapsed only if its load is uneven over two windows of steps in a
row. Trained weights may be used unevenly on narrow text without having collapsed: the blocks that
are uneven from their first window on do not count then.

Letters: L MoE blocks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SETTLED = 60
"""Steps from random weights that do not count, at most half of the run."""
WINDOW = 20
"""Steps over which loads are added up."""
LEAST_LOAD = 0.1
"""An expert with less of an even load is as good as unused."""
FEW = 1 / 16
"""Share of the experts of which less may be unused: of many experts, a few often are."""
MOST_LOAD = 3.0
"""An expert with more of an even load does too much of the work, where one expert of few can have
so much; of many experts one may have half of what is possible."""
LEAST_ROWS = 50
"""Rows of an even load below which a window says nothing."""
STRONG = 0.015
"""A coefficient of a block's balance loss that held small models of all families (docs/log.md)."""


def collapsed_blocks(load_LE: Tensor, num_experts_per_tok: int) -> list[int]:
    """Return the blocks, counted from 0, whose load is uneven. Loads are relative to an even
    one."""
    if load_LE.numel() == 0:
        return []
    num_experts = load_LE.shape[1]
    most = max(MOST_LOAD, num_experts / num_experts_per_tok / 2)
    is_idle_L = (load_LE < LEAST_LOAD).sum(1) >= max(1, FEW * num_experts)
    is_uneven_L = is_idle_L | (load_LE.amax(1) > most)
    return is_uneven_L.nonzero().flatten().tolist()


class ExpertWatch:
    """Watches the loads of a run, and speaks once."""

    def __init__(self, num_experts_per_tok: int, steps: int, *, is_trained: bool) -> None:
        """`steps`: the length of the run. `is_trained`: whether it starts from trained weights."""
        self.num_experts_per_tok, self.is_trained = num_experts_per_tok, is_trained
        self.first = 0 if is_trained else min(SETTLED, steps // 2)
        self.has_spoken = False
        self._counts_LE: Tensor | None = None
        self._num_steps = 0
        self._excused: set[int] | None = None if is_trained else set()
        self._before: set[int] = set()

    def saw(self, step: int, counts_LE: Tensor) -> tuple[int, float, float] | None:
        """Add the rows of a step (L, E). Return the first block that has collapsed, and its least
        and greatest load; None: none has, or an earlier step has returned one."""
        if self.has_spoken or step <= self.first or counts_LE.numel() == 0:
            return None
        if self._counts_LE is not None:
            counts_LE = self._counts_LE + counts_LE
        self._counts_LE, self._num_steps = counts_LE, self._num_steps + 1
        if self._num_steps < WINDOW:
            return None
        self._counts_LE, self._num_steps = None, 0
        counts_LE = counts_LE.double()
        even_L1 = counts_LE.mean(1, keepdim=True)
        load_LE = torch.where(even_L1 < LEAST_ROWS, torch.ones_like(counts_LE), counts_LE / even_L1)
        uneven = set(collapsed_blocks(load_LE, self.num_experts_per_tok))
        if self._excused is None:
            self._excused = uneven
        lasting, self._before = (uneven & self._before) - self._excused, uneven
        if not lasting:
            return None
        self.has_spoken = True
        block = min(lasting)
        return block, float(load_LE[block].min()), float(load_LE[block].max())


def remedy(coefficient: float) -> str:
    """Return the options that balance experts better than a balance loss with this coefficient."""
    stronger = STRONG if coefficient < STRONG / 1.5 else 3 * coefficient
    return (
        f"balance them more strongly with --moe.balance-coefficient {stronger:.3g} "
        f"(now {coefficient:.3g}), also when the run is resumed"
    )


def describe(block: int, steps: Sequence[int], least: float, most: float) -> str:
    """Return the sentence about a collapsed block with its extreme loads in these steps."""
    when = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return (
        f"the experts of MoE block {block} have collapsed: in {when} their loads "
        f"are between {least:.2f} and {most:.2f} of an even one"
    )
