"""Runs the functions of segments forward and backward as cuts of the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from lather.models.block import Attended
from lather.models.saving.weight_gradients import WeightGradients
from lather.pipeline.tape import Cut, MakeContext, Outputs, inside
from lather.profiled import profiled

RECOMPUTABLE = ("attention", "experts", "shared_experts")
"""Segments that compute, and so can be recomputed in backward instead of kept."""


@dataclass(eq=False, kw_only=True)
class SegmentRunner:
    """Runs segments as cuts. Raises ValueError for a segment that cannot be recomputed."""

    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    """The queue that the layers were given."""
    recompute: Sequence[str] = ()
    """Some of `RECOMPUTABLE`."""
    autocast: torch.dtype | None = None
    """dtype of matrix products."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.recompute) - set(RECOMPUTABLE)):
            raise ValueError(
                f"recompute has {unknown[0]!r}: use some of {', '.join(map(repr, RECOMPUTABLE))}"
            )

    def _run(
        self,
        name: str,
        function: Callable[..., Outputs],
        *inputs: Tensor,
        again: MakeContext = nullcontext,
        reads: Attended | None = None,
    ) -> tuple[Cut, Outputs]:
        """Run a segment, or its first part. `again`: context of a second run; `reads`: the
        `Attended` whose normed rows are among the inputs, if any."""
        if name in self.recompute:
            return self._run_once(name, function, *inputs, again=again)
        return self._run_once(
            name, function if reads is None else inside(reads.recomputing, function), *inputs
        )

    def _run_once(
        self,
        name: str,
        function: Callable[..., Outputs],
        *inputs: Tensor,
        again: MakeContext | None = None,
    ) -> tuple[Cut, Outputs]:
        """Run a part of a segment, which backward runs again only inside the context `again`."""
        if self.autocast is not None:
            function = inside(
                partial(torch.autocast, inputs[0].device.type, dtype=self.autocast), function
            )
        with record_function(f"lather.segment.{name}"):
            cut, outputs = Cut.run(function, inputs, recompute=again)
        cut.name = name
        return cut, outputs

    def _back(
        self, cut: Cut, gradients: Sequence[Tensor | None], *, defer: bool
    ) -> list[Tensor | None]:
        self.weight_gradients.deferring = defer
        with record_function("lather.segment.backward"), profiled(f"backward.{cut.name}"):
            inputs = cut.backward(gradients)
        self.weight_gradients.deferring = False
        return inputs
