"""`GroupedOptimizer`: parameter groups, each with its rule, and the roster of parameters that is
made from them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.optim.engine import flat
from lather.optim.engine.group_keys import listed, unknown_keys
from lather.optim.engine.matrix_layout import Layout, layout_of, rule_for_dtype
from lather.optim.engine.roster import GroupSettings, ParamInfo, Roster, group_options, names_of
from lather.optim.options import name_of, options_of
from lather.optim.plain import as_count
from lather.optim.rule import Rule
from lather.optim.rules import RULES, find_rule
from lather.optim.sharded.placement import Spread
from lather.optim.sharded.sharding import Sharding

GIB = 2**30


class GroupedOptimizer(torch.optim.Optimizer):
    """Optimizer with parameter groups that hold the options of their rules as plain values."""

    _unknown_keys: frozenset[str] = frozenset()
    """Keys that mean nothing to the rules of their groups."""
    _named_keys: frozenset[str] = frozenset()
    """Keys of that kind that a warning has named."""

    def __init__(self, params: ParamsT, rule: Rule) -> None:
        self._default, self._rules = rule, {name_of(type(rule)): type(rule)}
        self._roster: Roster | None = None
        self._sharding = Sharding(rule.tp_group)
        self._had_matrices: dict[str, bool] = {}
        """Name of each rule for matrices (or that keeps their norms) -> whether it has had any."""
        self._is_made = False
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"params is a model, {type(params).__name__}: give parameter_groups(model), "
                "or model.parameters() for one rule on all parameters"
            )
        super().__init__(params, {name: getattr(rule, name) for name in options_of(type(rule))})
        self._is_made = True
        self._check_whole()
        flat.warn_without_matrices(self.param_groups, self._had_matrices, rule)
        self._name_unknown_keys()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; a bad option, layout or parameter raises before
        the group is added.

        A parameter that is given twice (tied weights) counts once. Keys that are no options are
        kept and ignored, unless they ask for another rule or step, or look like misspelt options,
        which raise (`lather.optim.engine.group_keys`).
        """
        number = len(self.param_groups)
        with _naming(param_group, number):
            rule, given = self._rule_of(param_group)
            given = {**given, **{k: param_group[k] for k in options_of(rule) if k in param_group}}
            own = group_options(given, rule, self._default)
            made = rule(**own)
            unknown = self._unknown_in(param_group, made, inert=self.defaults)
            plain = {name: getattr(made, name) for name in own} | listed(param_group)
            if "partition_dim" in param_group:
                plain["partition_dim"] = as_count(param_group["partition_dim"])
            params = _each_once(param_group["params"])
            group = {**param_group, "params": params, **plain, "rule": name_of(rule)}
            super().add_param_group(group)
        added = self.param_groups[-1]
        self._rules[name_of(rule)] = rule
        try:
            with _naming(added, number):
                has_matrices = self._check_group(added, made)
            if self._is_made:
                self._check_whole()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._unknown_keys |= unknown
        if has_matrices or flat.is_for_matrices(made):
            name = name_of(rule)
            self._had_matrices[name] = has_matrices or self._had_matrices.get(name, False)
        self._roster = None

    def _unknown_in(self, group: Mapping[str, Any], rule: Rule, **allowed: Any) -> frozenset[str]:
        """Return the keys that mean nothing to the group's rule; raises as `unknown_keys` does."""
        return frozenset(unknown_keys(group, rule, {**RULES, **self._rules}, **allowed))

    def _name_unknown_keys(self) -> None:
        """Name in one warning the keys that mean nothing to the rules of their groups, except for
        those that an earlier warning has named."""
        if new := self._unknown_keys - self._named_keys:
            self._named_keys |= new
            text = "keys of parameter groups that mean nothing to their rules are kept and ignored"
            warnings.warn(f"{text}: {', '.join(sorted(new))}", stacklevel=2)

    def _rule_of(self, group: Mapping[str, Any]) -> tuple[type[Rule], dict[str, Any]]:
        """Return the class of the rule that a group names, and the options of a rule that is given
        as an instance."""
        named = group.get("rule", type(self._default))
        if isinstance(named, Rule):
            return type(named), {name: getattr(named, name) for name in options_of(type(named))}
        if isinstance(named, str):
            return self._rules.get(named) or find_rule(named), {}
        found = getattr(named, "rule", named)  # a class of optimizers stands for its rule
        if not (isinstance(found, type) and issubclass(found, Rule)):
            raise TypeError(
                f"rule={named!r} of a parameter group is not valid: give a rule's name, its class, "
                "or an instance"
            )
        return found, {}

    def _check_group(self, group: dict[str, Any], rule: Rule) -> bool:
        """Raise ValueError or TypeError for a parameter that the rule does not take; return whether
        the rule has a matrix in the group."""
        settings, has_matrices = GroupSettings(group, type(rule)), False
        for name, p in zip(names_of(group), group["params"], strict=True):
            spread = self._sharding.spread_of(p, group, name)
            if p.is_complex():
                raise TypeError(
                    f"{name} is complex ({p.dtype}); {name_of(type(rule))} takes real parameters: "
                    "give it to torch.optim.Adam"
                )
            if rule.matrix_layout != "tensor" and p.dim() == 1 and flat.is_for_matrices(rule):
                flat.check_piece(name, p, f"{name_of(type(rule))} needs whole matrices")
                raise ValueError(
                    f"{name} has shape {tuple(p.shape)}, but matrix_layout={rule.matrix_layout!r} "
                    "needs a matrix: "
                    "put it in a group with matrix_layout='tensor'"
                )
            try:
                layout = whole_layout(p, settings.rule, spread)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            size = layout.state_bytes(
                len(spread.ranks) if spread is not None and rule.ownership == "replicated" else 1
            )
            if rule.max_state_bytes is not None and size > rule.max_state_bytes:
                raise ValueError(
                    f"state of {name} with shape {layout.shape} would take {size / GIB:.3f} GiB, "
                    "more than max_state_bytes "
                    f"({rule.max_state_bytes / GIB:.3f} GiB): lower max_precond_dim or set "
                    "sides='smaller' for one-sided preconditioning, "
                    "use the matrix_layout ('per_expert', 'stacked') with the smaller factors, "
                    "spread the state of a sharded parameter "
                    "over its ranks (ownership='replicated'), or raise the limit"
                )
            has_matrices = has_matrices or flat.is_matrix(layout)
        return has_matrices

    def _check_whole(self) -> None:
        """Raise ValueError if the groups contain flat pieces that a rule would take for vectors."""
        known = [group for group in self.param_groups if group["rule"] in self._rules]
        settings = [GroupSettings(group, self._rules[group["rule"]]) for group in known]
        flat.check_whole(settings, self._had_matrices)

    def _current_roster(self) -> Roster:
        """Return the roster. If parameters or options have changed it is made again; an option that
        is now out of range raises ValueError."""
        if self._roster is None or not self._is_unchanged(self._roster):
            self._roster = None
            roster = self._make_roster()
            self._sharding.plan(roster.params)
            self._roster = roster
        return self._roster

    def _is_unchanged(self, roster: Roster) -> bool:
        """Whether the roster is still valid; it then has the numbers of this step."""
        raise NotImplementedError

    def _make_roster(self) -> Roster:
        groups, params, frozen, unknown = [], [], [], set[str]()
        for number, group in enumerate(self.param_groups):
            if group["rule"] not in self._rules:
                raise ValueError(
                    f"rule {group['rule']!r} of a parameter group was set after the optimizer was "
                    "made: make a new optimizer, "
                    "or give add_param_group other parameters with that rule"
                )
            with _naming(group, number):
                settings = GroupSettings(group, self._rules[group["rule"]])
                unknown |= self._unknown_in(group, settings.rule, exempt=self.defaults)
            if lists := listed(group):
                group.update(lists)
                settings = GroupSettings(group, self._rules[group["rule"]])
            groups.append(settings)
        for settings in groups:
            group = settings.group
            group.update(settings.plain)
            for name, p in zip(names_of(group), group["params"], strict=True):
                if not p.requires_grad and p.grad is None and not self.state.get(p):
                    frozen.append(p)
                    continue
                spread = self._sharding.spread_of(p, group)
                params.append(
                    ParamInfo(p, settings, name, whole_layout(p, settings.rule, spread), spread)
                )
        self._unknown_keys |= unknown
        self._name_unknown_keys()
        flat.check_whole(groups, self._had_matrices)
        return Roster(groups, params, frozen)


@contextmanager
def _naming(group: Mapping[str, Any], number: int) -> Iterator[None]:
    """Add to the message of an error which group it is about: its number, and its name or the
    name of its first parameter if it has one."""
    try:
        yield
    except (TypeError, ValueError) as error:
        params, names = group.get("params"), group.get("param_names")
        pair = params[0] if isinstance(params, list | tuple) and params else None
        first = names[0] if names else pair[0] if isinstance(pair, tuple) else None
        name = f" {group['name']!r}" if isinstance(group.get("name"), str) else ""
        begin = f", which begins with {first!r}" if isinstance(first, str) and not name else ""
        error.args = (f"{error} (parameter group {number}{name}{begin})",)
        raise


def whole_layout(p: Tensor, rule: Rule, spread: Spread | None) -> Layout:
    """Return the layout of the whole parameter."""
    rule = rule_for_dtype(rule, p.dtype)
    if spread is None:
        return layout_of(tuple(p.shape), rule, contiguous=p.is_contiguous())
    return layout_of(spread.shape, rule)


def _each_once(params: Any) -> Any:
    """Return the parameters (or (name, parameter) pairs) in order, without repetitions."""
    if isinstance(params, Tensor | set):  # torch accepts a tensor and refuses a set
        return params
    items = list(params)
    return list({id(item[1] if isinstance(item, tuple) else item): item for item in items}.values())
