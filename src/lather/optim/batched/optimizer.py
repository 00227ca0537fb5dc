"""`MatrixOptimizer`, the torch Optimizer for every rule. It consists of these parts:

    RuleGroups        the rules of its parameter groups, and the roster of their parameters
    StateStore        the state of the parameters, in buckets
    StepPlan          everything that a step does, in the phases below
    PendingRefreshes  the refreshes that are done between two steps

A step checks the gradients and then executes its plan:

    collect      check every gradient and interval before anything changes; create missing state;
                 make a plan if anything is new; count the step
    statistics   call `Rule.statistics` of rules that define it
    refresh      refresh the bases that are due, for rules that do so before the update
    update       call `Rule.update` and change the parameters
    refresh      refresh the bases that are due, for all other rules; with `async_refresh` while the
                 caller works until the next step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version
from torch.autograd.profiler import record_function
from torch.optim.optimizer import ParamsT

from lather.optim.batched.arguments import DocumentedByRule, Published
from lather.optim.batched.buckets import States
from lather.optim.batched.elements import step_whole
from lather.optim.batched.gradients import (
    GradientNorms,
    Inspection,
    are_zero,
    checked_factor,
    inspect_gradients,
    measure_gradients,
    multiply_gradients,
)
from lather.optim.batched.pending import PendingRefreshes
from lather.optim.batched.plan import (
    Chunk,
    Chunks,
    Phase,
    StepPlan,
    change_weights,
    chunks_of,
    close_buckets,
    is_unchanged,
    matmul_precision,
    open_buckets,
    places_of,
)
from lather.optim.batched.refresh import Counts, due_refreshes, refresh
from lather.optim.batched.remainders import remainder_of
from lather.optim.batched.roster import ParamInfo
from lather.optim.batched.rule_groups import RuleGroups
from lather.optim.batched.runs import MemberRun, runs_of
from lather.optim.batched.stateful import StatefulOptimizer
from lather.optim.batched.step_counts import step_counts
from lather.optim.batched.streams import SideStreams, no_autocast, on_streams
from lather.optim.batched.visits import Visits, wait_for_host
from lather.optim.rule import NOBODY, RefreshingRule, Rule
from lather.optim.sharded.exchange import OwnerExchange
from lather.optim.sharded.replicated import ReplicatedStep
from lather.torch_private import disable_dynamo

COUNTERS = (
    *("refreshes_done", "refreshes_skipped", "refreshes_retried", "refreshes_failed"),
    "nonfinite_skipped",
)


class MatrixOptimizer(StatefulOptimizer, metaclass=DocumentedByRule):
    """An optimizer in which each parameter group has a rule.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups. Every option of a rule may
            differ between groups. A group may also have another rule: `{"params": ..., "rule":
            "muon", "momentum": 0.9}`. Give the rule as its name, its class or an instance.
        rule: rule of the groups that do not name a rule.

    Raises:
        ValueError, TypeError: at construction, for a value out of range or a parameter that does
        not suit the layout; names the remedy.

    The state of a parameter is flat: `step`, and the entries of its rule (`Rule.state`). All but
    `step` are views of a stack that parameters with matrices of equal shape share. With
    `async_refresh` or `offload`, call `state_dict()` before you read `state` between two steps."""

    rule: ClassVar[type[Rule]]
    """Class of a subclass's default rule."""
    published: ClassVar[Published] = {}
    """Names of the published interface for options, which arguments and groups may use."""

    def __init__(self, params: ParamsT, rule: Rule) -> None:
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"params is a model, {type(params).__name__}: give parameter_groups(model), "
                "or model.parameters() for one rule on all parameters"
            )
        self._groups, self._counts = RuleGroups(rule, self.published), Counts()
        self._forget_state()
        super().__init__(params, self._groups.defaults)
        self._groups.complete(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; a bad option, layout or parameter raises before
        the group is added.

        A parameter that is given twice (tied weights) counts once. Keys that are no options are
        kept and ignored, unless they ask for another rule or step, or look like misspelt options,
        which raise (`lather.optim.batched.group_keys`).
        """
        self._groups.add(param_group, self.param_groups, super().add_param_group)

    # --- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    @disable_dynamo
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        norms: Inspection | None = None,
        gradient_factor: float = 1.0,
    ) -> Any:
        """Take a step for every parameter that has a gradient, and return the closure's loss.

        `norms`: what `measure_gradients` measured of these gradients, read by `on_host`; the step
        then does not measure them.
        `gradient_factor`: take the step of gradients multiplied by this number, in (0, 1], for
        example to clip them. What is measured, and checked, are the gradients without it. On a GPU
        rules whose kernels multiply them leave them as they are (`Rule.takes_factor`); all others
        are multiplied in place: free them after the step.

        Raises TypeError for sparse or complex gradients. Raises ValueError for non-finite gradients
        under `nonfinite="raise"`, for another `gradient_factor`, and if both `norms` and a closure,
        which computes other gradients, are given. In all these cases nothing has changed.
        """
        factor = checked_factor(gradient_factor)
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
            plan = self._collect(norms, factor)
        if plan is not None:
            self._take(plan, factor)
        return loss

    def _take(self, plan: StepPlan, factor: float) -> None:
        """Take the step of a plan. A step that fails leaves no plan behind."""
        visits: Visits | None = None
        try:
            is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
            with no_autocast() if is_autocast else nullcontext():
                for info in plan.replicated:
                    self._step_replicated(info, plan.idle, factor)
                open_buckets(plan.buckets, self.state)
                if plan.visitors:
                    visits = Visits(plan.visitors, self._streams)
                self._execute(plan.chunks, plan.exchanges, visits)
        except BaseException:
            self._plan = None
            for exchange in plan.exchanges:
                exchange.forget()
            raise
        finally:
            if visits is not None:
                visits.end()
            close_buckets(plan.buckets)
            increment_version(plan.params)  # a fused kernel does not tell autograd

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

    def _collect(self, norms: Inspection | None, factor: float) -> StepPlan | None:
        """Check everything that can raise, before anything changes, multiply gradients by the
        factor if no kernel does, and return the plan of the step, or None if there is nothing to
        do.

        torch's tools for distributed checkpoints make an optimizer create its state by a first step
        with learning rate 0 and only zero gradients: such a step creates the state and is not
        counted.
        """
        if self._pending.waiting or self._pending.launched:
            self._pending.finish()
        if self._store.is_lent:
            self._store = self._store.take_back(self._current_roster(), self.state)
        roster, mesh_groups = self._groups.roster, self._groups.sharding.groups
        if roster is None or not is_unchanged(roster, self.param_groups):
            roster = self._current_roster()
        checks = inspect_gradients(roster.params, mesh_groups, norms)
        is_new = not self.state and not any(settings.lr for settings in roster.groups)
        if is_new and are_zero(roster.params, mesh_groups):
            self._store.create(checks.usable, self.state)
            return None
        plan = self._plan
        places = self._store.places
        if plan is None or not plan.holds(roster, checks.usable, self.state, places):
            self._plan = None
            plan = self._plan = self._make_plan(checks.usable)
        for info, t in plan.intervals:
            # every rank calls it, so that all raise if it does
            info.rule.due(t + plan.num_steps + 1)
        if factor != 1:
            multiply_gradients(checks.usable, factor)
        plan.idle = checks.idle
        count_step(plan.chunks, checks.idle, factor)
        plan.count_step()
        if checks.num_bad:
            self._counts["nonfinite_skipped"] += checks.num_bad
        return plan

    def _make_plan(self, usable: list[ParamInfo]) -> StepPlan:
        """Make the plan, and the state of parameters that have none. An error is raised before
        anything changes."""
        roster, store, sharding = self._current_roster(), self._store, self._groups.sharding
        wait_for_host(self._streams)  # state that was moved may still be under way
        store.bring_up_to_date(roster, self.state)
        step_of = step_counts(usable, self.state)
        with_bases = [info for info in usable if info.layout.dims]
        due = {(id(info.rule), step_of[id(info)]): info.rule for info in with_bases}
        for (_, step), rule in due.items():
            rule.due(step + 1)
        store.create(usable, self.state)
        infos = [info for info in usable if info.param.numel()]
        exchanges = sharding.exchanges(infos, store.members()) if sharding.has_shares else []
        exchange_of = {id(x.param): exchange for exchange in exchanges for x in exchange.params}
        steps = {
            id(info.param): (info, step_of[id(info)], exchange_of.get(id(info.param)))
            for info in infos
        }
        runs = [run for bucket in store.buckets for run in runs_of(bucket, steps)]
        store.places = places_of(self.state)
        return StepPlan(roster, usable, runs, exchanges, self.state)

    # --- the phases of the step -------------------------------------------------------------------

    def _execute(
        self,
        chunks: Chunks,
        exchanges: list[OwnerExchange],
        visits: Visits | None = None,
        *,
        defers: bool = True,
    ) -> None:
        """Run all phases for runs whose buckets are open; those with offloaded state take all of
        them by `visits` in the phase of updates. Without `defers`, no refresh is left for the time
        until the next step."""
        staying = [run for run in chunks if not run.bucket.offloaded]
        statistics = list(filter(attrgetter("info.has_statistics"), staying))
        coming = list(filter(attrgetter("has_statistics"), exchanges))
        if statistics or coming:
            with record_function("lather.optim.statistics"):
                self._execute_phase(statistics, chunks, coming, Chunk.take_statistics)
        early, late, between = list[MemberRun](), list[MemberRun](), list[MemberRun]()
        for run in staying:
            if run.due is NOBODY:
                continue
            if isinstance(run.rule, RefreshingRule) and run.rule.async_refresh:
                (between if defers else late).append(run)
            else:
                (early if run.rule.refreshes_first else late).append(run)
        if early:
            self._refresh_bases(early)
        with record_function("lather.optim.update"):
            self._execute_phase(staying, chunks, exchanges, Chunk.take_update, visits)
        if late:
            self._refresh_bases(late)
        if between:
            jobs = due_refreshes(between, self._groups.roster, self._counts)
            self._pending.add(jobs)

    def _step_replicated(self, info: ParamInfo, idle: dict[int, list[bool]], factor: float) -> None:
        """Run all phases for a parameter that every rank gathers and updates
        (`ownership="replicated"`)."""
        state = self.state[info.param]
        whole = ReplicatedStep(info, self._groups.sharding, state)
        steps = {id(info.param): (info, int(state["step"]) - 1, None)}
        chunks = chunks_of(runs_of(whole.bucket, steps))
        count_step(chunks, idle, factor)
        self._execute(chunks, [], defers=False)
        remainders = [remainder_of(state)] if info.layout.keeps_remainder else []
        change = info.change(), int(state["step"]), remainders
        change_weights([whole.weight], [whole.update], *change)
        whole.keep()

    def _execute_phase(
        self,
        runs: Iterable[MemberRun],
        chunks: Chunks,
        exchanges: Sequence[OwnerExchange],
        phase: Phase,
        visits: Visits | None = None,
    ) -> None:
        """Run a phase for the runs that need no exchange while the gradients of the first exchange
        arrive, then for the runs of each exchange while the gradients of the next exchange arrive;
        in the same order take the step of the runs with offloaded state, if there are `visits`."""
        visiting = [run for run in chunks if run.bucket.offloaded] if visits is not None else []
        leaving: OwnerExchange | None = None
        for exchange, following in zip_longest((None, *exchanges), exchanges):
            if following is not None:
                following.start_in(self.state)
            if exchange is not None:
                exchange.finish_in()
            of_exchange = [run for run in runs if run.exchange is exchange]
            process(of_exchange, chunks, phase, self._streams)
            if visits is not None:
                of_exchange = [run for run in visiting if run.exchange is exchange]
                visits.step(of_exchange, chunks, self._groups.roster, self._counts)
            if exchange is not None and phase is Chunk.take_update:
                exchange.start_out(self.state)
                if leaving is not None:
                    receive_updates(leaving, self.state)
                leaving = exchange
        if leaving is not None:
            receive_updates(leaving, self.state)

    def _refresh_bases(self, runs: list[MemberRun]) -> None:
        with record_function("lather.optim.refresh"):
            refresh(due_refreshes(runs, self._groups.roster, self._counts), self._counts)

    def defer_refreshes(self) -> PendingRefreshes:
        """From now on defer the refreshes of groups with `async_refresh` and return the object that
        holds them: the caller does them in batches (`PendingRefreshes.work`) between its own work.
        The next step does the rest."""
        self._pending.deferred = True
        return self._pending

    @property
    def counters(self) -> dict[str, int]:
        """Counts on this rank since construction: bases that were refreshed; skipped by the
        criterion or because an expert got no token; retried by QR after Cholesky-QR; failed, so
        that the old basis stays; and gradients that were skipped because they were not finite.
        Pending refreshes (`async_refresh`) are not counted yet."""
        return {name: self._counts[name] for name in COUNTERS}


def process(runs: Sequence[MemberRun], chunks: Chunks, phase: Phase, streams: SideStreams) -> None:
    """Run a phase for each chunk of the runs, of which those with equal precision and streams come
    one after the other. Runs of elements take their update together, if the rule has a kernel for
    it."""
    elements = dict[object, list[MemberRun]]()
    alike = dict[tuple[str, int], list[MemberRun]]()
    for run in runs:
        if run.bucket.layout.elementwise and phase is Chunk.take_update:
            key = (id(run.rule), run.step, run.bucket.device, run.bucket.param_dtype)
            elements.setdefault(key, []).append(run)
        else:
            alike.setdefault((run.precision, run.rule.num_streams), []).append(run)
    for same in elements.values():
        if not step_whole(same):
            alike.setdefault((same[0].precision, same[0].rule.num_streams), []).extend(same)
    for (precision, num_streams), same in alike.items():
        batches: Iterable[Chunk] = [chunk for run in same for chunk in chunks[run]]
        if num_streams > 1:
            batches = on_streams(batches, streams, num_streams, same[0].bucket.device)
        with matmul_precision(precision):
            for chunk in batches:
                phase(chunk)


def receive_updates(exchange: OwnerExchange, state: States) -> None:
    """Change this rank's weights by the updates of an exchange."""
    for (change, step), parts in exchange.finish_out(state).items():
        weights, updates, remainders = parts
        change_weights(weights, updates, change, step, remainders)


def count_step(runs: Iterable[MemberRun], idle: dict[int, list[bool]], factor: float) -> None:
    """Set t, the refreshes that are due, the idle experts and the factor of the gradients of the
    runs for a step (`idle`: as in `Inspection`). An invalid interval raises before that."""
    due = [run.rule.due(run.step + 1) if run.bucket.dims else NOBODY for run in runs]
    for run, now in zip(runs, due, strict=True):
        run.step, run.due = run.step + 1, now
        if run.version != run.info.settings.version:
            run.read_numbers()
        run.gradient_factor = factor if factor != 1 and run.info.takes_factor else 1.0
        run.idle = []
        if idle and run.bucket.has_experts:
            run.idle = [idle[id(x.param)][number] for x in run.members for number in x.numbers]
            run.idle = run.idle if any(run.idle) else []
