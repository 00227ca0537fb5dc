"""Parameters whose state does not fit on one rank: `ownership="replicated"`.

Each of the N ranks of the mesh keeps some rows of each entry of the state, about 1/N of it. In a
step, one parameter after the other, the ranks gather the gradient and the rows, all compute the
whole update, and each then keeps its rows of the new state and changes its part of the parameter.
During that time every rank holds the whole state of one parameter. The price is N times the
arithmetic, and that all state is exchanged in every step. All ranks must compute the same results:
with different devices or libraries an eigenvector might change its sign on some ranks, and the rows
would no longer form one basis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lather.boxes import Box, local, local_grad
from lather.optim.batched.buckets import Bucket, States
from lather.optim.batched.plan import open_buckets
from lather.optim.batched.roster import ParamInfo
from lather.optim.sharded.exchange import GatheredMember, Transfer
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit
from lather.optim.sharded.placement import Spread
from lather.optim.sharded.sharding import Sharding


def initial_rows(one: ParamInfo) -> dict[str, Tensor]:
    """Return this rank's rows of the initial value of every entry, without `step`, and without
    creating a whole matrix."""
    assert one.spread is not None
    found = {}
    for name, entry in one.layout.entries.items():
        box = one.spread.rows(one.layout.shape_of(entry)).box
        found[name] = torch.full(
            box.size, entry.initial or 0.0, dtype=entry.dtype, device=one.param.device
        )
        if entry.initial is None:
            found[name].diagonal(box.offset[-2], dim1=-2, dim2=-1).fill_(1)
    return found


def check_rows(one: ParamInfo, state: dict[str, Any]) -> None:
    """Raise ValueError unless `state` has this rank's rows of every entry, and `step`."""
    assert one.spread is not None
    expected: dict[str, object] = {"step": ()}
    for name, entry in one.layout.entries.items():
        expected[name] = one.spread.rows(one.layout.shape_of(entry)).box.size
    found = {name: tuple(getattr(x, "shape", ())) for name, x in state.items()}
    if found != expected:
        key = next(key for key in (*expected, *found) if expected.get(key) != found.get(key))
        raise ValueError(
            f"the state of a parameter of shape {one.spread.shape} has {key} "
            f"{found.get(key, 'missing')} "
            f"on this rank, expected {expected.get(key, 'none')}: give it this rank's rows, or "
            "delete "
            "the state of the parameter, which then begins again"
        )


class Gathered:
    """A parameter during its step: a separate bucket with the whole state, the gradient and, if the
    rule needs them, the weights."""

    def __init__(self, one: ParamInfo, sharding: Sharding, rows: dict[str, Any]) -> None:
        """Gather the parameter. `rows`: this rank's rows of each entry. All ranks of the mesh call
        this together."""
        assert one.spread is not None
        spread, group, self._kept = (
            one.spread,
            sharding.group_of(one.spread),
            list[tuple[Tensor, Tensor]](),
        )

        def gather(part: Tensor, spread: Spread, out: Tensor) -> Tensor:
            """Gather the parts of all ranks into `out`, on every rank."""
            whole = Box.whole(spread.shape)
            holders = spread.holders(whole)
            units = [
                OwnedUnit(whole, position, position, holders)
                for position in range(len(spread.ranks))
            ]
            Transfer(
                [OwnedParameter(spread, one.layout, tuple(units), is_apart=True)], inward=True
            ).move([part], [out], group)
            return out

        member = GatheredMember(one.param, one.layout, range(one.layout.batch))
        grad, weight = local_grad(one.param), local(one.param)
        member.received = gather(grad, spread, grad.new_empty(spread.shape))
        member.received_weight = (
            gather(weight, spread, weight.new_empty(spread.shape)) if one.needs_weights else None
        )
        member.update = weight.new_empty(spread.shape, dtype=one.rule.compute_dtype)
        self.bucket = Bucket([member])
        self.state: States = {one.param: self.bucket.allocate()[0]}
        """The whole state, without `step`."""
        self.weight = weight
        """This rank's part of the parameter."""
        self.update = member.update[spread.box.within(Box.whole(spread.shape))]
        """The update of this part, after the update phase."""
        for name, view in self.state[one.param].items():
            own = spread.rows(tuple(view.shape))
            gather(rows[name], own, view)
            self._kept.append((rows[name], view[own.box.within(Box.whole(own.shape))]))
        open_buckets([self.bucket], self.state)

    def keep(self) -> None:
        """Store this rank's rows of the new state."""
        for rows, part in self._kept:
            rows.copy_(part)
