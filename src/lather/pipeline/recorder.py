"""The interface through which others watch a step: the timeline and the memory plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lather.parallel.fsdp_units import FsdpUnit
from lather.pipeline.schedule import Action


class Recorder:
    """Records the actions of a rank; a method that a subclass does not define records nothing."""

    def action(self, action: Action) -> AbstractContextManager[Any]:
        """Enclose an action, after its input has arrived."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[Any]:
        """Enclose a wait for other ranks inside an action: for gathered parameters, and for the
        input of the backward pass of an overlapped pair."""
        return nullcontext()

    def sharding(self, action: Action, unit: FsdpUnit) -> AbstractContextManager[Any]:
        """Enclose the start of a gather of a unit's parameters (UNSHARD) or of the sum of its
        gradients (REDUCE_GRAD), or its end (RESHARD), inside an action or between two."""
        return nullcontext()
