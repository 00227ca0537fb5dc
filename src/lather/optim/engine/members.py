"""Members of buckets: the part of a parameter on which this rank works.

A member has the same interface in all three cases: gradient and weight as tensors of one shape, and the tensor that an update changes.

    index ()         a parameter that is not spread over ranks, or this rank's whole part of one that is
    index (slices)   the rows of this rank's part that this rank owns
    index None       matrices that this rank owns and gathers: gradients arrive from other ranks, and updates are sent back to them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lather.optim.engine.matrix_layout import Layout
from lather.optim.engine.roster import ParamInfo
from lather.optim.sharded.owners import OwnedParameter
from lather.optim.sharded.placement import Index, local, local_grad


@dataclass(eq=False)
class Member:
    """One parameter in a bucket."""

    param: Tensor
    """Parameter as it was given to the optimizer."""
    layout: Layout
    """Layout of the part on which this rank works."""
    numbers: Sequence[int]
    """Numbers of the member's matrices among those of the whole parameter."""
    index: Index | None
    received: Tensor | None = None
    """Gathered gradient, during a step. This field and the next two are for `index` None only."""
    received_weight: Tensor | None = None
    """Gathered weight, if the update depends on it."""
    update: Tensor | None = None
    """Tensor into which the update is written before it is sent."""

    @property
    def device(self) -> torch.device:
        return self.param.device

    def grad(self) -> Tensor:
        """Return the gradient, which nobody may change."""
        if self.index is None:
            assert self.received is not None
            return self.received
        return local_grad(self.param)[self.index]

    def weight(self) -> Tensor:
        """Return the weight: a view of the parameter, or the gathered weight."""
        if self.index is None:
            assert self.received_weight is not None
            return self.received_weight
        return local(self.param)[self.index]

    def target(self) -> Tensor:
        """Return the tensor that an update changes: a view of the parameter, or the update that is to be sent."""
        return self.weight() if self.update is None else self.update


def member_of(one: ParamInfo, share: OwnedParameter | None) -> Member | None:
    """Return the member for this rank's work on a parameter, or None if it has none."""
    if share is None:
        return Member(one.param, one.layout, range(one.layout.batch), ())
    if not share.own:
        return None
    numbers = tuple(unit.number for unit in share.own)
    if share.in_place:
        index = share.region.within(share.spread.box)
        layout = one.layout.of_part(share.region.size, contiguous=local(one.param)[index].is_contiguous())
        return Member(one.param, layout, range(layout.batch) if share.elementwise else numbers, index)
    shape = one.layout.shape
    if one.layout.kind == "per_expert":
        shape = (len(numbers), *shape[1:])
    return Member(one.param, one.layout.of_part(shape), numbers, None)
