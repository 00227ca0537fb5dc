"""Chunks of a step: rows of a run, which a rule receives as one batch.

A gradient takes this path. `Chunk.gradients` copies the gradients of equal matrices into a batch
(B, m, n) in the dtype of computation, or takes a view. `Rule.update` returns the update U of the
batch. `change_weights` adds U to the weights on this rank; an update for other ranks is copied to
where an exchange sends it from, and its receiver calls `change_weights`. Where a rule has a kernel
for elements, `step_whole` gives it gradients and weights without a batch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lather.device import index_on
from lather.kernels.remainder import join
from lather.optim.batched.buckets import Member
from lather.optim.batched.formats import Rows
from lather.optim.batched.matrix_layout import NORM
from lather.optim.batched.remainders import remainder_of
from lather.optim.batched.runs import MemberRun
from lather.optim.batched.weight_change import change_weights
from lather.optim.controls import stepped
from lather.optim.linalg.scale import norms
from lather.optim.rule import RefreshingRule
from lather.torch_private import foreach_copy_

STATISTICS = ("factor", "statistic")
"""Kinds of entries that the phase `statistics` changes."""
MOMENTS = (*STATISTICS, "moment")
"""Kinds that `update` changes; also bases, if the rule never refreshes them."""

LEAST_NARROW = 2**20
"""Least number of elements of a parameter, or of its part in a chunk, for which an update in bf16
is added by a launch of its own, instead of being widened for torch's kernel, which changes many
parameters together and has the same bits."""


class Chunk:
    """Rows `start` to `stop` of a bucket, all of one run."""

    def __init__(self, run: MemberRun, start: int, stop: int) -> None:
        bucket, members, first_row = run.bucket, run.bucket.members, run.bucket.first_row
        self.run, self.bucket, self.start, self.stop = run, bucket, start, stop
        self.dtype = run.rule.compute_dtype
        self._keeps_remainder = run.info.layout.keeps_remainder
        self._covers_bucket = stop - start == first_row[-1]
        self._parts: list[tuple[Member, int, int]] = []
        """Members with the first and last (exclusive) of their matrices that are in the chunk."""
        i = self._first = bisect_right(first_row, start) - 1
        while first_row[i] < stop:
            low, high = max(start, first_row[i]), min(stop, first_row[i + 1])
            self._parts.append((members[i], low - first_row[i], high - first_row[i]))
            i += 1
        self._lengths = [high - low for _, low, high in self._parts]
        self._is_joined = bucket.layout.is_joined and all(
            high - low == member.layout.batch for member, low, high in self._parts
        )
        """Whether the joined gradients and weights of the members are the batch; otherwise it
        consists of parts of them, or of other views."""
        self._takes_narrow = (
            bucket.param_dtype == torch.float32
            and min(self._lengths) * math.prod(bucket.inner) >= LEAST_NARROW
        )
        """Whether the weights are changed by updates in bf16, too, as they are."""
        self._params: list[Tensor] | None = None
        """Parameters of the members, if these joined are on this rank alone."""
        if self._is_joined and run.params is not None:
            self._params = [member.param for member, _, _ in self._parts]

    def _as_parameters(self, batch: Tensor) -> list[Tensor]:
        """Return views of the batch (B, ...) in the shapes of its members, for a joined chunk."""
        is_matrix = self.bucket.layout.batch_dim is None
        return list(batch.unbind() if is_matrix else batch.split(self._lengths))

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        """Join tensors of parameters, in any layout, to one contiguous batch in the dtype of
        computation; a view if possible."""
        if not self._is_joined:
            tensors = [
                member.layout.as_batch(x, low, high)
                for x, (member, low, high) in zip(tensors, self._parts, strict=True)
            ]
        if len(tensors) == 1:
            is_matrix = self._is_joined and self.bucket.layout.batch_dim is None
            x = tensors[0].unsqueeze(0) if is_matrix else tensors[0]
            return x.to(self.dtype).contiguous()
        out = tensors[0].new_empty((self.stop - self.start, *self.bucket.inner), dtype=self.dtype)
        foreach_copy_(
            self._as_parameters(out) if self._is_joined else list(out.split(self._lengths)),
            tensors,
        )
        return out

    def gradients(self) -> Tensor:
        """Return the gradients (B, n_0, n_1, ...), negated for `maximize`; nobody may change them
        in place."""
        grads: Any = (
            [member.grad() for member, _, _ in self._parts]
            if self._params is None
            else [p.grad for p in self._params]
        )
        g = self._gather(grads)
        return -g if self.run.rule.maximize else g

    def weights(self) -> Tensor:
        """Return the weights as a batch, for reading."""
        if self._params is not None:
            weights = [p.detach() for p in self._params]
        else:
            weights = [member.weight() for member, _, _ in self._parts]
        for i, r in enumerate(self._remainders()):
            if r is not None:  # otherwise they were joined before they were sent
                weights[i] = join(weights[i], r)
        return self._gather(weights)

    def _remainders(self) -> list[Tensor | None]:
        """Return the remainder of each member, or None if its weights are on other ranks; nothing
        if bf16 weights have none."""
        if not self._keeps_remainder:
            return []
        states = self.bucket.states[self._first : self._first + len(self._parts)]
        return [
            None if member.is_sent else member.part(remainder_of(state))
            for (member, _, _), state in zip(self._parts, states, strict=True)
        ]

    def rows_here(self) -> dict[str, Tensor]:
        """Return the rows of the chunk in the stacks, or of those that visit the device."""
        stacks, first = self.bucket.stacks, self.start - self.bucket.first_here
        if self._covers_bucket:
            return stacks
        return {name: x[first : first + self.stop - self.start] for name, x in stacks.items()}

    def state(self) -> Rows:
        """Return the state of these rows; `Rows.store` stores what a phase has changed."""
        first = self.start - self.bucket.first_here
        rows = slice(first, first + self.stop - self.start)
        state = Rows(self.bucket.formats, self.bucket.stacks, rows, self.dtype)
        if self.run.idle:
            first = self.run.rows.start
            idle = self.run.idle[self.start - first : self.stop - first]
            active = [row for row, is_idle in enumerate(idle) if not is_idle]
            state.active = index_on(active, self.bucket.device)
        return state

    def elements(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return weights and gradients of a chunk of elements, 1-D, in the parameters' dtypes, and
        the remainders if there are any."""
        parts = [(member.layout, member, low, high) for member, low, high in self._parts]
        weights = [layout.part(x.weight(), low, high) for layout, x, low, high in parts]
        grads = [layout.as_batch(x.grad(), low, high).view(-1) for layout, x, low, high in parts]
        pairs = zip(self._remainders(), parts, strict=False)
        remainders = [x.part(r, low, high) for r, (x, _, low, high) in pairs if r is not None]
        return weights, grads, remainders

    def take_statistics(self) -> None:
        """Run the rule's `statistics` phase."""
        state = self.state()
        self.run.rule.statistics(self.gradients(), state, self.run.step)
        state.store(STATISTICS, self.run.step)

    def take_update(self) -> None:
        """Run the rule's `update` phase and change the weights."""
        run, state = self.run, self.state()
        if run.info.needs_weights:
            state.weights = self.weights()
        u = run.rule.update(self.gradients(), state, run.step)
        if run.info.is_controlled:
            assert state.weights is not None
            if NORM in state and run.step == 1:
                state[NORM] = norms(state.weights)
            first, decay = state.get(NORM), run.rule.decay(run.lr)
            u = u.to(self.dtype)
            u = stepped(state.weights, u, run.rule, run.lr, decay, first)
        self._change_weights(u)
        has_refresh = isinstance(run.rule, RefreshingRule)
        state.store(MOMENTS if has_refresh else (*MOMENTS, "basis"), run.step)

    def _change_weights(self, u: Tensor) -> None:
        """Change the weights on this rank by the update U (B, ...); copy updates that are sent to
        other ranks to where they are sent from."""
        change, step = self.run.change, self.run.step
        u = u if self._takes_narrow else u.to(self.dtype)
        remainders = self._remainders() if self._keeps_remainder else []
        if self._params is not None:
            change_weights(self._params, self._as_parameters(u), change, step, remainders)
            return
        changed: tuple[list[Tensor], list[Tensor]] = ([], [])
        sent: tuple[list[Tensor], list[Tensor]] = ([], [])
        of_changed = list[Tensor]()
        updates = self._as_parameters(u) if self._is_joined else u.split(self._lengths)
        for i, ((member, low, high), update) in enumerate(zip(self._parts, updates, strict=True)):
            targets, its_updates = sent if member.is_sent else changed
            target, layout = member.target(), member.layout
            targets.append(target if self._is_joined else layout.part(target, low, high))
            its_updates.append(update if self._is_joined else layout.as_parameter(update))
            if remainders and (r := remainders[i]) is not None:
                of_changed.append(r if self._is_joined else layout.part(r, low, high))
        change_weights(*changed, change, step, of_changed)
        if sent[0]:
            foreach_copy_(*sent)


Chunks = dict[MemberRun, list[Chunk]]
"""Runs, each with its chunks."""

Phase = Callable[[Chunk], None]
"""`Chunk.take_statistics` or `Chunk.take_update`."""


def chunks_of(runs: Iterable[MemberRun]) -> Chunks:
    return {run: [Chunk(run, *bounds) for bounds in run.chunk_bounds()] for run in runs}
