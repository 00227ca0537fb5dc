"""`MatrixOptimizer`, the torch Optimizer under every rule of the family: it holds state, checks input and runs the phases of a step.

    collect      check every gradient and interval before anything is changed; create missing state; count the step; form the runs
    statistics   Kronecker factors from the gradients (rules whose statistics come first)
    refresh      new eigenbases where they are due
    update       project, Adam, project back, change the parameters

A rule names its phases in order and implements them on batches (B, n_0, n_1, ...) with a `MatrixState`; layouts, buckets and chunks are
`lather.optim.layout`'s and `lather.optim.buckets`' business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim.optimizer import ParamsT

from lather.optim.adamw import fused_adamw, takes_fused
from lather.optim.buckets import Bucket, Chunk, GroupNow, Run, check_state, layout_options, make_buckets, parameter_layout, runs_of
from lather.optim.inspection import Gradient, inspect_gradients
from lather.optim.options import OTHER_GROUP_KEYS, check_options, comparable, refresh_interval
from lather.optim.precision import SideStreams, matmul_precision, no_autocast, on_streams
from lather.optim.refresh import FactorRefresh, Stagger, refresh, refresh_cost
from lather.optim.state import MatrixState, layout_bytes

GIB = 2**30

RefreshKind = Literal["none", "first", "all", "interval"]
"""What a step does to the bases: nothing; the first ones; all that saw a gradient; those whose interval is full."""


class MatrixOptimizer(torch.optim.Optimizer):
    """Base of the family. A rule sets `_phases` and implements `_refresh_kind`, `_update` and, if it is a phase of its own, `_statistics`.

    State per parameter, flat keys: `step`, `exp_avg`, `exp_avg_sq`, and `factor_i`, `basis_i` and, for some rules, `eigenvalues_i` for each
    inner dim i with a factor. All but `step` are views of a stack that parameters with equal matrices share.
    """

    _phases: ClassVar[tuple[str, ...]] = ("update", "refresh")
    preset: ClassVar[dict[str, Any]] = {}
    """Options whose defaults a subclass changes."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._buckets: list[Bucket] = []
        self._stagger: Stagger | None = None
        self._streams = SideStreams()
        self._counts: dict[str, int] = {}
        super().__init__(params, defaults)

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
            if p.is_complex():
                raise TypeError(f"{name} is complex ({p.dtype}); the SOAP family takes real parameters: give it to torch.optim.Adam")
            if group["matrix_layout"] != "tensor" and p.dim() == 1 and group["max_precond_dim"] > 0:
                raise ValueError(
                    f"{name} has shape {tuple(p.shape)}, but matrix_layout={group['matrix_layout']!r} needs a matrix: "
                    "put it in a group with matrix_layout='tensor'"
                )
            try:
                layout = parameter_layout(p, group)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            size = layout_bytes(layout, group)
            if group["max_state_bytes"] is not None and size > group["max_state_bytes"]:
                raise ValueError(
                    f"state of {name} with shape {tuple(p.shape)} would take {size / GIB:.3f} GiB, more than max_state_bytes "
                    f"({group['max_state_bytes'] / GIB:.3f} GiB): lower max_precond_dim for one-sided preconditioning, "
                    "use the matrix_layout ('per_expert', 'stacked') with the smaller factors, or raise the limit"
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
            runs = self._collect()
        with no_autocast(run.bucket.params[0].device.type for run in runs):
            for phase in self._phases:
                with record_function(f"lather.optim.{phase}"):
                    if phase == "refresh":
                        self._refresh_bases(runs)
                    elif phase == "statistics":
                        self._work_through(runs, self._statistics_of)
                    else:
                        self._work_through(self._without_fused(runs), self._update_of)
        return loss

    def _collect(self) -> list[Run]:
        """Everything that can be refused is refused here, before the first change."""
        gradients = [
            Gradient(p, group, _param_name(group, index))
            for group in self.param_groups
            for index, p in enumerate(group["params"])
            if p.grad is not None
        ]
        groups = self._groups_now()
        usable, idle = inspect_gradients(gradients)
        intervals: dict[tuple[int, int], int] = {}
        taking = []
        for one in usable:
            step = int(self.state[one.param]["step"]) + 1 if self.state.get(one.param) else 1
            key = (step, id(one.group))
            if key not in intervals:
                intervals[key] = refresh_interval(step, one.group)
            taking.append((one, step, intervals[key]))
        self._bring_buckets_up_to_date()
        self._count("nonfinite_skipped", len(gradients) - len(usable))
        self._create_state([(one.param, one.group) for one in usable])
        for one in usable:
            self.state[one.param]["step"] += 1
        steps = {id(one.param): (step, interval) for one, step, interval in taking if one.param.numel()}
        return [run for bucket in self._buckets for run in runs_of(bucket, steps, idle, groups)]

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

    def _work_through(self, runs: list[Run], work: Callable[[Chunk], None]) -> None:
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
        chunk.apply(u, chunk.run.lr, self._decay(chunk.run.lr, options))
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
            jobs = []
            for run in some:
                kind = self._refresh_kind(run.step, run.options)
                rows = self._due_rows(run, kind)
                method = self._refresh_method(kind, run.options)
                jobs += [FactorRefresh(run, dim, rows, method, first=kind == "first") for dim in run.bucket.factor_dims if len(rows)]
            with matmul_precision(precision):
                refresh(jobs, self._count)

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
                    layout = parameter_layout(p, group)
                    costs.append((id(p), layout.batch, refresh_cost(layout.inner, layout.factor_dims)))
            self._stagger = Stagger.of(costs)
        for i in range(run.first, run.last):
            for matrix in range(run.bucket.layouts[i].batch):
                yield self._stagger.shift(id(run.bucket.params[i]), matrix, run.interval)

    # --- state ----------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state of every parameter that has none, as it is before the first gradient (for loading checkpoints)."""
        self._create_state([(p, group) for group in self.param_groups for p in group["params"]])

    def _create_state(self, members: list[tuple[Tensor, dict[str, Any]]]) -> None:
        new = [(p, group) for p, group in members if not self.state.get(p)]
        for bucket in make_buckets(new):
            self._buckets.append(bucket)
            for p, views in zip(bucket.params, bucket.views, strict=True):
                self.state[p] = {"step": torch.zeros((), dtype=torch.float32), **views}

    def _bring_buckets_up_to_date(self) -> None:
        """State is stacked anew if some of it is not a view of a bucket (it was loaded, unpickled, replaced or deleted), or if an option on
        which layouts depend was changed. Raises ValueError, before it changes anything, for state that no longer fits.
        """
        members = [(p, group) for group in self.param_groups for p in group["params"] if self.state.get(p)]
        options = {id(group): layout_options(group) for group in self.param_groups}
        current = [
            all(self.state.get(p, {}).get(name) is view for name, view in views.items())
            and made_for == (options.get(id(group)), p.is_contiguous())
            for bucket in self._buckets
            for p, group, views, made_for in zip(bucket.params, bucket.groups, bucket.views, bucket.made_for, strict=True)
        ]
        if all(current) and len(current) == len(members):
            return
        for p, group in members:
            check_state(self.state[p], p, group, f"the state of a parameter of shape {tuple(p.shape)}")
        self._buckets = make_buckets(members, apart={id(p): int(self.state[p]["step"]) for p, _ in members})
        for bucket in self._buckets:
            for p, views in zip(bucket.params, bucket.views, strict=True):
                for name, view in views.items():
                    view.copy_(self.state[p][name])
                    self.state[p][name] = view

    def state_dict(self) -> dict[str, Any]:
        """As torch's, without options that are functions: like those of torch's learning-rate schedulers, they are not saved."""
        saved = super().state_dict()
        groups = [{key: value for key, value in group.items() if not callable(value)} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load bit for bit: torch's own casts state to the parameter's dtype, which would ruin fp32 factors of bf16 parameters.

        The exact values go in between the caller's pre-hooks and post-hooks, on top of what torch has loaded. A state that does not fit
        the parameters raises ValueError, and nothing has been changed.
        """
        final: dict[str, Any] = {}
        own = [{key: group[key] for key in self.defaults} for group in self.param_groups]

        def note(_: torch.optim.Optimizer, after_hooks: dict[str, Any]) -> dict[str, Any]:
            counts = [[len(group["params"]) for group in groups] for groups in (self.param_groups, after_hooks["param_groups"])]
            if counts[0] != counts[1]:
                raise ValueError(
                    f"the saved optimizer has parameter groups of {counts[1]} parameters, this one of {counts[0]}: they must be equal"
                )
            groups = [{**options, **saved} for options, saved in zip(own, after_hooks["param_groups"], strict=True)]
            final.update({**after_hooks, "param_groups": groups})
            for number, (p, group, state) in enumerate(self._saved_states(final)):
                if state:
                    check_state(state, p, group, f"the saved state of parameter {number} with shape {tuple(p.shape)}")
            return final

        def load_exactly(_: torch.optim.Optimizer) -> None:
            for p, _group, saved in self._saved_states(final):
                for key, value in saved.items():
                    if isinstance(value, Tensor):
                        self.state[p][key] = value.detach().to("cpu" if key == "step" else p.device, copy=True)
                    else:
                        self.state[p][key] = deepcopy(value)
            self._reset_buckets()
            self._bring_buckets_up_to_date()

        handles = [self.register_load_state_dict_pre_hook(note), self.register_load_state_dict_post_hook(load_exactly, prepend=True)]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _saved_states(self, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
        """(parameter, its saved group, its saved state)."""
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, saved_id in zip(group["params"], saved_group["params"], strict=True):
                options = {key: saved_group.get(key, default) for key, default in self.defaults.items()}
                yield p, options, state_dict["state"].get(saved_id, {})

    def _reset_buckets(self) -> None:
        self._buckets, self._stagger, self._streams = [], None, SideStreams()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_buckets()
        self.__dict__.setdefault("_counts", {})
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def __getstate__(self) -> dict[str, Any]:
        """Views become tensors of their own: pickle would write the whole stack for each."""
        state = super().__getstate__()
        apart = {p: {key: x.clone() if isinstance(x, Tensor) else x for key, x in entries.items()} for p, entries in state["state"].items()}
        return {**state, "state": defaultdict(dict, apart), "_counts": self._counts}

    @property
    def counters(self) -> dict[str, int]:
        """Since construction: factors refreshed; skipped by the criterion or for want of tokens; retried by QR after Cholesky-QR; failed,
        so that their basis stays; and gradients skipped."""
        names = ("refreshes_done", "refreshes_skipped", "refreshes_retried", "refreshes_failed", "nonfinite_skipped")
        return {name: self._counts.get(name, 0) for name in names}

    def _count(self, name: str, more: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + more


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
