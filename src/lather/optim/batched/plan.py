"""The plan of a step: which rows of which buckets are updated together, in which chunks, and what
ranks exchange.

A plan is made when parameters, options other than numbers, or the set of existing gradients have
changed; every step then executes it.

    StepPlan   all runs of a step (`lather.optim.batched.runs`), their chunks, and the exchanges
               between ranks
    Chunk      rows of a run, which the rule receives as one batch

A gradient takes this path. `Chunk.gradients` copies the gradients of equal matrices into a batch
(B, m, n) in the dtype of computation, or takes a view. `Rule.update` returns the update U of the
batch. `change_weights` adds U to the weights on this rank; an update for other ranks is copied to
where an exchange sends it from, and its receiver calls `change_weights`. Where a rule has a kernel
for elements, `step_whole` gives it gradients and weights without a batch.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lather.boxes import local
from lather.device import index_on, is_gpu
from lather.kernels.narrow_updates import change_by_
from lather.kernels.narrow_weights import change_
from lather.kernels.remainder import join
from lather.optim.batched.buckets import Bucket, Member, States
from lather.optim.batched.formats import Rows
from lather.optim.batched.matrix_layout import NORM
from lather.optim.batched.precision import ALLOWED, changed_precision
from lather.optim.batched.remainders import remainder_of, round_weights, wide_weights
from lather.optim.batched.roster import Change, ParamInfo, Roster
from lather.optim.batched.runs import MemberRun
from lather.optim.batched.step_counts import are_side_by_side, step_counts
from lather.optim.controls import stepped
from lather.optim.linalg.scale import norms
from lather.optim.rule import RefreshingRule
from lather.optim.sharded.exchange import OwnerExchange
from lather.torch_private import (
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    fused_sgd_,
    get_fp32_precision,
)

STATISTICS = ("factor", "statistic")
"""Kinds of entries that the phase `statistics` changes."""
MOMENTS = (*STATISTICS, "moment")
"""Kinds that `update` changes; also bases, if the rule never refreshes them."""

LEAST_NARROW = 2**20
"""Least number of elements of a parameter, or of its part in a chunk, for which an update in bf16
is added by a launch of its own, instead of being widened for torch's kernel, which changes many
parameters together and has the same bits."""

_param = operator.attrgetter("param")


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
        state.gradient_factor = self.run.gradient_factor
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


def change_weights(
    weights: list[Tensor],
    updates: list[Tensor],
    change: Change,
    step: int = 0,
    remainders: Sequence[Any] = (),
) -> None:
    """Change weights by their updates, W <- (1 - decay) W - lr U, in place and rounded once to
    their dtype. All weights have one dtype, and all updates. `step`: t, for stochastic rounding;
    `remainders`: those of bf16 weights, if they have any, which change with them.

    Every update of every rank passes through here, but for those of a kernel that updates state and
    weights together (`Rule.step_whole`)."""
    if not weights:
        return
    if change.replaces:
        round_weights(updates, weights, change.rounding, step, remainders)
        return
    if _change_fused(weights, updates, change, step, remainders):
        return
    dtype = torch.promote_types(weights[0].dtype, updates[0].dtype)
    is_wide = dtype == weights[0].dtype
    wide = weights if is_wide else wide_weights(weights, dtype, remainders)
    if change.decay:
        foreach_mul_(wide, 1 - change.decay)
    foreach_add_(wide, updates, alpha=-change.lr)
    if not is_wide:
        round_weights(wide, weights, change.rounding, step, remainders)


def _change_fused(
    weights: list[Tensor],
    updates: list[Tensor],
    change: Change,
    step: int,
    remainders: Sequence[Any],
) -> bool:
    """Change weights on a GPU by kernels that read and write them once, if there are any for them;
    return whether it did."""
    if not is_gpu(weights[0]):
        return False
    dtypes = weights[0].dtype, updates[0].dtype
    if dtypes == (torch.bfloat16, torch.float32) and change.rounding != "nearest":
        rest = remainders if change.rounding == "remainder" else [None] * len(weights)
        for w, u, r in zip(weights, updates, rest, strict=True):
            change_(w, u, r, decay=change.decay, lr=change.lr, step=step)
        return True
    if dtypes == (torch.float32, torch.bfloat16) and change.lr:
        for w, u in zip(weights, updates, strict=True):
            change_by_(w, u, change.decay, change.lr)
        return True
    are_plain = all(map(Tensor.is_contiguous, weights + updates))
    if dtypes[0] != dtypes[1] or not change.lr or not are_plain:
        return False
    fused_sgd_(
        *(weights, updates, []),
        lr=change.lr,
        weight_decay=change.decay / change.lr,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    return True


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the fp32 matmul precision ("highest" | "high" | "medium", by torch's names) in the block,
    and restore the caller's after it. Nothing is written if it is in force already."""
    in_force = get_fp32_precision("cuda", "matmul"), get_fp32_precision("mkldnn", "matmul")
    cuda, mkldnn = ALLOWED[precision]
    try:
        is_word = torch.get_float32_matmul_precision() == precision
    except RuntimeError:  # the word contradicts the backends
        is_word = False
    if is_word and in_force[0] in cuda and in_force[1] in mkldnn:
        yield
        return
    with changed_precision(precision, in_force):
        yield


class StepPlan:
    """The runs, chunks and exchanges of a step, kept for as long as steps do the same. It has no
    tensors but the parameters and their step counts."""

    def __init__(
        self,
        roster: Roster,
        infos: Sequence[ParamInfo],
        runs: list[MemberRun],
        exchanges: list[OwnerExchange],
        state: States,
    ) -> None:
        """Make the plan of the parameters of the roster that take the step (`infos`), whose state
        has been created."""
        self._roster, self._pattern, self._ids = roster, roster.pattern, list(map(id, infos))
        self.chunks, self.exchanges = chunks_of(runs), exchanges
        self.params = [info.param for info in infos]
        self.buckets = list({id(run.bucket): run.bucket for run in runs}.values())
        self.visitors = [
            chunk for run in runs if run.bucket.offloaded for chunk in self.chunks[run]
        ]
        """Chunks whose state visits the device."""
        if len(devices := {chunk.bucket.device for chunk in self.visitors}) > 1:
            raise ValueError(
                f"offload=True with parameters on {', '.join(sorted(map(str, devices)))}: make an "
                "optimizer for the parameters of each device"
            )
        self.replicated = [info for info in infos if info.is_replicated and info.param.numel()]
        """Parameters that every rank gathers and updates (`ownership="replicated"`)."""
        spread = [info for info in infos if info.spread is not None]
        steps = step_counts(spread, state)
        first = {(id(info.settings), steps[id(info)]): info for info in spread}
        self.intervals = [
            (info, t)
            for (_, t), info in first.items()
            if callable(getattr(info.rule, "precondition_frequency", None))
        ]
        """A parameter of each group whose refresh interval is a function, and the number of steps
        that it had taken when this plan was made. All ranks call the function, even those that
        refresh nothing."""
        self._counts = [state[p]["step"] for p in self.params]
        self._together = are_side_by_side(self._counts)
        self._steps = torch.stack(self._counts) if infos else torch.zeros(0, device="cpu")
        """Values of the step counts."""
        self.num_steps = 0
        """Number of steps that this plan has taken."""
        self.idle: dict[int, list[bool]] = {}
        """id of a parameter with experts -> for each expert, whether it got no token in this
        step."""

    def holds(
        self, roster: Roster, infos: list[ParamInfo], state: States, places: list[Any] | None
    ) -> bool:
        """Whether the plan is that of a step of these parameters: groups with equal settings are
        still equal, and the state is where it was when the plan was made, at `places`, with the
        step counts of the plan's last step."""
        if roster is not self._roster or roster.pattern != self._pattern:
            return False
        if list(map(id, infos)) != self._ids or places is None or places_of(state) != places:
            return False
        if self._together:
            return torch.equal(self._counts[0].as_strided(self._steps.shape, (1,)), self._steps)
        return not self._counts or torch.equal(torch.stack(self._counts), self._steps)

    def count_step(self) -> None:
        """Add one to the step counts of all parameters."""
        self.num_steps += 1
        if self._together:
            self._counts[0].as_strided(self._steps.shape, (1,)).add_(1)
        elif self._counts:
            foreach_add_(self._counts, 1)
        self._steps += 1


def is_unchanged(roster: Roster, groups: Sequence[dict[str, Any]]) -> bool:
    """Whether the roster is still that of these parameter groups; it then has the numbers of this
    step."""
    if not roster.is_current or list(map(id, groups)) != roster.group_ids:
        return False
    is_same = True
    for settings in roster.groups:
        group = settings.group
        if group.keys() != settings.keys or list(map(id, group["params"])) != settings.ids:
            return False
        try:
            is_same = is_same and bool(group["lr"] == settings.lr)
            is_same = is_same and list(map(group.get, settings.names)) == settings.values
        except (RuntimeError, ValueError):  # an array of several elements has no truth value
            return False
    if not is_same or weight_places(roster.params) != roster.places:
        roster.is_current = False  # also if a value is refused
        if not roster.read_numbers():
            return False
        roster.places, roster.is_current = weight_places(roster.params), True
    return not (roster.frozen and any(p.requires_grad or p.grad is not None for p in roster.frozen))


def weight_places(infos: Sequence[ParamInfo]) -> list[Any]:
    """Return the memory addresses, strides and sizes of the parameters."""
    tensors = [info.param if info.spread is None else local(info.param) for info in infos]
    return [
        *map(Tensor.data_ptr, tensors),
        *map(Tensor.stride, tensors),
        *map(Tensor.numel, tensors),
    ]


def places_of(state: States) -> list[Any] | None:
    """Return the identity, the address and the offset in its storage of each tensor of the state,
    which show whether anybody has moved or replaced it. None if the state has anything but
    tensors."""
    try:
        tensors = list(chain.from_iterable(map(dict.values, state.values())))
        return [
            *map(id, tensors),
            *map(Tensor.data_ptr, tensors),
            *map(Tensor.storage_offset, tensors),
        ]
    except TypeError:
        return None


def open_buckets(buckets: Iterable[Bucket], state: States) -> None:
    """Find the stacks of the buckets in the state of their members, which consists of views of
    them."""
    for bucket in buckets:
        bucket.states = list(map(state.__getitem__, map(_param, bucket.members)))
        for name, size in bucket.sizes.items():
            x = bucket.states[0][name]
            bucket.stacks[name] = x.as_strided(size, bucket.strides[name], x.storage_offset())


def close_buckets(buckets: Iterable[Bucket]) -> None:
    """Let go of the stacks."""
    for bucket in buckets:
        bucket.states, bucket.stacks = [], {}
