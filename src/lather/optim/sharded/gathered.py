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
from lather.optim.engine.state import KeptEntry, compute_dtype, kept_entries
from lather.optim.sharded.exchange import to_owners
from lather.optim.sharded.owners import Share, Unit
from lather.optim.sharded.placement import Box, Spread, local, local_grad, spread_on
from lather.optim.sharded.sharding import Sharding


def rows_of(one: ParamInfo, sharding: Sharding, shape: tuple[int, ...]) -> Spread:
    """Which rows of an entry of this shape each rank keeps."""
    mesh, placements = sharding.rows_of(one, shape)
    return spread_on(mesh, shape, placements)


def initial_rows(one: ParamInfo, sharding: Sharding) -> dict[str, Tensor]:
    """This rank's rows of every entry, `step` aside, as they are before the first step. No whole matrix is made."""
    found = {}
    for name, entry in kept_entries(one.layout).items():
        found[name] = _rows(entry, rows_of(one, sharding, entry.shape_in(one.layout)).box, one.param.device)
    return found


def _rows(entry: KeptEntry, box: Box, device: torch.device) -> Tensor:
    if entry.initial is not None:
        return torch.full(box.size, entry.initial, dtype=entry.dtype, device=device)
    rows = torch.zeros(box.size, dtype=entry.dtype, device=device)
    if rows.numel():
        rows.diagonal(box.offset[-2], dim1=-2, dim2=-1).fill_(1)
    return rows


class Gathered:
    """A parameter during its step: a bucket of its own with the whole state, the gradient and, where the rule needs them, the weights."""

    def __init__(self, one: ParamInfo, sharding: Sharding, rows: dict[str, Any]) -> None:
        """`rows`: this rank's of each entry. All ranks of the mesh call it together."""
        share = sharding.share_of(one.param)
        assert share is not None
        self.p, self.rows, self.spread = one.param, rows, share.spread
        self.process_group = sharding.group_of(share.spread.ranks)
        self.layout = one.layout
        member = Member(one.param, one.layout, range(one.layout.batch), None)
        member.received = self._whole(share.spread, local_grad(one.param))
        member.received_weight = self._whole(share.spread, local(one.param)) if one.needs_weights else None
        self.update = member.update = torch.empty(one.layout.shape, dtype=compute_dtype(one.rule), device=one.param.device)
        self.bucket = Bucket([member])
        self._boxes = {}
        for name, view in self.bucket.views[0].items():
            spread = rows_of(one, sharding, tuple(view.shape))
            self._boxes[name] = spread.box
            self._whole(spread, rows[name], view)

    def _whole(self, spread: Spread, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Put together of the parts of all ranks, on all of them."""
        box = Box.whole(spread.shape)
        holders = spread.holders(box)
        units = tuple(Unit(box, position, position, holders) for position in range(len(spread.ranks)))
        everybody = Share(spread, self.layout, units, elementwise=True, is_apart=True)
        out = torch.empty(spread.shape, dtype=part.dtype, device=part.device) if out is None else out
        arriving = to_owners([everybody]).launch(lambda _: part, part.dtype, part.device, self.process_group)
        for route, x in arriving.wait():
            out[route.where].copy_(x)
        return out

    def keep(self, lr: float, decay: float) -> None:
        """The end of the step: this rank's rows of the new state, and its part of the parameter."""
        whole = Box.whole(self.spread.shape)
        apply_([local(self.p)], [self.update[self.spread.box.within(whole)]], lr, decay)
        for name, view in self.bucket.views[0].items():
            self.rows[name].copy_(view[self._boxes[name].within(Box.whole(tuple(view.shape)))])
