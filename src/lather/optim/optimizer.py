"""`MatrixOptimizer`, the torch Optimizer under every rule of the family: it holds state, checks input and runs the phases of a step.

    collect      check every gradient and interval before anything is changed; create missing state; count the step; form the runs
    statistics   Kronecker factors from the gradients (rules whose statistics come first)
    refresh      new eigenbases where they are due; with `async_refresh` always last, beside what the caller does until the next step
    update       project, Adam, project back, change the parameters

A rule names its phases in order and implements them on batches (B, n_0, n_1, ...) with a `MatrixState`; layouts, buckets and chunks are
`lather.optim.layout`'s and `lather.optim.buckets`' business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from lather.optim.adamw import fused_adamw, takes_fused
from lather.optim.buckets import Chunk, GroupNow, Run, Taking, runs_of
from lather.optim.inspection import Gradient, inspect_gradients
from lather.optim.members import Member
from lather.optim.options import OTHER_GROUP_KEYS, check_options, comparable, refresh_interval
from lather.optim.precision import beside, matmul_precision, no_autocast, on_streams
from lather.optim.refresh import FactorRefresh, Stagger, launch, refresh, refresh_cost
from lather.optim.sharding import Exchange
from lather.optim.state import MatrixState, layout_bytes
from lather.optim.stateful import StatefulOptimizer

GIB = 2**30

RefreshKind = Literal["none", "first", "all", "interval"]
"""What a step does to the bases: nothing; the first ones; all that saw a gradient; those whose interval is full."""


@dataclass(frozen=True)
class Step:
    """What is done in one step."""

    runs: list[Run]
    exchanges: list[Exchange]
    members: Mapping[int, Member]
    """By the id of a parameter."""
    groups: Mapping[int, GroupNow]
    """By the id of a parameter group."""
    taking: Mapping[int, Taking]
    """By the id of a parameter."""
    idle: Mapping[int, list[bool]]
    """id of a parameter -> which of its experts got no token."""
    gathered: list[tuple[Tensor, dict[str, Any]]]
    """Parameters, with their groups, that all ranks work on alike (`ownership="replicated"`)."""


class MatrixOptimizer(StatefulOptimizer):
    """Base of the family. A rule sets `_phases` and implements `_refresh_kind`, `_update` and, if it is a phase of its own, `_statistics`.

    State per parameter, flat keys: `step`, `exp_avg`, `exp_avg_sq`, and `factor_i`, `basis_i` and, for some rules, `eigenvalues_i` for each
    inner dim i with a factor. All but `step` are views of a stack that parameters with equal matrices share.
    """

    _phases: ClassVar[tuple[str, ...]] = ("update", "refresh")
    preset: ClassVar[dict[str, Any]] = {}
    """Options whose defaults a subclass changes."""

    # --- what a rule provides -------------------------------------------------------------------------------------------------------

    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> None:
        """Raise on bad values; may set dependent ones."""
        check_options(options)

    def _refresh_kind(self, step: int, options: Mapping[str, Any]) -> RefreshKind:
        raise NotImplementedError

    def _refresh_method(self, kind: RefreshKind, options: Mapping[str, Any]) -> str:
        """The first bases are whole eigendecompositions."""
        return "eigh" if kind == "first" else str(options["refresh_method"])

    def _statistics(self, g: Tensor, state: MatrixState, options: Mapping[str, Any]) -> None:
        """Change the factors in place, given the gradient g (B, ...), which stays as it is."""
        raise NotImplementedError

    def _update(self, g: Tensor, w: Tensor | None, state: MatrixState, options: Mapping[str, Any]) -> Tensor:
        """Change the moments (and factors) in place and return U (B, ...), of which lr times is subtracted. w are the parameters, given
        only if `_couples_decay`."""
        raise NotImplementedError

    def _couples_decay(self, options: Mapping[str, Any]) -> bool:
        """Whether weight decay is added to the gradient."""
        raise NotImplementedError

    def _decay(self, lr: float, options: Mapping[str, Any]) -> float:
        """Share of the parameter that decoupled weight decay takes away in this step."""
        raise NotImplementedError

    # --- parameter groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; a bad option, layout or parameter raises before the group is added.

        A parameter that is given twice (tied weights) counts once.
        """
        known = set(self.defaults) | OTHER_GROUP_KEYS
        if unknown := sorted(set(param_group) - known):
            raise ValueError(f"unknown option {unknown[0]!r} in a parameter group; known options: {', '.join(sorted(known))}")
        options = {**self.defaults, **param_group}
        self._check_options(options)
        own = {key: options[key] for key in self.defaults}
        super().add_param_group({**param_group, "params": _each_once(param_group["params"]), **own})
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._stagger = None

    def _check_group(self, group: dict[str, Any]) -> None:
        for index, p in enumerate(group["params"]):
            name = _param_name(group, index)
            self._sharding.spread_of(p, group, name)
            if p.is_complex():
                raise TypeError(f"{name} is complex ({p.dtype}); the SOAP family takes real parameters: give it to torch.optim.Adam")
            if group["matrix_layout"] != "tensor" and p.dim() == 1 and group["max_precond_dim"] > 0:
                raise ValueError(
                    f"{name} has shape {tuple(p.shape)}, but matrix_layout={group['matrix_layout']!r} needs a matrix: "
                    "put it in a group with matrix_layout='tensor'"
                )
            try:
                layout = self._sharding.layout_of(p, group)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            spread = self._sharding.spread_of(p, group)
            num = len(spread.ranks) if spread is not None and group["ownership"] == "replicated" else 1
            size = layout_bytes(layout, group, num)
            if group["max_state_bytes"] is not None and size > group["max_state_bytes"]:
                raise ValueError(
                    f"state of {name} with shape {layout.shape} would take {size / GIB:.3f} GiB, more than max_state_bytes "
                    f"({group['max_state_bytes'] / GIB:.3f} GiB): lower max_precond_dim for one-sided preconditioning, "
                    "use the matrix_layout ('per_expert', 'stacked') with the smaller factors, spread the state of a sharded parameter "
                    "over its ranks (ownership='replicated'), or raise the limit"
                )

    # --- the step -------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss.

        Raises TypeError for sparse or complex gradients and, under `nonfinite="raise"`, ValueError for non-finite ones; in both cases
        nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with record_function("lather.optim.collect"):
            step = self._collect()
        if step is not None:
            try:
                with no_autocast({p.device.type for group in self.param_groups for p in group["params"]}):
                    for p, group in step.gathered:
                        self._work_alike(step, p, group)
                    self._run_phases(step)
            except BaseException:
                for exchange in step.exchanges:
                    exchange.forget(step.members)
                raise
        return loss

    def _run_phases(self, step: Step) -> None:
        for phase in self._phases:
            with record_function(f"lather.optim.{phase}"):
                if phase == "refresh":
                    self._refresh_bases([run for run in step.runs if not run.options["async_refresh"]])
                elif phase == "statistics":
                    self._work_through(step, self._statistics_of, is_last=False)
                else:
                    self._work_through(step, self._update_of, is_last=True)
        if late := [run for run in step.runs if run.options["async_refresh"]]:
            with record_function("lather.optim.launch_refresh"):
                self._launch_refreshes(late)

    def _work_alike(self, step: Step, p: Tensor, group: dict[str, Any]) -> None:
        """All phases for one parameter that is gathered on all its ranks."""
        from lather.optim.gathered import Gathered  # imports DTensor

        whole = Gathered(p, group, self._sharding, self.state[p], couples_decay=self._couples_decay(group))
        runs = runs_of(whole.bucket, step.taking, step.idle, step.groups)
        self._run_phases(replace(step, runs=runs, exchanges=[]))
        self._finish_refreshes()
        whole.keep(*self._rates(step, group))

    def _collect(self) -> Step | None:
        """Everything that can be refused is refused here, before the first change. None: there is nothing to do.

        torch's tools for distributed checkpoints ask an optimizer for its state by a first step with learning rate 0 and zero gradients
        only: it creates the state and counts for nothing.
        """
        self._finish_refreshes()
        self._plan()
        groups = self._groups_now()
        only_state = not self.state and all(now.lr == 0 for now in groups.values())
        found = inspect_gradients(self._gradients(only_state), self._sharding.group_of)
        if only_state and found.is_zero:
            self._create_state([(one.param, one.group) for one in found.usable])
            return None
        intervals: dict[tuple[int, int], int] = {}
        taking = []
        for one in found.usable:
            step = int(self.state[one.param]["step"]) + 1 if self.state.get(one.param) else 1
            key = (step, id(one.group))
            if key not in intervals:
                intervals[key] = refresh_interval(step, one.group)
            taking.append((one, step, intervals[key]))
        self._bring_buckets_up_to_date()
        self._count("nonfinite_skipped", found.num_bad)
        self._create_state([(one.param, one.group) for one in found.usable])
        for one in found.usable:
            self.state[one.param]["step"] += 1
        alive = [(one.param, one.group) for one in found.usable if one.param.numel()]
        exchanges = self._sharding.exchanges(alive, self._couples_decay)
        number_of = {id(p): number for number, exchange in enumerate(exchanges) for p, _ in exchange.params}
        steps = {id(one.param): Taking(t, f, number_of.get(id(one.param))) for one, t, f in taking if one.param.numel()}
        runs = [run for bucket in self._buckets for run in runs_of(bucket, steps, found.idle, groups)]
        gathered = [(p, group) for p, group in alive if self._is_gathered(p)]
        return Step(runs, exchanges, self._members() if exchanges else {}, groups, steps, found.idle, gathered)

    def _gradients(self, measured: bool) -> list[Gradient]:
        """Of all parameters that have one here, or may have one on another rank."""
        gradients = []
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                spread = self._sharding.spread_of(p, group)
                if p.grad is not None or spread is not None:
                    layout = self._sharding.layout_of(p, group)
                    gradients.append(Gradient(p, group, _param_name(group, index), layout, spread, measured))
        return gradients

    def _groups_now(self) -> dict[int, GroupNow]:
        """What each group asks for in this step, by its id; raises ValueError for a learning rate that a scheduler has spoilt."""
        numbers: dict[Any, int] = {}
        now = {}
        for group in self.param_groups:
            lr = float(group["lr"])
            check_options({"lr": lr})
            key = (lr, *[comparable(group[name]) for name in self.defaults if name != "lr"])
            now[id(group)] = GroupNow(numbers.setdefault(key, len(numbers)), lr)
        return now

    def _work_through(self, step: Step, work: Callable[[Chunk], None], *, is_last: bool) -> None:
        """The runs whose gradients are here, while the first others travel; then exchange by exchange, the next one on its way."""
        coming, leaving = deque(step.exchanges), deque[Exchange]()
        if coming:
            coming[0].launch_in()
        self._work_on([run for run in step.runs if run.exchange is None], work, is_last=is_last)
        for number, exchange in enumerate(step.exchanges):
            coming.popleft()
            if coming:
                coming[0].launch_in()
            exchange.finish_in(step.members)
            self._work_on([run for run in step.runs if run.exchange == number], work, is_last=is_last)
            if is_last:
                exchange.launch_out(step.members)
                leaving.append(exchange)
                if len(leaving) > 1:
                    leaving.popleft().finish_out(partial(self._rates, step))
        for exchange in leaving:
            exchange.finish_out(partial(self._rates, step))

    def _rates(self, step: Step, group: Mapping[str, Any]) -> tuple[float, float]:
        """Learning rate, and the share of the parameter that weight decay takes away."""
        lr = step.groups[id(group)].lr
        return lr, self._decay(lr, group)

    def _work_on(self, runs: list[Run], work: Callable[[Chunk], None], *, is_last: bool) -> None:
        if is_last:
            runs = self._without_fused(runs)
        for precision, some in _by_option(runs, "fp32_matmul_prec"):
            with matmul_precision(precision):
                chunks = chain.from_iterable(run.chunks() for run in some)
                num_streams = max(run.options["num_streams"] for run in some)
                for chunk in on_streams(chunks, self._streams, num_streams):
                    work(chunk)

    def _statistics_of(self, chunk: Chunk) -> None:
        if chunk.run.bucket.factor_dims:
            state = chunk.state()
            self._statistics(chunk.gradients(), state, chunk.run.options)
            chunk.store(state)

    def _update_of(self, chunk: Chunk) -> None:
        options, state = chunk.run.options, chunk.state()
        w = chunk.weights() if self._couples_decay(options) else None
        u = self._update(chunk.gradients(), w, state, options)
        chunk.apply(u, self._decay(chunk.run.lr, options))
        chunk.store(state)

    def _without_fused(self, runs: list[Run]) -> list[Run]:
        """The runs that are left when torch's AdamW has taken its own."""
        fused = [takes_fused(run, couples_decay=self._couples_decay(run.options)) for run in runs]
        for run, is_fused in zip(runs, fused, strict=True):
            if is_fused:
                fused_adamw(run, self._decay(run.lr, run.options))
        return [run for run, is_fused in zip(runs, fused, strict=True) if not is_fused]

    def _refresh_bases(self, runs: list[Run]) -> None:
        for precision, some in _by_option(runs, "qr_fp32_matmul_prec"):
            with matmul_precision(precision):
                refresh(self._due(some), self._count)

    def _launch_refreshes(self, runs: list[Run]) -> None:
        """Begin the refreshes at the end of a step; they are there for the next one, and go on beside what comes between."""
        for precision, some in _by_option(runs, "qr_fp32_matmul_prec"):
            if jobs := self._due(some):
                changed = [stack for job in jobs for stack in job.run.bucket.stacks.values()]
                with matmul_precision(precision), beside(self._streams, changed):
                    self._refreshing.append((precision, launch(jobs, self._count)))

    def _due(self, runs: list[Run]) -> list[FactorRefresh]:
        jobs = []
        for run in runs:
            kind = self._refresh_kind(run.step, run.options)
            rows = self._due_rows(run, kind)
            method = self._refresh_method(kind, run.options)
            jobs += [FactorRefresh(run, dim, rows, method, first=kind == "first") for dim in run.bucket.factor_dims if len(rows)]
        return jobs

    def _due_rows(self, run: Run, kind: RefreshKind) -> Sequence[int]:
        """Rows of the bucket whose bases are refreshed in this step. Idle experts keep theirs, except for the first ones."""
        if not run.bucket.factor_dims or kind == "none":
            return []
        rows: Sequence[int] = run.rows
        if kind == "first":
            return rows
        if kind == "interval" and run.options["stagger_refresh"]:
            rows = [row for row, shift in zip(rows, self._shifts(run), strict=True) if (run.step + shift) % run.interval == 0]
        elif kind == "interval" and run.step % run.interval:
            rows = []
        if run.idle:
            idle = {row for row, mark in zip(run.rows, run.idle, strict=True) if mark}
            self._count("refreshes_skipped", len(run.bucket.factor_dims) * len(idle & set(rows)))
            rows = [row for row in rows if row not in idle]
        return rows

    def _shifts(self, run: Run) -> Iterator[int]:
        """Per row of the run, by how many steps its refreshes are early."""
        staggered = tuple(id(p) for group in self.param_groups if group["stagger_refresh"] for p in group["params"])
        if self._stagger is None or tuple(self._stagger.first) != staggered:
            costs = []
            for group in self.param_groups:
                for p in group["params"] if group["stagger_refresh"] else []:
                    layout = self._sharding.layout_of(p, group)
                    costs.append((id(p), layout.batch, refresh_cost(layout.inner, layout.factor_dims)))
            self._stagger = Stagger.of(costs)
        for member in run.bucket.members[run.first : run.last]:
            for number in member.numbers:
                yield self._stagger.shift(id(member.param), number, run.interval)


def _by_option(runs: list[Run], name: str) -> Iterator[tuple[str, list[Run]]]:
    """The runs by the value of a group's option, in order."""
    for value in dict.fromkeys(run.options[name] for run in runs):
        yield value, [run for run in runs if run.options[name] == value]


def _each_once(params: Any) -> Any:
    """The parameters (or (name, parameter) pairs) without repetitions, in order."""
    if isinstance(params, Tensor | set):  # torch takes the one and refuses the other
        return params
    items = list(params)
    return list({id(item[1] if isinstance(item, tuple) else item): item for item in items}.values())


def _param_name(group: Mapping[str, Any], index: int) -> str:
    names = group.get("param_names")
    return f"parameter {names[index]!r}" if names else f"parameter {index} of its group"
