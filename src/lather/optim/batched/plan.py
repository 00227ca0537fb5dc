"""The plan of a step: which rows of which buckets are updated together, in which chunks, and what
ranks exchange.

A plan is made when parameters, options other than numbers, or the set of existing gradients have
changed; every step then executes it. Adjacent members of a bucket that have a gradient, the same
step count and the same options form a run. A run is processed in chunks that are small enough to
limit temporary memory and, on a CPU, to fit into the cache.

    MemberRun   adjacent members that take a step with the same t and the same options
    Chunk       some rows of a run, which the rule receives as one batch
    StepPlan    all runs of a step, and the exchanges between ranks
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lather.boxes import local
from lather.device import is_cpu, is_gpu, to_device
from lather.optim.batched.buckets import Bucket, Member, States
from lather.optim.batched.matrix_layout import NORM
from lather.optim.batched.precision import ALLOWED, changed_precision
from lather.optim.batched.roster import REPLACEMENT, Change, ParamInfo, Roster
from lather.optim.linalg.kronecker import SYMMETRIC_BLOCKS
from lather.optim.linalg.scale import factors_between, norms
from lather.optim.rule import NOBODY, Due, RefreshingRule, Rule, State, column
from lather.optim.sharded.exchange import OwnerExchange
from lather.torch_private import foreach_add_, foreach_copy_, foreach_mul_, get_fp32_precision

_grad, _param = operator.attrgetter("grad"), operator.attrgetter("param")

TEMPORARIES = 8
"""Temporary memory of an update per matrix, in matrices: the gradient, its projection, the update,
and intermediate results."""

CPU_CACHE_BYTES = 2**21
"""Largest size of a chunk's gradients on a CPU, so that all passes of an update find them in the
cache (measured: 1 to 4 MiB is best)."""


def cpu_count(count: int) -> int:
    """Round a number of matrices up to a multiple of the threads: with three matrices one of two
    threads would wait."""
    threads = torch.get_num_threads()
    return -(-max(1, count) // threads) * threads


class MemberRun:
    """Adjacent members of a bucket, from number `first` on, that take a step with the same t and
    the same options."""

    def __init__(
        self,
        bucket: Bucket,
        first: int,
        infos: Sequence[ParamInfo],
        step: int,
        exchange: OwnerExchange | None,
    ) -> None:
        """`step`: t of the previous step; `exchange`: the exchange to which the members belong, if
        any."""
        self.bucket, self.info, self.step, self.exchange = bucket, infos[0], step, exchange
        self.numbers = range(first, first + len(infos))
        """Numbers of the members in the bucket."""
        self.members = bucket.members[first : first + len(infos)]
        self.settings = self.info.settings
        self.rows = range(bucket.first_row[first], bucket.first_row[first + len(infos)])
        self.take_values()
        self.is_async = isinstance(self.rule, RefreshingRule) and self.rule.async_refresh
        auto = "high" if is_gpu(bucket.device) else "highest"
        self.precision = (
            auto if self.rule.fp32_matmul_prec == "auto" else self.rule.fp32_matmul_prec
        )
        """fp32 matmul precision of statistics and update, by torch's names."""
        self.due: Due = NOBODY
        """Refreshes that are due in this step."""
        self.idle: list[bool] = []
        """For each row, whether it is an expert that got no token in this step; empty if all got
        some."""
        is_plain = all(type(member) is Member for member in self.members)
        self.params = [member.param for member in self.members] if is_plain else None
        """Parameters of the members if their `grad` is exactly the gradient that is needed; None:
        ask the members."""
        self.is_flat = bucket.layout.elementwise
        """Whether weights and state are tensors for `Rule.step_whole`."""

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The rows of the run, divided into batches."""
        return [Chunk(self, start, stop) for start, stop in self._chunk_bounds()]

    def _chunk_bounds(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of chunks whose temporary memory is at most `bucket_bytes`, but which
        have at least one matrix."""
        bucket, rule = self.bucket, self.rule
        dtype, numel = rule.compute_dtype, math.prod(bucket.inner)
        entries = bucket.entries.values()
        copied = sum(math.prod(x.shape) for x in entries if bucket.has_experts or x.dtype != dtype)
        block_row = max(
            (bucket.inner[dim] ** 2 // SYMMETRIC_BLOCKS for dim in bucket.dims), default=0
        )
        per_matrix = dtype.itemsize * (TEMPORARIES * numel + copied + block_row)
        count = (rule.bucket_bytes or bucket.temporary_bytes) // rule.num_streams // per_matrix
        if is_cpu(bucket.device):
            fitting = CPU_CACHE_BYTES // (dtype.itemsize * numel)
            # threads share the work on one large matrix
            count = min(count, cpu_count(fitting) if fitting else 1)
        count = max(1, count) if rule.batched or bucket.layout.elementwise else 1
        for start in range(self.rows.start, self.rows.stop, count):
            yield start, min(start + count, self.rows.stop)

    def take_values(self) -> None:
        """Read the rule, the learning rate and the change of the weights from the group."""
        self.version, self.rule = self.settings.version, self.info.rule
        self.lr, self.change = self.settings.lr, self.info.change()


def take_whole(runs: Sequence[MemberRun]) -> bool:
    """Take the step of flat runs of the same rule, t and rates with the rule's kernel
    (`Rule.step_whole`); return False if the rule has none for them."""
    weights, grads, states = list[Tensor](), list[Any](), list[dict[str, Tensor]]()
    for run in runs:
        weights += run.params or [member.weight() for member in run.members]
        if run.params:
            grads += map(_grad, run.params)
        else:
            grads += [member.grad() for member in run.members]
        states += run.bucket.states[run.numbers.start : run.numbers.stop]
    grads = list(map(Tensor.contiguous, grads))
    entries = {}
    for name in runs[0].bucket.entries:
        entries[name] = list(map(operator.itemgetter(name), states))
    return runs[0].rule.step_whole(weights, grads, entries, runs[0].step, runs[0].lr)


class Chunk:
    """Rows start to stop of a bucket, all within one run, which its methods are given (a chunk that
    held its run would form a cycle with it, and keep the parameters of an old plan)."""

    def __init__(self, run: MemberRun, start: int, stop: int) -> None:
        self.bucket, self.start, self.stop = run.bucket, start, stop
        self.dtype, self._first_of_run = run.rule.compute_dtype, run.rows.start
        self._is_wide = all(x.dtype == self.dtype for x in run.bucket.entries.values())
        self._is_whole = stop - start == run.bucket.first_row[-1]
        self._pieces: list[tuple[Member, int, int]] = []
        first_row, members = run.bucket.first_row, run.bucket.members
        i = bisect_right(first_row, start) - 1
        while first_row[i] < stop:
            low, high = max(start, first_row[i]), min(stop, first_row[i + 1])
            self._pieces.append((members[i], low - first_row[i], high - first_row[i]))
            i += 1
        self._lengths = [high - low for _, low, high in self._pieces]
        self._is_joined = run.bucket.layout.is_joined and all(
            high - low == member.layout.batch for member, low, high in self._pieces
        )
        """Whether the joined gradients and weights of the members are the batch; otherwise it
        consists of parts of them, or of other views."""
        self._params: list[Tensor] | None = None
        """Parameters of the members, if these joined are on this rank alone."""
        if self._is_joined and run.params is not None:
            self._params = [member.param for member, _, _ in self._pieces]

    def _as_parameters(self, batch: Tensor) -> list[Tensor]:
        """Return views of the batch (B, ...) in the shapes of its members, for a joined chunk."""
        is_split = self.bucket.layout.per_expert
        return list(batch.split(self._lengths) if is_split else batch.unbind())

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        """Join tensors of parameters, in any layout, to one contiguous batch in the dtype of
        computation; a view if possible."""
        if not self._is_joined:
            tensors = [
                member.layout.as_batch(x, low, high)
                for x, (member, low, high) in zip(tensors, self._pieces, strict=True)
            ]
        if len(tensors) == 1:
            is_matrix = self._is_joined and not self.bucket.layout.per_expert
            return (
                (tensors[0].unsqueeze(0) if is_matrix else tensors[0]).to(self.dtype).contiguous()
            )
        out = tensors[0].new_empty((self.stop - self.start, *self.bucket.inner), dtype=self.dtype)
        foreach_copy_(
            self._as_parameters(out) if self._is_joined else list(out.split(self._lengths)),
            tensors,
        )
        return out

    def gradients(self, run: MemberRun) -> Tensor:
        """Return the gradients (B, n_0, n_1, ...), negated for `maximize`; nobody may change them
        in place."""
        grads: Any = (
            [member.grad() for member, _, _ in self._pieces]
            if self._params is None
            else [p.grad for p in self._params]
        )
        g = self._gather(grads)
        return -g if run.rule.maximize else g

    def weights(self) -> Tensor:
        """Return the weights as a batch, for reading."""
        if self._params is not None:
            return self._gather([p.detach() for p in self._params])
        return self._gather([member.weight() for member, _, _ in self._pieces])

    def state(self, run: MemberRun) -> tuple[State, dict[str, Tensor]]:
        """Return the state of these rows in the dtype of computation, and as it is stored; call
        `store` after changing it."""
        stacks = self.bucket.stacks
        if not self._is_whole:
            stacks = {name: stack[self.start : self.stop] for name, stack in stacks.items()}
        state = State(stacks)
        if not self._is_wide:
            state.update({name: stack.to(self.dtype) for name, stack in stacks.items()})
        if run.idle:
            offset = self._first_of_run
            marks = run.idle[self.start - offset : self.stop - offset]
            state.active = index_on(
                [row for row, mark in enumerate(marks) if not mark], self.bucket.device
            )
        return state, stacks

    def store(self, state: State, stacks: dict[str, Tensor]) -> None:
        """Copy entries that were converted to the dtype of computation, or that a rule has
        replaced, into the stacks."""
        for name, stack in stacks.items():
            if state[name] is not stack:
                stack.copy_(state[name])

    def take_statistics(self, run: MemberRun) -> None:
        """Run the rule's `statistics` phase."""
        state, stacks = self.state(run)
        run.rule.statistics(self.gradients(run), state, run.step)
        self.store(state, stacks)

    def take_update(self, run: MemberRun) -> None:
        """Run the rule's `update` phase and change the weights."""
        state, stacks = self.state(run)
        if run.info.needs_weights:
            state.weights = self.weights()
        u = run.rule.update(self.gradients(run), state, run.step)
        if run.info.layout.keeps_norm:
            u = self._with_kept_norm(u, state, run)
        self._leave(u, run)
        self.store(state, stacks)

    def _with_kept_norm(self, u: Tensor, state: State, run: MemberRun) -> Tensor:
        """Return new weights: W - lr r U / |U|, scaled to the norm r of the first step; W - lr U
        where r is 0."""
        w, lr = state.weights, run.lr
        assert w is not None
        if run.step == 1:
            state[NORM] = norms(w)
        r = column(state[NORM], u)
        new = w - lr * (u * factors_between(r, column(norms(u), u)).where(r > 0, 1.0))
        return new * factors_between(r, column(norms(new), new)).where(r > 0, 1.0)

    def _leave(self, u: Tensor, run: MemberRun) -> None:
        """Change the weights that are on this rank by the update, and copy other updates to where
        they are sent from."""
        if self._params is not None:
            change_weights(self._params, self._as_parameters(u), run.change)
            return
        changed: tuple[list[Tensor], list[Tensor]] = ([], [])
        sent: tuple[list[Tensor], list[Tensor]] = ([], [])
        pieces = self._as_parameters(u) if self._is_joined else u.split(self._lengths)
        for (member, low, high), piece in zip(self._pieces, pieces, strict=True):
            parts, updates = sent if member.is_sent else changed
            target, layout = member.target(), member.layout
            parts.append(target if self._is_joined else layout.part(target, low, high))
            updates.append(piece if self._is_joined else layout.as_parameter(piece))
        change_weights(*changed, run.change)
        change_weights(*sent, REPLACEMENT)


def change_weights(weights: list[Tensor], updates: list[Tensor], change: Change) -> None:
    """Change weights by their updates, in place and rounded once to their dtype. All weights have
    one dtype, and all updates.

    Every update of every rank leaves the engine here, but for those of a kernel that updates state
    and weights together (`Rule.step_whole`)."""
    if not weights:
        return
    if change.replaces:
        foreach_copy_(weights, updates)
        return
    dtype = torch.promote_types(weights[0].dtype, updates[0].dtype)
    wide = (
        weights
        if dtype == weights[0].dtype
        else [torch.empty_like(weight, dtype=dtype) for weight in weights]
    )
    if wide is not weights:
        foreach_copy_(wide, weights)
    if change.decay:
        foreach_mul_(wide, 1 - change.decay)
    foreach_add_(wide, updates, alpha=-change.lr)
    if wide is not weights:
        foreach_copy_(weights, wide)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the fp32 matmul precision ("highest" | "high" | "medium", by torch's names) in the block,
    and restore the caller's after it. Nothing is written if it is in force already."""
    found = get_fp32_precision("cuda", "matmul"), get_fp32_precision("mkldnn", "matmul")
    cuda, mkldnn = ALLOWED[precision]
    try:
        is_word = torch.get_float32_matmul_precision() == precision
    except RuntimeError:  # the word contradicts the backends
        is_word = False
    if is_word and found[0] in cuda and found[1] in mkldnn:
        yield
        return
    with changed_precision(precision, found):
        yield


def index_on(rows: Sequence[int], device: torch.device) -> Tensor:
    """Copy the rows as an index to a device, without waiting for it."""
    return to_device(torch.tensor(rows, dtype=torch.long, device="cpu"), device)


class PlanKey(NamedTuple):
    """Everything but the state on which a plan depends."""

    roster: Roster
    usable: list[int]
    """ids of the parameters that take the step."""
    pattern: list[int]
    """For each group, the number of the first group with the same settings."""


class StepPlan:
    """Everything that a step does; it is used for as long as steps do the same. It has no tensors
    but the parameters and their step counts."""

    def __init__(
        self,
        params: Sequence[ParamInfo],
        runs: list[MemberRun],
        exchanges: list[OwnerExchange],
        state: States,
        key: tuple[object, ...],
    ) -> None:
        """Make the plan for parameters whose state has been created.

        Args:
            params: parameters that take the step.
            key: everything on which the plan depends: a step with another key needs another plan.
        """
        self.runs, self.exchanges, self.key = runs, exchanges, key
        self.params = [one.param for one in params]
        self.buckets = list({id(run.bucket): run.bucket for run in runs}.values())
        self.gathered = [one for one in params if one.is_gathered and one.param.numel()]
        """Parameters that every rank gathers and updates (`ownership="replicated"`)."""
        spread = [one for one in params if one.spread is not None]
        steps = step_counts(spread, state)
        first = {(id(one.settings), steps[id(one)]): one for one in spread}
        self.intervals = [
            (one, t)
            for (_, t), one in first.items()
            if callable(getattr(one.rule, "precondition_frequency", None))
        ]
        """A parameter of each group whose interval is a function, with t of the step before this
        plan: all ranks call it, even those that refresh nothing."""
        self._counts = [state[p]["step"] for p in self.params]
        self._steps = torch.stack(self._counts) if params else torch.zeros(0, device="cpu")
        """Values of the step counts."""
        self.num_steps = 0
        """Number of steps that this plan has taken."""
        self.idle: dict[int, list[bool]] = {}
        """id of a parameter with experts -> for each expert, whether it got no token in this
        step."""

    def holds(self, state: States, places: list[Any] | None) -> bool:
        """Whether the state still is where it was when the plan was made, at `places`, with the
        step counts of the plan's last step."""
        if places is None or places_of(state) != places:
            return False
        return not self._counts or torch.equal(torch.stack(self._counts), self._steps)

    def count_step(self) -> None:
        """Add one to the step counts of all parameters."""
        self.num_steps += 1
        if self._counts:
            foreach_add_(self._counts, 1)
            self._steps += 1


def is_unchanged(roster: Roster, groups: Sequence[dict[str, Any]]) -> bool:
    """Whether the roster is still that of these parameter groups; it then has the numbers of this
    step."""
    if not roster.is_whole or list(map(id, groups)) != roster.group_ids:
        return False
    is_same = True
    for known in roster.groups:
        group = known.group
        if group.keys() != known.keys or list(map(id, group["params"])) != known.ids:
            return False
        try:
            is_same = is_same and bool(group["lr"] == known.lr)
            is_same = is_same and list(map(group.get, known.names)) == known.values
        except (RuntimeError, ValueError):  # an array of several elements has no truth value
            return False
    if not is_same or weight_places(roster.params) != roster.places:
        roster.is_whole = False  # also if a value is refused
        if not roster.take_changes():
            return False
        roster.places, roster.is_whole = weight_places(roster.params), True
    return not (roster.frozen and any(p.requires_grad or p.grad is not None for p in roster.frozen))


def weight_places(params: Sequence[ParamInfo]) -> list[Any]:
    """Return the memory addresses, strides and sizes of the parameters."""
    tensors = [one.param if one.spread is None else local(one.param) for one in params]
    return [
        *map(Tensor.data_ptr, tensors),
        *map(Tensor.stride, tensors),
        *map(Tensor.numel, tensors),
    ]


def step_counts(params: Sequence[ParamInfo], state: States) -> dict[int, int]:
    """Return the step count of each parameter by its id; 0 for one without state."""
    counts = [state[one.param]["step"] for one in params if state.get(one.param)]
    values = iter(torch.stack(counts).tolist() if counts else ())
    return {id(one): int(next(values)) if state.get(one.param) else 0 for one in params}


def places_of(state: States) -> list[Any] | None:
    """Return what tells whether anybody has moved or replaced a tensor of the state: the identity
    of each, its address and its offset in its storage. None if the state has anything but
    tensors."""
    try:
        found = list(chain.from_iterable(map(dict.values, state.values())))
        return [*map(id, found), *map(Tensor.data_ptr, found), *map(Tensor.storage_offset, found)]
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


def runs_of(
    bucket: Bucket, taking: Mapping[int, tuple[ParamInfo, int, OwnerExchange | None]]
) -> list[MemberRun]:
    """Divide the members of a bucket that take the step into runs. `taking`: id of a parameter that
    takes the step -> its info, t of the previous step, and its exchange if it has one."""

    def options(key: int) -> tuple[int, OwnerExchange | None, int, Rule] | None:
        if key not in taking:
            return None
        info, step, exchange = taking[key]
        return step, exchange, info.settings.number, info.rule

    runs, first = list[MemberRun](), 0
    for same, adjacent in groupby((id(member.param) for member in bucket.members), options):
        keys = list(adjacent)
        if same is not None:
            runs.append(MemberRun(bucket, first, [taking[key][0] for key in keys], *same[:2]))
        first += len(keys)
    return runs
