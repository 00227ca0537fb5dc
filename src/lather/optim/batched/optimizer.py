"""`MatrixOptimizer`, the torch Optimizer for every rule. A step checks the gradients and then
executes its plan in phases:

collect      check every gradient and interval before anything changes; create missing state; make a
plan if anything is new; count the step statistics   call `Rule.statistics` of rules that define it
refresh      refresh the bases that are due, for rules that do so before the update
update       call `Rule.update` and change the parameters
refresh      refresh the bases that are due, for all other rules; with `async_refresh` while the
caller works until the next step"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import MISSING
from itertools import zip_longest
from operator import attrgetter
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.autograd.profiler import record_function
from torch.optim.optimizer import ParamsT

from lather.optim.batched.arguments import describe_unknown, translated
from lather.optim.batched.gradients import (
    GradientNorms,
    Inspection,
    are_zero,
    inspect_gradients,
    measure_gradients,
)
from lather.optim.batched.pending import PendingRefreshes
from lather.optim.batched.plan import (
    Chunk,
    MemberRun,
    PlanKey,
    StepPlan,
    change_weights,
    close_buckets,
    is_unchanged,
    matmul_precision,
    open_buckets,
    places_of,
    runs_of,
    step_counts,
    take_whole,
)
from lather.optim.batched.refresh import DimRefresh, due_rows, refresh
from lather.optim.batched.roster import ParamInfo
from lather.optim.batched.stateful import StatefulOptimizer
from lather.optim.batched.streams import no_autocast, on_streams
from lather.optim.options import Option, documentation_of, options_of
from lather.optim.plain import saveable
from lather.optim.rule import NOBODY, RefreshingRule, Rule
from lather.optim.sharded.exchange import OwnerExchange
from lather.optim.sharded.gathered import Gathered
from lather.torch_private import disable_dynamo

P = ParamSpec("P")
S = TypeVar("S", bound="MatrixOptimizer")


def constructor(
    rule: Callable[P, Rule],
) -> Callable[[Callable[[S, ParamsT, Rule], None]], Callable[Concatenate[S, ParamsT, P], None]]:
    """Decorate the `__init__` of an optimizer: callers pass the options of its rule instead of the
    rule, and editors and mypy know the names and types of these options."""

    def decorate(
        init: Callable[[S, ParamsT, Rule], None],
    ) -> Callable[Concatenate[S, ParamsT, P], None]:
        def construct(self: S, *args: Any, **options: Any) -> None:
            options = translated(options, self.published, {})
            if unknown := [name for name in options if name not in signature.parameters]:
                known = [name for name in ["params", *own.parameters] if name != "tp_group"]
                others = {cls.__name__: cls.rule for cls in _optimizers(MatrixOptimizer)}
                raise TypeError(describe_unknown(type(self).__name__, unknown, known, others))
            try:
                given = signature.bind(self, *args, **options)
            except TypeError as error:  # `params` is missing, or an argument is given twice
                raise TypeError(f"{type(self).__name__}: {error}") from None
            init(self, given.arguments["params"], rule(*given.args[2:], **given.kwargs))

        own = inspect.signature(rule)
        construct.__qualname__ = construct.__name__ = init.__qualname__  # in messages of Python
        first = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("self", "params")
        ]
        signature = own.replace(parameters=[*first, *own.parameters.values()])
        construct.__signature__ = signature  # type: ignore[attr-defined]
        return construct  # type: ignore[return-value]  # `signature` has what it takes

    return decorate


def _optimizers(cls: type[MatrixOptimizer]) -> Iterator[type[MatrixOptimizer]]:
    """Yield the optimizers of the package that have a rule, in the order of their definition."""
    for one in cls.__subclasses__():
        if "rule" in vars(one) and one.__module__.startswith("lather."):
            yield one
        yield from _optimizers(one)


class _Documented(type):
    """Metaclass that appends the options of the rule to the docstring of an optimizer, when
    somebody reads it."""

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        own, rule = vars(cls).get("__doc__") or cls.__name__, vars(cls).get("rule")
        if rule is None:
            return own
        options, texts = options_of(rule), documentation_of(rule)
        lines = [
            f"    {name}: {texts.get(name, '')}{_default(option)}"
            for name, option in options.items()
        ]
        return "\n".join(
            [own, "", "Args:", "    params: Parameters, as for `MatrixOptimizer`.", *lines]
        )


def _default(option: Option) -> str:
    return "" if option.default is MISSING else f" Default: {saveable(option.default)!r}."


class MatrixOptimizer(StatefulOptimizer, metaclass=_Documented):
    """An optimizer in which each parameter group has a rule.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups. Every option of a rule may
            differ between groups. A group may also have another rule: `{"params": ..., "rule":
            "muon", "momentum": 0.9}`. Give the rule as its name, its class or an instance.
        rule: rule of the groups that do not give one.

    Raises:
        ValueError, TypeError: at construction, for a value out of range or a parameter that does
        not suit the layout; names the remedy.

    The state of a parameter is flat: `step`, and the entries of its rule (`Rule.state`). All but
    `step` are views of a stack that parameters with matrices of equal shape share. With
    `async_refresh`, call `state_dict()` before you read `state` between two steps."""

    rule: ClassVar[type[Rule]]
    """Class of a subclass's default rule."""

    # --- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    @disable_dynamo
    def step(
        self, closure: Callable[[], Any] | None = None, *, norms: Inspection | None = None
    ) -> Any:
        """Take a step for every parameter that has a gradient, and return the closure's loss.

        `norms`: what `measure_gradients` measured of these gradients, read by `on_host`; the step
        then does not measure them.

        Raises TypeError for sparse or complex gradients. Raises ValueError for non-finite gradients
        under `nonfinite="raise"`, and if both `norms` and a closure, which computes other
        gradients, are given. In all these cases nothing has changed.
        """
        if closure is not None and norms is not None:
            raise ValueError(
                "norms and closure are both given, but the closure computes other gradients: give "
                "one of the two"
            )
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
                    self._step_replicated(one, plan.idle)
                open_buckets(plan.buckets, self.state)
                self._walk(plan.runs, plan.exchanges)
        except BaseException:
            self._plan = None
            for exchange in plan.exchanges:
                exchange.forget()
            raise
        finally:
            close_buckets(plan.buckets)
            increment_version(plan.params)  # a fused kernel does not tell autograd
        return loss

    @torch.no_grad()
    @disable_dynamo
    def measure_gradients(self) -> GradientNorms:
        """Start on the device the measurements of the gradients that a step needs, for a caller
        that reads other values from it anyway:

            norms = optimizer.measure_gradients()
            values = torch.cat((loss[None], norms.values)).cpu()  # one wait
            optimizer.step(norms=norms.on_host(values[1:]))

        There are no values if a group has `nonfinite` other than "ignore"; the step then measures
        the gradients itself. All ranks over which parameters are spread must call it together.
        """
        return measure_gradients(self._current_roster().params, self._groups.sharding.groups)

    def _collect(self, norms: Inspection | None) -> StepPlan | None:
        """Check everything that can raise, before anything changes, and return the plan of the
        step, or None if there is nothing to do.

        torch's tools for distributed checkpoints make an optimizer create its state by a first step
        with learning rate 0 and only zero gradients: such a step creates the state and is not
        counted.
        """
        if self._pending.waiting or self._pending.launched:
            self._pending.finish()
        if self._is_lent:
            self._take_back_state()
        roster = self._groups.roster
        if roster is None or not is_unchanged(roster, self.param_groups):
            roster = self._current_roster()
        found = inspect_gradients(roster.params, self._groups.sharding.groups, norms)
        is_new = not self.state and not any(one.lr for one in roster.groups)
        if is_new and are_zero(roster.params, self._groups.sharding.groups):
            self._store.create(found.usable, self.state, self._groups.sharding)
            return None
        plan = self._plan
        key = PlanKey(roster, list(map(id, found.usable)), roster.pattern)
        if plan is None or plan.key != key or not plan.holds(self.state, self._store.places):
            self._plan = None
            plan = self._plan = self._make_plan(found.usable, key)
        for one, t in plan.intervals:
            one.rule.due(t + plan.num_steps + 1)  # type: ignore[attr-defined]  # every rank calls it, so that all raise if it does
        plan.idle = found.idle
        self._count_step(plan.runs, found.idle)
        plan.count_step()
        if found.num_bad:
            self._counts["nonfinite_skipped"] += found.num_bad
        return plan

    def _make_plan(self, usable: list[ParamInfo], key: PlanKey) -> StepPlan:
        """Make the plan, and the state of parameters that have none. An error is raised before
        anything changes."""
        store, sharding = self._store, self._groups.sharding
        store.bring_up_to_date(self._current_roster(), self.state, sharding)
        step_of = step_counts(usable, self.state)
        with_bases = [one for one in usable if one.layout.dims]
        due = {(id(one.rule), step_of[id(one)]): one.rule for one in with_bases}
        for (_, step), rule in due.items():
            rule.due(step + 1)  # type: ignore[attr-defined]
        store.create(usable, self.state, sharding)
        alive = [one for one in usable if one.param.numel()]
        exchanges, exchange_of = list[OwnerExchange](), dict[int, OwnerExchange]()
        if sharding.has_shares:
            exchanges = sharding.exchanges(alive, store.members())
            exchange_of = {id(x.param): exchange for exchange in exchanges for x in exchange.params}
        taking = {
            id(one.param): (one, step_of[id(one)], exchange_of.get(id(one.param))) for one in alive
        }
        runs = [run for bucket in store.buckets for run in runs_of(bucket, taking)]
        store.places = places_of(self.state)
        return StepPlan(usable, runs, exchanges, self.state, key)

    # --- the phases of the step -------------------------------------------------------------------

    def _walk(
        self, runs: list[MemberRun], exchanges: list[OwnerExchange], *, defers: bool = True
    ) -> None:
        """Run all phases for runs whose buckets are open. Without `defers`, refreshes are done now
        that could be done until the next step."""
        statistics = list(filter(attrgetter("info.has_statistics"), runs))
        coming = list(filter(attrgetter("has_statistics"), exchanges))
        if statistics or coming:
            with record_function("lather.optim.statistics"):
                self._work_through(statistics, coming, is_last=False)
        early, late, deferred = list[MemberRun](), list[MemberRun](), list[MemberRun]()
        for run in runs:
            if run.due is not NOBODY:
                own = early if run.rule.refreshes_first else late
                (own if not run.is_async else deferred if defers else late).append(run)
        if early:
            self._refresh_bases(early)
        with record_function("lather.optim.update"):
            self._work_through(runs, exchanges, is_last=True)
        if late:
            self._refresh_bases(late)
        if deferred:
            self._pending.add(self._due(deferred))

    def _step_replicated(self, one: ParamInfo, idle: dict[int, list[bool]]) -> None:
        """Run all phases for one parameter that every rank gathers and updates
        (`ownership="replicated"`)."""
        state = self.state[one.param]
        whole = Gathered(one, self._groups.sharding, state)
        runs = runs_of(whole.bucket, {id(one.param): (one, int(state["step"]) - 1, None)})
        self._count_step(runs, idle)
        self._walk(runs, [], defers=False)
        change_weights([whole.weight], [whole.update], one.change())
        whole.keep()

    def _work_through(
        self, runs: list[MemberRun], exchanges: Sequence[OwnerExchange], *, is_last: bool
    ) -> None:
        """Process the runs that need no exchange while the gradients of the first exchange arrive,
        then the runs of one exchange after the other, each while the gradients of the next one
        arrive."""
        leaving: OwnerExchange | None = None
        if exchanges:
            exchanges[0].start_in()
        self._work_on([run for run in runs if run.exchange is None], is_last=is_last)
        for exchange, following in zip_longest(exchanges, exchanges[1:]):
            if following is not None:
                following.start_in()
            exchange.finish_in()
            self._work_on([run for run in runs if run.exchange is exchange], is_last=is_last)
            if is_last:
                exchange.start_out()
                if leaving is not None:
                    _take_arriving(leaving)
                leaving = exchange
        if leaving is not None:
            _take_arriving(leaving)

    def _work_on(self, runs: list[MemberRun], *, is_last: bool) -> None:
        flat = dict[object, list[MemberRun]]()
        alike = dict[object, list[MemberRun]]()
        for run in runs:
            if is_last and run.is_flat:
                key = (id(run.rule), run.step, run.bucket.device, run.members[0].param.dtype)
                flat.setdefault(key, []).append(run)
            else:
                alike.setdefault((run.precision, run.rule.num_streams), []).append(run)
        for some in flat.values():
            if not take_whole(some):
                alike.setdefault((some[0].precision, some[0].rule.num_streams), []).extend(some)
        for some in alike.values():
            chunks: Iterable[tuple[MemberRun, Chunk]] = [
                (run, chunk) for run in some for chunk in run.chunks
            ]
            num_streams = some[0].rule.num_streams
            if num_streams > 1:
                chunks = on_streams(chunks, self._streams, num_streams, some[0].bucket.device)
            with matmul_precision(some[0].precision):
                for run, chunk in chunks:
                    if is_last:
                        chunk.take_update(run)
                    else:
                        chunk.take_statistics(run)

    def _refresh_bases(self, runs: list[MemberRun]) -> None:
        with record_function("lather.optim.refresh"):
            refresh(self._due(runs), self._counts)

    def state_bytes_of_owners(self) -> dict[tuple[int, ...], dict[int, int]]:
        """Return the bytes of optimizer state of all parameters that are spread over ranks: the
        ranks -> owner rank -> bytes (global ranks). Empty before the first step."""
        return self._groups.sharding.state_bytes()

    def defer_refreshes(self) -> PendingRefreshes:
        """From now on defer the refreshes of groups with `async_refresh` and return the object that
        holds them: the caller does them in pieces (`PendingRefreshes.work`) between its own work.
        The next step does the rest."""
        self._pending.deferred = True
        return self._pending

    def _due(self, runs: list[MemberRun]) -> list[DimRefresh]:
        """Return the refreshes of this step."""
        jobs = []
        for run in runs:
            assert self._groups.roster is not None
            assert isinstance(run.rule, RefreshingRule)
            if rows := due_rows(run, self._groups.roster, self._counts):
                jobs += [
                    DimRefresh(run, dim, rows, run.rule.methods(run.due.first))
                    for dim in run.bucket.dims
                ]
        return jobs

    def _count_step(self, runs: list[MemberRun], idle: dict[int, list[bool]]) -> None:
        """Set t, the refreshes that are due and the idle experts of the runs for this step. An
        invalid interval raises before that."""
        due = [run.rule.due(run.step + 1) if run.bucket.dims else NOBODY for run in runs]  # type: ignore[attr-defined]
        for run, now in zip(runs, due, strict=True):
            run.step += 1
            if run.version != run.settings.version:
                run.take_values()
            run.due, run.idle = now, []
            if idle and run.bucket.has_experts:
                marks = [
                    idle[id(member.param)][number]
                    for member in run.members
                    for number in member.numbers
                ]
                run.idle = marks if any(marks) else []


def _take_arriving(exchange: OwnerExchange) -> None:
    """Change this rank's weights by the updates of an exchange."""
    for change, (weights, updates) in exchange.finish_out().items():
        change_weights(weights, updates, change)
