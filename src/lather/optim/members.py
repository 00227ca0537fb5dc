"""What a bucket works on of a parameter: all of it, the part that is here, or matrices that were put together here.

Three cases, one face: gradient and weight as tensors of one shape, and where an update goes.

    index ()         a plain parameter, or all that is here of one that is spread
    index (slices)   those rows of what is here that are this rank's to change
    index None       matrices that this rank owns: the gradient has arrived from their holders, the update will be sent back
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lather.optim.layout import Layout, layout_of, limits_whole_update
from lather.optim.owners import Share
from lather.optim.placement import Index, local


@dataclass(eq=False)
class Member:
    """One parameter in a bucket."""

    param: Tensor
    """As the optimizer was given it."""
    group: dict[str, Any]
    layout: Layout
    """Of what is worked on here."""
    numbers: Sequence[int]
    """Of its matrices, among those of the whole parameter."""
    index: Index | None
    received: Tensor | None = None
    """The gradient, during a step; only of an owner, as are the next two."""
    received_weight: Tensor | None = None
    """The weight, where weight decay is part of the gradient."""
    update: Tensor | None = None
    """Where the update is written."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.param.dtype

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def is_contiguous(self) -> bool:
        return self.index is None or self.weight().is_contiguous()

    def grad(self) -> Tensor:
        """Never to be changed."""
        if self.index is None:
            assert self.received is not None
            return self.received
        return local_grad(self.param)[self.index]

    def weight(self) -> Tensor:
        """The parameter itself, unless it was put together."""
        if self.index is None:
            assert self.received_weight is not None
            return self.received_weight
        return local(self.param)[self.index]

    def target(self) -> Tensor:
        """What `apply` of a chunk changes: the parameter, or where its update is kept to be sent."""
        return self.weight() if self.update is None else self.update

    def made_for(self) -> tuple[Any, ...]:
        """What its layout depends on and may change from step to step."""
        return layout_options(self.group), self.is_contiguous


def local_grad(p: Tensor) -> Tensor:
    """What is here of the gradient; zeros if only other ranks have one."""
    return torch.zeros_like(local(p)) if p.grad is None else local(p.grad)


def layout_options(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the layouts of a group's parameters, and so its buckets, depend on."""
    names = ("matrix_layout", "max_precond_dim", "precondition_1d")
    return (*[group[name] for name in names], str(group["state_dtype"]), limits_whole_update(group))


def member_of(p: Tensor, group: dict[str, Any], share: Share | None) -> Member | None:
    """This rank's work on a parameter; None if there is none."""
    if share is None:
        layout = layout_of(tuple(p.shape), group, contiguous=p.is_contiguous())
        return Member(p, group, layout, range(layout.batch), ())
    if not share.own:
        return None
    numbers = tuple(unit.number for unit in share.own)
    if share.in_place:
        index = share.region.within(share.spread.box)
        layout = layout_of(share.region.size, group, contiguous=local(p)[index].is_contiguous())
        return Member(p, group, layout, range(layout.batch) if share.elementwise else numbers, index)
    shape = share.layout.shape
    if share.layout.kind == "per_expert":
        shape = (len(numbers), *shape[1:])
    return Member(p, group, layout_of(shape, group), numbers, None)
