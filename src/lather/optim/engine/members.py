"""The part of a parameter that a bucket works on: all of it, the part that is here, or matrices that were put together here.

Three cases, one face: gradient and weight as tensors of one shape, and where an update goes.

    index ()         a plain parameter, or all that is here of one that is spread
    index (slices)   those rows of what is here that are this rank's to change
    index None       matrices that this rank owns: the gradient has arrived from their holders, the update will be sent back
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
    """The parameter, as the optimizer was given it."""
    layout: Layout
    """Layout of the part that is worked on here."""
    numbers: Sequence[int]
    """Numbers of its matrices among those of the whole parameter."""
    index: Index | None
    received: Tensor | None = None
    """The gradient, during a step; only of an owner, as are the next two."""
    received_weight: Tensor | None = None
    """The weight, where the update depends on it."""
    update: Tensor | None = None
    """Where the update is written."""

    @property
    def device(self) -> torch.device:
        return self.param.device

    def grad(self) -> Tensor:
        """The gradient, which is never to be changed."""
        if self.index is None:
            assert self.received is not None
            return self.received
        return local_grad(self.param)[self.index]

    def weight(self) -> Tensor:
        """The weight: the parameter itself, unless it was put together."""
        if self.index is None:
            assert self.received_weight is not None
            return self.received_weight
        return local(self.param)[self.index]

    def target(self) -> Tensor:
        """The tensor that a chunk's update changes: the parameter, or the place where the update is kept to be sent."""
        return self.weight() if self.update is None else self.update


def member_of(one: ParamInfo, share: OwnedParameter | None) -> Member | None:
    """This rank's work on a parameter; None if there is none."""
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
