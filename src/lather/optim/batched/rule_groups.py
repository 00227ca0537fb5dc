"""`RuleGroups`: the rules of an optimizer's parameter groups, and the roster of parameters that is
made from the groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lather.kernels.quantized import BLOCK
from lather.optim.batched import flat
from lather.optim.batched.arguments import Published, translated
from lather.optim.batched.buckets import States
from lather.optim.batched.group_keys import listed, unknown_keys
from lather.optim.batched.layouts import layout_of, rule_for_dtype
from lather.optim.batched.matrix_layout import Layout, RowLayout
from lather.optim.batched.plan import is_unchanged, weight_places
from lather.optim.batched.roster import GroupSettings, ParamInfo, Roster, group_options, names_of
from lather.optim.options import name_of, options_of
from lather.optim.plain import as_count
from lather.optim.rule import Rule
from lather.optim.rules import RULES, find_rule
from lather.optim.sharded.placement import Spread
from lather.optim.sharded.sharding import Sharding

GIB = 2**30

Groups = list[dict[str, Any]]
"""Parameter groups of an optimizer."""


class RuleGroups:
    """The rules of the parameter groups of an optimizer. The groups themselves, which hold the
    options of their rules as plain values, belong to the optimizer, and are given to the methods.
    """

    def __init__(self, default: Rule, published: Published) -> None:
        """`default`: rule of the groups that do not name a rule. `published`: names of the
        published interface for options, which groups may use."""
        self.published = published
        self.default, self.rules = default, {name_of(type(default)): type(default)}
        self.defaults = {name: getattr(default, name) for name in options_of(type(default))}
        """Options of the default rule; a group may contain them though its rule has no such
        options."""
        self.sharding = Sharding(default.tp_group)
        self.roster: Roster | None = None
        """Roster of the groups, if it was made."""
        self.had_matrices: dict[str, bool] = {}
        """Name of each rule for matrices (or that controls them) -> whether it has had any."""
        self._turns_vectors: set[str] = set()
        """Names of rules that have preconditioned a vector (`precondition_1d`)."""
        self._is_complete = False
        """Whether the groups that the optimizer was made with are there."""
        self._unknown: frozenset[str] = frozenset()
        """Keys that mean nothing to the rules of their groups."""
        self._warned_of: frozenset[str] = frozenset()
        """Keys of that kind that a warning has named."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: all but what belongs to this process."""
        return {**self.__dict__, "roster": None, "sharding": Sharding(None)}

    def complete(self, groups: Groups) -> None:
        """Check what only all groups together show, when all are there, and warn of it."""
        self._is_complete = True
        self.check_not_flat(groups)
        treated = self._turns_vectors | {name for name, has in self.had_matrices.items() if has}
        of_rules = {name: name in treated for name in self.had_matrices}
        flat.warn_without_matrices(groups, of_rules, self.default)
        self._warn_of_unknown_keys()

    def add(
        self, group: dict[str, Any], groups: Groups, append: Callable[[dict[str, Any]], None]
    ) -> None:
        """Check a group and add it to the groups by `append`, the method of torch's optimizers; a
        bad option, layout or parameter raises, and the group is not added."""
        with _naming(group, len(groups)):
            group = translated(group, self.published, self.defaults)
            rule, of_rule = self._rule_of(group)
            options = group_options({**of_rule, **group}, rule, self.default)
            made, name = rule(**options), name_of(rule)
            unknown = self.unknown_in(group, made, inert=self.defaults)
            plain = {key: getattr(made, key) for key in options} | listed(group)
            if "partition_dim" in group:
                plain["partition_dim"] = as_count(group["partition_dim"])
            append({**group, "params": _each_once(group["params"]), **plain, "rule": name})
        self.rules[name] = rule
        try:
            with _naming(groups[-1], len(groups) - 1):
                layouts = self._check_group(groups[-1], made)
            if self._is_complete:
                self.check_not_flat(groups)
        except (TypeError, ValueError):
            groups.pop()
            raise
        self._unknown |= unknown
        if any(len(layout.shape) < 2 and layout.dims for layout in layouts):
            self._turns_vectors.add(name)
        has_matrices = any(map(flat.is_matrix, layouts))
        if has_matrices or flat.is_for_matrices(made):
            self.had_matrices[name] = has_matrices or self.had_matrices.get(name, False)
        self.roster = None

    def unknown_in(self, group: Mapping[str, Any], rule: Rule, **allowed: Any) -> frozenset[str]:
        """Return the keys that mean nothing to the group's rule; raises as `unknown_keys` does."""
        return frozenset(unknown_keys(group, rule, {**RULES, **self.rules}, **allowed))

    def _warn_of_unknown_keys(self) -> None:
        """Warn of all keys that mean nothing to the rules of their groups and that no earlier
        warning has named."""
        if new := self._unknown - self._warned_of:
            self._warned_of |= new
            text = "keys of parameter groups that mean nothing to their rules are kept and ignored"
            warnings.warn(f"{text}: {', '.join(sorted(new))}", stacklevel=2)

    def _rule_of(self, group: Mapping[str, Any]) -> tuple[type[Rule], dict[str, Any]]:
        """Return the class of the rule that a group names, and the options of a rule that is given
        as an instance."""
        named = group.get("rule", type(self.default))
        if isinstance(named, Rule):
            return type(named), {name: getattr(named, name) for name in options_of(type(named))}
        if isinstance(named, str):
            return self.rules.get(named) or find_rule(named), {}
        rule = getattr(named, "rule", named)  # a class of optimizers stands for its rule
        if not (isinstance(rule, type) and issubclass(rule, Rule)):
            raise TypeError(
                f"rule={named!r} of a parameter group is not valid: give a rule's name, its class, "
                "or an instance"
            )
        return rule, {}

    def _check_group(self, group: dict[str, Any], rule: Rule) -> list[Layout]:
        """Raise ValueError or TypeError for a parameter that the rule does not take; return the
        layouts of the group's parameters."""
        layouts = []
        for name, p in zip(names_of(group), group["params"], strict=True):
            if isinstance(p, nn.UninitializedParameter):
                raise ValueError(f"{name} {flat.NO_SHAPE}, then make the optimizer")
            spread = self.sharding.spread_of(p, group, name)
            if p.is_complex():
                raise TypeError(
                    f"{name} is complex ({p.dtype}); {name_of(type(rule))} takes real parameters: "
                    "give it to torch.optim.Adam"
                )
            if rule.weight_rounding != "nearest" and p.dtype == torch.float16:
                raise ValueError(
                    f"weight_rounding={rule.weight_rounding!r} of {name} is for bf16 parameters, "
                    "and this one is fp16: give bf16 parameters, or weight_rounding='nearest'"
                )
            if rule.matrix_layout != "tensor" and p.dim() == 1 and flat.is_for_matrices(rule):
                flat.check_piece(name, p, f"{name_of(type(rule))} needs whole matrices")
                raise ValueError(
                    f"{name} has shape {tuple(p.shape)}, but matrix_layout={rule.matrix_layout!r} "
                    "needs a matrix: "
                    "put it in a group with matrix_layout='tensor'"
                )
            layouts.append(whole_layout(p, rule, spread, name))
            is_divided = spread is not None and rule.ownership == "replicated"
            size = layouts[-1].state_bytes(len(spread.ranks) if is_divided and spread else 1)
            if rule.max_state_bytes is not None and size > rule.max_state_bytes:
                raise ValueError(
                    f"state of {name} with shape {layouts[-1].shape} would take {size / GIB:.3f} "
                    "GiB, more than max_state_bytes "
                    f"({rule.max_state_bytes / GIB:.3f} GiB): lower max_precond_dim or set "
                    "sides='smaller' for one-sided preconditioning, "
                    "use the matrix_layout ('per_expert', 'stacked') with the smaller factors, "
                    "spread the state of a sharded parameter "
                    "over its ranks (ownership='replicated'), or raise the limit"
                )
        return layouts

    def check_not_flat(self, groups: Groups) -> None:
        """Raise ValueError if the groups contain flat pieces that a rule would take for vectors."""
        known = [group for group in groups if group["rule"] in self.rules]
        settings = [GroupSettings(group, self.rules[group["rule"]]) for group in known]
        flat.check_not_flat(settings, self.had_matrices)

    def current_roster(self, groups: Groups, state: States) -> Roster:
        """Return the roster. If parameters or options have changed it is made again; an option that
        is now out of range raises ValueError."""
        if self.roster is None or not is_unchanged(self.roster, groups):
            self.roster = None
            roster = self.make_roster(groups, state)
            self.sharding.plan(roster.params)
            self.roster = roster
        return self.roster

    def make_roster(self, groups: Groups, state: States) -> Roster:
        """Make a new roster. Frozen parameters without gradient and `state` are not in it."""
        all_settings, params, frozen = list[GroupSettings](), list[ParamInfo](), list[Tensor]()
        for number, group in enumerate(groups):
            if group["rule"] not in self.rules:
                raise ValueError(
                    f"rule {group['rule']!r} of a parameter group was set after the optimizer was "
                    "made: make a new optimizer, "
                    "or give add_param_group other parameters with that rule"
                )
            with _naming(group, number):
                settings = GroupSettings(group, self.rules[group["rule"]])
                unknown = self.unknown_in(group, settings.rule, exempt=self.defaults)
            self._unknown |= unknown
            if lists := listed(group):
                group.update(lists)
                settings = GroupSettings(group, self.rules[group["rule"]])
            all_settings.append(settings)
        for settings in all_settings:
            group = settings.group
            group.update(settings.plain)
            for name, p in zip(names_of(group), group["params"], strict=True):
                if not p.requires_grad and p.grad is None and not state.get(p):
                    frozen.append(p)
                    continue
                spread = self.sharding.spread_of(p, group)
                layout = whole_layout(p, settings.rule, spread, name)
                params.append(ParamInfo(p, settings, name, layout, spread))
        self._warn_of_unknown_keys()
        flat.check_not_flat(all_settings, self.had_matrices)
        return Roster(all_settings, params, frozen, weight_places(params))


@contextmanager
def _naming(group: Mapping[str, Any], number: int) -> Iterator[None]:
    """Add to the message of an error the group that it is about: its number, and its name or the
    name of its first parameter."""
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


def whole_layout(p: Tensor, rule: Rule, spread: Spread | None, name: str) -> Layout:
    """Return the layout of the whole parameter. Raises ValueError, which begins with `name`, if the
    rule does not take its shape or its shards."""
    rule = rule_for_dtype(rule, p.dtype)
    shape = tuple(p.shape) if spread is None else spread.shape
    try:
        layout = layout_of(shape, rule, contiguous=spread is not None or p.is_contiguous())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if isinstance(layout, RowLayout) and spread is not None:
        _check_blocks(name, spread)
    return layout


def _check_blocks(name: str, spread: Spread) -> None:
    """Raise ValueError if ranks hold parts of blocks of moments in int8, under an elementwise
    rule."""
    lengths = {box.size[-1] for box in spread.boxes}
    if lengths != {spread.shape[-1]} and (len(lengths) > 1 or lengths.pop() % BLOCK):
        raise ValueError(
            f"{name} with shape {spread.shape} is sharded along its last dim, into "
            f"{spread.boxes[0].size[-1]} elements per rank, which divides blocks of {BLOCK} that "
            "share a scale (state_dtype int8): shard another dim, or into equal multiples of "
            f"{BLOCK}, or give its group state_dtype=torch.float32"
        )


def _each_once(params: Any) -> Any:
    """Return the parameters (or (name, parameter) pairs) in order, without repetitions."""
    if isinstance(params, Tensor | set):  # torch accepts a tensor and refuses a set
        return params
    items = list(params)
    return list({id(item[1] if isinstance(item, tuple) else item): item for item in items}.values())
