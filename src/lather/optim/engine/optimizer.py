"""`MatrixOptimizer`, the torch Optimizer under every rule: a step looks at the gradients, and then walks its plan.

collect      check every gradient and interval before anything is changed; create missing state; plan, if anything is new; count the step
statistics   of rules that have them as a phase of their own
refresh      new bases where they are due, for rules whose update wants them first
update       the rule's update, and the change of the parameters
refresh      for all other rules; with `async_refresh` beside what the caller does until the next step
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim.optimizer import ParamsT

from lather.optim.engine.gradients import GradientNorms, are_zero, inspect_gradients, measure_gradients
from lather.optim.engine.members import Member
from lather.optim.engine.pending import PendingRefreshes
from lather.optim.engine.plan import Chunk, MemberRun, StepPlan, runs_of
from lather.optim.engine.refresh import DimRefresh, Stagger, due_rows, refresh
from lather.optim.engine.roster import ParamInfo, Roster
from lather.optim.engine.stateful import StatefulOptimizer
from lather.optim.engine.streams import no_autocast, on_streams
from lather.optim.options import Option, documentation_of, options_of, saveable
from lather.optim.rule import NOBODY, RefreshingRule, Rule
from lather.optim.sharded.gathered import Gathered
from lather.optim.sharded.placement import local
from lather.optim.sharded.sharding import OwnerExchange
from lather.torch_private import disable_dynamo

P = ParamSpec("P")
S = TypeVar("S")


def constructor(rule: Callable[P, Rule]) -> Callable[[Callable[[S, ParamsT, Rule], None]], Callable[Concatenate[S, ParamsT, P], None]]:
    """Decorates the `__init__` of a rule's optimizer: callers give it the rule's options in place of the rule, and editors and mypy see
    their names and types."""

    def decorate(init: Callable[[S, ParamsT, Rule], None]) -> Callable[Concatenate[S, ParamsT, P], None]:
        def construct(self: S, params: ParamsT, *args: P.args, **options: P.kwargs) -> None:
            init(self, params, rule(*args, **options))

        own = inspect.signature(rule)
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "params")]
        construct.__signature__ = own.replace(parameters=[*first, *own.parameters.values()])  # type: ignore[attr-defined]
        return construct  # type: ignore[return-value]  # `params` may be given by name, too, which no type can say

    return decorate


class _Documented(type):
    """Classes whose documentation goes on with the options of their rule, read when somebody asks for it."""

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        own, rule = vars(cls).get("__doc__") or cls.__name__, vars(cls).get("rule")
        if rule is None:
            return own
        options, texts = options_of(rule), documentation_of(rule)
        lines = [f"    {name}: {texts.get(name, '')}{_default(option)}" for name, option in options.items()]
        return "\n".join([own, "", "Args:", "    params: as `MatrixOptimizer` takes them.", *lines])


def _default(option: Option) -> str:
    return "" if option.default is MISSING else f" Default: {saveable(option.default)!r}."


class MatrixOptimizer(StatefulOptimizer, metaclass=_Documented):
    """An optimizer whose groups each have a rule.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups. Every option of a rule may differ per group; a group may also have
            a rule of its own: `{"params": ..., "rule": "muon", "momentum": 0.9}`, by name, as a rule's class or as an instance.
        rule: of groups that name none.

    Raises:
        ValueError, TypeError: at construction, for a value out of range or a parameter that the layout cannot take; names the remedy.

    State per parameter, flat keys: `step`, and what the rule keeps. All but `step` are views of a stack that parameters with equal matrices
    share. With `async_refresh`, `state` is not to be read between a step and the next, or a `state_dict()`.
    """

    rule: ClassVar[type[Rule]]
    """The rule of a subclass."""

    def __init__(self, params: ParamsT, rule: Rule) -> None:
        self._plan: StepPlan | None = None
        self._stagger: tuple[Roster, Stagger] | None = None
        super().__init__(params, rule)

    # --- the step ---------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None, *, norms: GradientNorms | None = None) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss.

        `norms`: what `measure_gradients` found of these gradients, its `values` on the host; the step then does not look at them.

        Raises TypeError for sparse or complex gradients and ValueError for both `norms` and a closure, which makes other gradients, and,
        under `nonfinite="raise"`, for non-finite ones; in all cases nothing has been changed.
        """
        if closure is not None and norms is not None:
            raise ValueError("norms are of gradients that the closure makes anew: give one of the two")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with record_function("lather.optim.collect"):
            plan = self._collect(norms)
        if plan is None:
            return loss
        try:
            is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
            with no_autocast() if is_autocast else nullcontext():
                for one in plan.gathered:
                    self._work_alike(one, plan.idle)
                self._walk(plan.runs, plan.exchanges, plan.members)
        except BaseException:
            self._plan = None
            for exchange in plan.exchanges:
                exchange.forget(plan.members)
            raise
        return loss

    @torch.no_grad()
    @disable_dynamo
    def measure_gradients(self) -> GradientNorms | None:
        """Have the device find what a step must know of the gradients, and return it unread, for a caller that reads other values anyway:

            norms = optimizer.measure_gradients()
            if norms is not None:
                loss, norms.values = read_together(loss, norms.values)  # on the host
            optimizer.step(norms=norms)

        None if a group has `nonfinite` other than "ignore": the step then looks by itself. All ranks of a parameter call it.
        """
        return measure_gradients(self._current_roster().params, self._sharding.group_of)

    def _collect(self, norms: GradientNorms | None) -> StepPlan | None:
        """Everything that can be refused is refused here, before the first change. None: there is nothing to do.

        torch's tools for distributed checkpoints ask an optimizer for its state by a first step with learning rate 0 and zero gradients
        only: it creates the state and counts for nothing.
        """
        if self._pending.waiting or self._pending.launched:
            self._finish_refreshes()
        if self._roster is None or not self._is_unchanged(self._roster):
            self._current_roster()
        roster = self._roster
        assert roster is not None
        found = inspect_gradients(roster.params, self._sharding.group_of, norms)
        rates = [settings.lr for settings in roster.groups]
        if not self.state and not any(rates) and are_zero(roster.params, self._sharding.group_of):
            self._create_state(found.usable)
            return None
        key = (roster, list(map(id, found.usable)), list(map(rates.index, rates)))
        plan = self._plan
        if plan is None or plan.key != key or not plan.holds(self.state):
            self._plan = None
            plan = self._plan = self._make_plan(found.usable, key)
        for rule, t in plan.intervals:
            rule.due(t + plan.num_steps + 1)  # raises on all ranks, where it does
        plan.idle = found.idle
        self._count_step(plan.runs, found.idle)
        plan.count_step()
        if found.num_bad:
            self._count("nonfinite_skipped", found.num_bad)
        return plan

    def _is_unchanged(self, roster: Roster) -> bool:
        """Whether the parameter groups are those that the roster was made of, learning rates aside, which are read anew."""
        if len(self.param_groups) != len(roster.groups):
            return False
        for group, known in zip(self.param_groups, roster.groups, strict=True):
            if group is not known.group or list(map(id, group["params"])) != known.ids:
                return False
            if list(map(group.get, known.names)) != known.values:
                return False
        if _places(roster.params) != roster.places or (roster.frozen and _is_any_thawed(roster.frozen)):
            return False
        for known in roster.groups:
            known.lr = float(known.group["lr"])
            if not 0 <= known.lr < math.inf:
                return False  # which is refused when it is made anew
        return True

    def _make_plan(self, usable: list[ParamInfo], key: tuple[object, ...]) -> StepPlan:
        """Raises ValueError before anything has changed."""
        steps = {id(one.param): int(state["step"]) if (state := self.state.get(one.param)) else 0 for one in usable}
        for _, due in {(id(one.rule), steps[id(one.param)]): one for one in usable if one.layout.dims}.items():
            due.rule.due(steps[id(due.param)] + 1)  # type: ignore[attr-defined]
        self._bring_buckets_up_to_date()
        self._create_state(usable)
        numbers: dict[object, int] = {}
        for settings in key[0].groups:  # type: ignore[attr-defined]
            settings.number = numbers.setdefault(settings.key(), len(numbers))
        alive = [one for one in usable if one.param.numel()]
        exchanges = self._sharding.exchanges(alive)
        exchange_of = {id(one.param): number for number, exchange in enumerate(exchanges) for one in exchange.params}
        taking = {id(one.param): one for one in alive}
        runs = [run for bucket in self._buckets for run in runs_of(bucket, taking, steps, exchange_of)]
        gathered = [one for one in alive if self._is_gathered(one.param)]
        return StepPlan.of(usable, runs, exchanges, gathered, self._members() if exchanges else {}, self.state, key)

    def _make_roster(self) -> Roster:
        roster = super()._make_roster()
        roster.places = _places(roster.params)
        return roster

    # --- its phases -------------------------------------------------------------------------------------------------------------------

    def _walk(self, runs: list[MemberRun], exchanges: list[OwnerExchange], members: Mapping[int, Member]) -> None:
        statistics = [run for run in runs if run.has_statistics]
        if statistics or any(exchange.has_statistics for exchange in exchanges):
            with record_function("lather.optim.statistics"):
                coming = [exchange if exchange.has_statistics else None for exchange in exchanges]
                self._work_through(statistics, coming, members, is_last=False)
        due = [run for run in runs if run.due is not NOBODY]
        if early := [run for run in due if run.rule.refreshes_first and not run.is_async]:
            self._refresh_bases(early)
        with record_function("lather.optim.update"):
            self._work_through(runs, exchanges, members, is_last=True)
        if late := [run for run in due if not run.rule.refreshes_first and not run.is_async]:
            self._refresh_bases(late)
        if beside_the_next := [run for run in due if run.is_async]:
            for precision, jobs in self._due(beside_the_next):
                self._pending.add(precision, jobs)

    def _work_alike(self, one: ParamInfo, idle: dict[int, list[bool]]) -> None:
        """All phases for one parameter that is gathered on all its ranks."""
        state = self.state[one.param]
        whole = Gathered(one, self._sharding, state)
        step = int(state["step"])
        runs = runs_of(whole.bucket, {id(one.param): one}, {id(one.param): step - 1}, {})
        self._count_step(runs, idle)
        self._walk(runs, [], {})
        self._finish_refreshes()
        whole.keep(*one.rates())

    def _work_through(
        self, runs: list[MemberRun], exchanges: Sequence[OwnerExchange | None], members: Mapping[int, Member], *, is_last: bool
    ) -> None:
        """The runs whose gradients are here, while the first others travel; then exchange by exchange, the next one on its way."""
        coming, leaving = deque(filter(None, exchanges)), deque[OwnerExchange]()
        if coming:
            coming[0].launch_in()
        self._work_on([run for run in runs if run.exchange is None] if exchanges else runs, is_last=is_last)
        for number, exchange in enumerate(exchanges):
            if exchange is None:
                continue
            coming.popleft()
            if coming:
                coming[0].launch_in()
            exchange.finish_in(members)
            self._work_on([run for run in runs if run.exchange == number], is_last=is_last)
            if is_last:
                exchange.launch_out(members)
                leaving.append(exchange)
                if len(leaving) > 1:
                    leaving.popleft().finish_out()
        for exchange in leaving:
            exchange.finish_out()

    def _work_on(self, runs: list[MemberRun], *, is_last: bool) -> None:
        alike: dict[tuple[str, int], list[MemberRun]] = {}
        for run in runs:
            if run.flat is None or not is_last or not run.take_whole():
                alike.setdefault((run.precision, run.rule.num_streams), []).append(run)
        for (precision, num_streams), some in alike.items():
            chunks: Iterable[Chunk] = [chunk for run in some for chunk in run.chunks]
            with matmul_precision(precision):
                for chunk in chunks if num_streams == 1 else on_streams(chunks, self._streams, num_streams, some[0].bucket.device):
                    if is_last:
                        chunk.take_update()
                    else:
                        chunk.take_statistics()

    def _refresh_bases(self, runs: list[MemberRun]) -> None:
        with record_function("lather.optim.refresh"):
            for precision, jobs in self._due(runs):
                with matmul_precision(precision):
                    refresh(jobs, self._count)

    def state_bytes_of_owners(self) -> dict[tuple[int, ...], dict[int, int]]:
        """Bytes of state of the sharded parameters that the optimizer has planned, by the ranks that they are spread over and by owner
        among these (global ranks); empty before the first step."""
        return self._sharding.state_bytes()

    def put_off_refreshes(self) -> PendingRefreshes:
        """From now on leave the refreshes of groups with `async_refresh` undone at the end of a step, and return them: the caller does
        them in pieces (`PendingRefreshes.work`), where it would wait for other ranks. The next step does what is left."""
        self._pending.put_off = True
        return self._pending

    def _finish_refreshes(self) -> None:
        self._pending.finish()

    def _no_refreshes(self) -> PendingRefreshes:
        return PendingRefreshes(self._count, matmul_precision)

    def _due(self, runs: list[MemberRun]) -> Iterator[tuple[str, list[DimRefresh]]]:
        """The refreshes of this step, by the matmul precision that they ask for."""
        jobs: dict[str, list[DimRefresh]] = {}
        for run in runs:
            rows = due_rows(run, self._staggering, self._count)
            rule = run.rule
            assert isinstance(rule, RefreshingRule)
            for dim in run.bucket.dims if len(rows) else ():
                jobs.setdefault(rule.qr_fp32_matmul_prec, []).append(DimRefresh(run, dim, rows, rule.methods(run.due.first)))
        yield from jobs.items()

    def _staggering(self) -> Stagger:
        """Where each matrix stands in its interval."""
        assert self._roster is not None
        if self._stagger is None or self._stagger[0] is not self._roster:
            costs = []
            for one in self._roster.params:
                if isinstance(one.settings.rule, RefreshingRule) and one.settings.rule.stagger_refresh:
                    cost = one.rule.refresh_cost(one.layout.matrix) if isinstance(one.rule, RefreshingRule) else 0.0
                    costs.append((id(one.param), one.layout.batch, cost))
            self._stagger = (self._roster, Stagger.of(costs))
        return self._stagger[1]

    def _reset_buckets(self) -> None:
        super()._reset_buckets()
        self._plan, self._stagger = None, None

    def _count_step(self, runs: list[MemberRun], idle: dict[int, list[bool]]) -> None:
        """Set t, what is due, who is idle, in runs that knew the step before. An interval that makes no sense raises before any of it."""
        due = [run.rule.due(run.step + 1) if run.bucket.dims else NOBODY for run in runs]  # type: ignore[attr-defined]
        for run, now in zip(runs, due, strict=True):
            run.step += 1
            if run.lr != run.settings.lr:
                run.take_rates()
            run.due, run.idle = now, []
            if idle and run.bucket.has_experts:
                marks = [idle[id(member.param)][number] for member in run.members for number in member.numbers]
                run.idle = marks if any(marks) else []


def _is_any_thawed(params: Sequence[Tensor]) -> bool:
    return any(p.requires_grad or p.grad is not None for p in params)


def _places(params: Sequence[ParamInfo]) -> list[Any]:
    """Where the data of parameters are in memory, and with what strides."""
    places: list[Any] = [one.param.data_ptr() if one.spread is None else local(one.param).data_ptr() for one in params]
    return places + [one.param.stride() for one in params]


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """fp32 matmul precision ("highest" | "high" | "medium", as torch names them) inside the block, the caller's own after it.

    torch keeps it twice, process-wide: as one word (`torch.set_float32_matmul_precision`), which compiled code looks at, and per backend
    (`fp32_precision`), which products go by. Reading the word raises where the two disagree; it never disagrees with backends at fp32.
    """
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = gpu.fp32_precision, cpu.fp32_precision
    gpu.fp32_precision = cpu.fp32_precision = "ieee"
    word = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_float32_matmul_precision(word)
        gpu.fp32_precision, cpu.fp32_precision = before
