"""The first segment of a block: attention, residual, norm and router. Under context parallelism the
exchange of what keys and values are made of cuts it in two.

    forward     project | gather ...yield... attend and route
    backward    gather again, during the backward pass of what follows | attention's and router's |
                sum of the gathered tensors' gradients ...yield... projections'

The gathered tensors are freed after the forward pass, unless they are kept for the backward pass,
which then gathers nothing. A recomputed segment projects again before it gathers again.

Letters: B sequences, S positions, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lather.models.attention_logits import not_measuring
from lather.models.block import Attended, Block
from lather.models.context import Context
from lather.models.gathering_attention import GatheringAttention, Projected
from lather.models.moe import MoE
from lather.models.pending import Pending
from lather.models.routing import Routing
from lather.models.saving.recomputed import Given, Placeholder, Recomputation
from lather.models.token_positions import SequenceLayout
from lather.pipeline.tape import Cut, Outputs


class AttentionSegment:
    """Runs the segment of a block, whole or in two parts. Its differentiable outputs are the
    residual, the normed rows (twice, if the shared experts have them for themselves) and, in an MoE
    block, the router's weights and losses. A second run routes as the first did."""

    def __init__(self, block: Block, layout: SequenceLayout) -> None:
        self.block, self.layout = block, layout
        self.given: Given | None = None
        """Takes the gathered tensors that backward needs; None if autograd keeps them."""
        self.kept: list[Callable[[], Tensor]] = []
        """Functions that return again what was gathered, of this rank."""
        self._decision: Routing | None = None
        self._placeholder: Placeholder | None = None
        self._recomputation: Recomputation | None = None
        self._num_own = 0
        self._has_shared_rows = False

    @property
    def is_split(self) -> bool:
        return self.layout.context is not None and isinstance(
            self.block.self_attn, GatheringAttention
        )

    @property
    def context(self) -> Context:
        assert self.layout.context is not None
        return self.layout.context

    @property
    def weights_of_all(self) -> tuple[Tensor, ...]:
        """See `GatheringAttention`."""
        attention = self.block.self_attn
        assert isinstance(attention, GatheringAttention)
        return attention.weights_of_all

    def whole(self, x_BSD: Tensor) -> Outputs:
        return self._outputs(self.block.attend_and_route(x_BSD, self.layout))

    def project(self, x_BSD: Tensor) -> Outputs:
        """Run the first part. Return what it gives to the second; see `split`."""
        self._recomputation = self.block.recomputation()
        projected, kept = self.block.project(x_BSD, self.layout, self._recomputation)
        # a recomputed segment projects again in place of keeping what it gathers
        self.kept = kept if torch.is_grad_enabled() else []
        self._num_own = len(projected.own)
        return (*projected.own, *projected.shared)

    def split(self, projected: Outputs) -> tuple[Outputs, Outputs]:
        """Return this rank's own tensors, and those to gather."""
        return projected[: self._num_own], projected[self._num_own :]

    def attend(self, x_BSD: Tensor, *projected: Tensor) -> Outputs:
        """Run the second part, with the segment's input, and gathered tensors behind its own."""
        recomputation, self._recomputation = self._recomputation, None
        assert recomputation is not None
        attended, self.given = self.block.attend_to_all(
            x_BSD, Projected(*self.split(projected)), self.layout, recomputation
        )
        return self._outputs(attended)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Inside this context a run is the second: logits are not measured again, and the router
        decides what it decided."""
        mlp = self.block.mlp
        decision: AbstractContextManager[Any] = nullcontext()
        if isinstance(mlp, MoE):
            assert self._decision is not None
            decision = mlp.gate.recompute(self._decision)
        with not_measuring(self.block.self_attn), decision:
            yield

    def attended(self, outputs: Outputs) -> Attended:
        """Return the results of the first run from its detached outputs."""
        residual_BSD, normed_TD, *rest = outputs
        shared_TD = rest.pop(0) if self._has_shared_rows else None
        routing = None
        if self._decision is not None:
            weights_TK, balance_loss, *z_loss = rest
            routing = replace(
                self._decision,
                weights_TK=weights_TK,
                balance_loss=balance_loss,
                z_loss=z_loss[0] if z_loss else None,
            )
            # a second run recomputes them
            self._decision = replace(
                routing, weights_TK=weights_TK.new_empty(()).expand_as(weights_TK)
            )
        placeholder, self._placeholder = self._placeholder, None
        return Attended(residual_BSD, normed_TD, routing, placeholder, shared_TD)

    def _outputs(self, attended: Attended) -> Outputs:
        self._placeholder = attended.placeholder
        rows: Outputs = (attended.normed_TD,)
        self._has_shared_rows = attended.shared_TD is not None
        if attended.shared_TD is not None:
            rows = (*rows, attended.shared_TD)
        if attended.routing is None:
            return attended.residual_BSD, *rows
        self._decision = self._decision or attended.routing
        routing = attended.routing
        return attended.residual_BSD, *rows, routing.weights_TK, *routing.losses


class SplitCut:
    """The kept state of a segment in two parts. In backward call `start_again`, later
    `finish_again`; then `attend` and `project` are two cuts."""

    def __init__(
        self,
        segment: AttentionSegment,
        project: Cut,
        attend: Cut | None,
        gathered: Outputs = (),
    ) -> None:
        """`attend` None: the segment is recomputed, from the `gathered` tensors if they are
        kept."""
        self.segment, self.project, self._gathered = segment, project, gathered
        self._attend = attend
        self._own: Outputs = ()
        """The first inputs of the second part, if the segment is recomputed."""
        self._arriving: Pending[Outputs] | None = None

    @property
    def attend(self) -> Cut:
        assert self._attend is not None
        return self._attend

    def start_again(self) -> None:
        """Start to gather what backward needs, if it needs any of it."""
        segment = self.segment
        if self._attend is None:
            (x_BSD,) = self.project.kept_inputs
            own, shared = segment.split(self.project.repeat())
            self._own = (x_BSD, *own)
            if self._gathered:
                gathered, self._gathered = self._gathered, ()
                self._arriving = Pending(lambda: gathered)
                return
        elif segment.given is not None and segment.given.is_needed:
            shared = tuple(x() for x in segment.kept)
        else:
            return
        self._arriving = segment.context.start_gather(shared)

    def finish_again(self, run: Callable[..., tuple[Cut, Outputs]]) -> None:
        """Wait for the gathered tensors. `run` runs the second part for the second time, with the
        same arguments as `AttentionSegment.attend`."""
        if self._arriving is None:
            return
        shared, self._arriving = self._arriving.wait(), None
        if self._attend is None:
            self._attend, _ = run(*self._own, *shared)
            self._own = ()
        if self.segment.given is not None:
            self.segment.given.give(shared)
