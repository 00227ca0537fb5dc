"""A matrix of which no rank can keep the whole state from step to step: `ownership="replicated"`.

Every rank of its mesh keeps some rows of each entry of state. In a step the gradient and the rows are gathered, one parameter at a time;
all ranks compute the whole, each for itself and so with equal numbers; then a rank keeps its rows and changes what it has of the parameter.
What is kept is about 1/N; during its own step one parameter has all of its state on every rank, and nothing else's. The price is N times
the arithmetic, and that the whole state travels in every step. Ranks are taken to compute alike: on different devices or libraries they
might turn an eigenvector differently, and rows would no longer be those of one basis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lather.optim.engine.buckets import Bucket
from lather.optim.engine.members import Member
from lather.optim.engine.plan import apply_
from lather.optim.engine.roster import ParamInfo
from lather.optim.engine.state import compute_dtype, kept_entries
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit
from lather.optim.sharded.placement import Box, Spread, local, local_grad
from lather.optim.sharded.sharding import Sharding, Transfer


def initial_rows(one: ParamInfo) -> dict[str, Tensor]:
    """This rank's rows of every entry, `step` aside, as they are before the first step. No whole matrix is made."""
    assert one.spread is not None
    found = {}
    for name, entry in kept_entries(one.layout).items():
        box = one.spread.rows(entry.shape_in(one.layout)).box
        found[name] = torch.full(box.size, entry.initial or 0.0, dtype=entry.dtype, device=one.param.device)
        if entry.initial is None:
            found[name].diagonal(box.offset[-2], dim1=-2, dim2=-1).fill_(1)
    return found


class Gathered:
    """A parameter during its step: a bucket of its own with the whole state, the gradient and, where the rule needs them, the weights."""

    def __init__(self, one: ParamInfo, sharding: Sharding, rows: dict[str, Any]) -> None:
        """`rows`: this rank's rows of each entry. All ranks of the mesh call it together."""
        assert one.spread is not None
        spread, group, self._kept = one.spread, sharding.group_of(one.spread), list[tuple[Tensor, Tensor]]()

        def gather(part: Tensor, spread: Spread, out: Tensor) -> Tensor:
            """Put the parts of all ranks together, on all of them."""
            whole = Box.whole(spread.shape)
            units = [OwnedUnit(whole, position, position, spread.holders(whole)) for position in range(len(spread.ranks))]
            Transfer([OwnedParameter(spread, one.layout, tuple(units), elementwise=True, is_apart=True)], inward=True).move(
                [part], [out], group
            )
            return out

        member = Member(one.param, one.layout, range(one.layout.batch), None)
        grad, weight = local_grad(one.param), local(one.param)
        member.received = gather(grad, spread, grad.new_empty(spread.shape))
        member.received_weight = gather(weight, spread, weight.new_empty(spread.shape)) if one.needs_weights else None
        member.update = weight.new_empty(spread.shape, dtype=compute_dtype(one.rule))
        self.bucket = Bucket([member])
        self._changed, self._update = weight, member.update[spread.box.within(Box.whole(spread.shape))]
        for name, view in self.bucket.views[0].items():
            own = spread.rows(tuple(view.shape))
            gather(rows[name], own, view)
            self._kept.append((rows[name], view[own.box.within(Box.whole(own.shape))]))

    def keep(self, lr: float, decay: float) -> None:
        """The end of the step: this rank's rows of the new state, and its part of the parameter."""
        apply_([self._changed], [self._update], lr, decay)
        for rows, part in self._kept:
            rows.copy_(part)
