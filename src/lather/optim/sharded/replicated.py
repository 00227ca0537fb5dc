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

from torch import Tensor

from lather.boxes import Box, local, local_grad
from lather.optim.batched.buckets import Bucket, States
from lather.optim.batched.plan import open_buckets
from lather.optim.batched.remainders import REMAINDER, exact_weight
from lather.optim.batched.roster import ParamInfo
from lather.optim.sharded.exchange import AssembledMember, Transfer
from lather.optim.sharded.owners import OwnedParameter, OwnedUnit
from lather.optim.sharded.placement import Spread
from lather.optim.sharded.sharding import Sharding


def initial_rows(info: ParamInfo) -> dict[str, Tensor]:
    """Return this rank's rows of the initial value of every entry, without `step`."""
    assert info.spread is not None
    layout, rows = info.layout, dict[str, Tensor]()
    for form in layout.formats.values():
        for name, x in form.allocate(layout.batch, info.param.device).items():
            shape = layout.shape_of(layout.entries[name])
            box = info.spread.rows(shape).box
            rows[name] = x.view(shape)[box.within(Box.whole(shape))].clone()
    return rows


def check_rows(info: ParamInfo, state: dict[str, Any]) -> None:
    """Raise ValueError unless `state` has this rank's rows of every entry, and `step`."""
    assert info.spread is not None
    expected: dict[str, object] = {"step": ()}
    for name, entry in info.layout.stored_in(state).items():
        expected[name] = info.spread.rows(info.layout.shape_of(entry)).box.size
    parts = ((name, x) for name, x in state.items() if name != REMAINDER)
    shapes = {name: tuple(getattr(x, "shape", ())) for name, x in parts}
    if shapes != expected:
        key = next(key for key in (*expected, *shapes) if expected.get(key) != shapes.get(key))
        raise ValueError(
            f"the state of a parameter of shape {info.spread.shape} has {key} "
            f"{shapes.get(key, 'missing')} on this rank, expected {expected.get(key, 'none')}: "
            "give it this rank's rows, or delete the state of the parameter, which then begins "
            "again"
        )


class ReplicatedStep:
    """A parameter during its step: a separate bucket with the whole state, the gradient and, if the
    rule needs them, the weights."""

    def __init__(self, info: ParamInfo, sharding: Sharding, rows: dict[str, Any]) -> None:
        """Gather the parameter. `rows`: this rank's rows of each entry. All ranks of the mesh call
        this together."""
        assert info.spread is not None
        spread, group = info.spread, sharding.group_of(info.spread)
        self._rows: list[tuple[Tensor, Tensor]] = []
        """This rank's rows of each entry, and the view of the whole entry that is copied there."""

        def gather(part: Tensor, spread: Spread, whole: Tensor) -> Tensor:
            """Gather the parts of all ranks into `whole`, on every rank; return this rank's part
            of it."""
            box = Box.whole(spread.shape)
            holders = spread.holders(box)
            units = tuple(
                OwnedUnit(box, position, position, holders) for position in range(len(spread.ranks))
            )
            share = OwnedParameter(spread, info.layout, units, is_separate=True)
            Transfer([share], inward=True).move([part], [whole], group)
            return whole[spread.box.within(box)]

        member = AssembledMember(info.param, info.layout, range(info.layout.batch))
        grad, self.weight = local_grad(info.param), local(info.param)
        member.received = grad.new_empty(spread.shape)
        gather(grad, spread, member.received)
        if info.needs_weights:
            weight = exact_weight(info.param, rows)
            member.received_weight = weight.new_empty(spread.shape)
            gather(weight, spread, member.received_weight)
        member.update = self.weight.new_empty(spread.shape, dtype=info.rule.compute_dtype)
        self.bucket = Bucket([member])
        self.state: States = {info.param: self.bucket.allocate()[0]}
        """The whole state, without `step`."""
        self.update = member.update[spread.box.within(Box.whole(spread.shape))]
        """The update of this rank's part of the parameter, `weight`, after the update phase."""
        for name, view in self.state[info.param].items():
            part = gather(rows[name], spread.rows(tuple(view.shape)), view)
            self._rows.append((rows[name], part))
        open_buckets([self.bucket], self.state)

    def keep(self) -> None:
        """Store this rank's rows of the new state."""
        for rows, part in self._rows:
            rows.copy_(part)
