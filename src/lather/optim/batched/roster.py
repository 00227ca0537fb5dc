"""The roster: all parameters of an optimizer, each with the rule of its group, its layout, and the
ranks over which it is spread.

As in torch, a parameter group is a dict of plain values: the options of its rule by name, and
`rule`, the name of the rule. Schedulers and users may change them between steps; a roster is valid
for as long as nothing but numbers has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lather.optim.batched.group_keys import asks
from lather.optim.batched.matrix_layout import Layout
from lather.optim.options import options_of
from lather.optim.plain import as_count, rate_of
from lather.optim.rule import Matrix, RefreshingRule, Rule
from lather.optim.sharded.placement import Spread, local


class GroupSettings:
    """The settings of a parameter group. Numbers among its options may change from step to step; if
    anything else changes, the roster is made again."""

    def __init__(self, group: dict[str, Any], rule: type[Rule]) -> None:
        """Read the settings of a group. Raises ValueError for an option out of range."""
        own = plain_options(group, rule)
        self.group, self.rule = group, rule(**{name: own[name] for name in options_of(rule)})
        self.lr = rate_of(own.pop("lr"))
        """Learning rate in this step."""
        asking = [key for key in group if key not in own and asks(key)]
        names = ("rule", "partition_dim", *(name for name in own if name != "partition_dim"))
        self.names = (*names, *asking)
        """Names of the values that are compared to detect a change: `rule`, `partition_dim`, all
        options but the learning rate, and keys that are no options but may be refused."""
        self.plain = own
        """Options but the learning rate, and `partition_dim` if there is one, as plain values."""
        self.values = [*map({**group, **own}.get, self.names)]
        self.num_settings = len(names)
        """Number of the values on which a step depends."""
        self.ids = list(map(id, group["params"]))
        self.keys = frozenset(group)
        """All keys of the group."""
        self.version = 0
        """Number of times that the learning rate or another number has changed."""
        self.variants: list[tuple[Matrix, Rule]] = []
        """The different matrices of the group, each with the rule that `Rule.on` returns for it."""
        self._numbers: dict[object, int] = {}
        self.number = 0
        """Number of the settings; groups whose parameters may form one run in this step have the
        same number."""

    def variant_of(self, layout: Layout) -> int:
        """Return the number of the layout's matrix and rule among the variants."""
        key = layout.matrix, type(layout), *layout.rule.dtypes.values()
        if key not in self._numbers:
            self._numbers[key] = len(self.variants)
            self.variants.append((layout.matrix, _one_of(layout.rule, self.variants)))
        return self._numbers[key]

    def take_changes(self) -> bool:
        """Read the learning rate and changed numbers from the group. Return False if anything else
        has changed: then the roster has to be made again."""
        group, own = self.group, plain_options(self.group, type(self.rule))
        rule_options = {name: own[name] for name in options_of(type(self.rule))}
        lr, values = rate_of(own.pop("lr")), [*map({**group, **own}.get, self.names)]
        if not 0 <= lr < math.inf:
            return False  # a new roster will raise
        if values != self.values:
            before = zip(self.names, self.values, strict=True)
            changed = [name for (name, old), new in zip(before, values, strict=True) if old != new]
            if not all(isinstance(getattr(self.rule, x, None), float | tuple) for x in changed):
                return False
            try:
                rule = type(self.rule)(**rule_options)
            except ValueError:
                return False  # a new roster will raise, and name the group
            variants: list[tuple[Matrix, Rule]] = []
            for matrix, old in self.variants:
                variants.append((matrix, _one_of(_variant(rule, matrix, old), variants)))
            pairs = zip(self.variants, variants, strict=True)
            if any(_structure(*old) != _structure(*new) for old, new in pairs):
                return False
            self.rule, self.values, self.variants = rule, values, variants
            self.version += 1
        if lr != self.lr:
            self.lr = lr
            self.version += 1
        group.update(own)
        return True

    def key(self) -> tuple[Any, ...]:
        """Return everything in these settings on which a step depends."""
        return (type(self.rule), self.lr, *map(comparable, self.values[: self.num_settings]))


def _variant(rule: Rule, matrix: Matrix, old: Rule) -> Rule:
    """Return the rule of a group for a matrix, with the state of the one that it had before."""
    new = rule.on(matrix)
    is_same = new.state_dtype == old.state_dtype
    return new if is_same else replace(new, state_dtype=old.state_dtype)


def _one_of(rule: Rule, variants: Iterable[tuple[Matrix, Rule]]) -> Rule:
    """Return the equal rule of a variant if there is one: runs of one rule are updated together."""
    same = (old for _, old in variants if type(old) is type(rule) and old == rule)
    return next(same, rule)


def _structure(matrix: Matrix, rule: Rule) -> tuple[object, ...]:
    """Return everything about a rule for a matrix on which a plan depends, but for numbers."""
    return type(rule), rule.dims(matrix), rule.couples_decay, rule.state(matrix)


class Change(NamedTuple):
    """The change of weights W by an update U in a step."""

    lr: float = 0.0
    decay: float = 0.0
    """W = (1 - decay) W - lr U, unless U `replaces` the weights."""
    replaces: bool = False
    """Whether W = U."""


REPLACEMENT = Change(replaces=True)


@dataclass(eq=False)
class ParamInfo:
    """A parameter of the roster, with everything about it that is the same in all steps."""

    param: Tensor
    settings: GroupSettings
    name: str
    """Name of the parameter in error messages."""
    layout: Layout
    """Layout of the whole parameter."""
    spread: Spread | None
    """Parts of the parameter on the ranks of its mesh; None: the parameter is not spread over
    ranks."""

    def __post_init__(self) -> None:
        self.variant = self.settings.variant_of(self.layout)

    @property
    def rule(self) -> Rule:
        """Rule of the parameter's matrices, with the numbers of this step. (That of the layout has
        those of the time when the roster was made.)"""
        return self.settings.variants[self.variant][1]

    @cached_property
    def num_norms(self) -> int:
        """Number of norms of the gradient that are measured: one for each expert, one, or none."""
        return (
            self.layout.batch
            if self.layout.has_experts
            else int(self.settings.rule.nonfinite != "ignore")
        )

    @cached_property
    def dtypes_of_norms(self) -> tuple[torch.dtype, torch.dtype]:
        """dtype in which the norms are computed, that of the parameter or of the arithmetic,
        whichever is wider; and dtype of the arithmetic, which must have the squares of norms."""
        arithmetic = self.rule.compute_dtype
        return torch.promote_types(self.param.dtype, arithmetic), arithmetic

    @cached_property
    def is_gathered(self) -> bool:
        """Whether every rank gathers and updates the parameter (`ownership="replicated"`)."""
        return (
            self.spread is not None
            and not self.layout.elementwise
            and self.rule.ownership == "replicated"
        )

    @cached_property
    def needs_weights(self) -> bool:
        """Whether the update depends on the weights."""
        return self.rule.couples_decay or self.layout.keeps_norm

    @cached_property
    def has_statistics(self) -> bool:
        """Whether the rule defines `statistics` for this parameter."""
        return bool(self.layout.dims) and type(self.rule).statistics is not Rule.statistics

    def change(self) -> Change:
        """Return the change of the weights by the update of this step; with `keep_norm` the update
        is the new weights."""
        lr = self.settings.lr
        return REPLACEMENT if self.layout.keeps_norm else Change(lr, self.rule.decay(lr))


class Roster:
    """All parameters, group by group."""

    def __init__(
        self,
        groups: list[GroupSettings],
        params: list[ParamInfo],
        frozen: list[Tensor],
        places: list[Any],
    ) -> None:
        """`frozen`: parameters that require no gradient and have no state; `params` does not
        contain them. `places`: memory addresses, strides and sizes of the parameters."""
        self.groups, self.params, self.frozen = groups, params, frozen
        self.group_ids = [id(known.group) for known in groups]
        self.places = places
        self.is_whole = True
        """Whether no change of the groups has been read in part: such a roster is of no use."""
        self._forms = [_form(one) for one in params]
        self.pattern: list[int] = []
        """For each group, the number of the first group with the same settings."""
        self._number_groups()

    def take_changes(self) -> bool:
        """Read the numbers of the groups again. Return False if anything else has changed: then the
        roster has to be made again."""
        if not all(settings.take_changes() for settings in self.groups):
            return False
        self._number_groups()
        return [_form(one) for one in self.params] == self._forms

    def _number_groups(self) -> None:
        numbers = dict[object, int]()
        for settings in self.groups:
            settings.number = numbers.setdefault(settings.key(), len(numbers))
        self.pattern = [settings.number for settings in self.groups]

    @cached_property
    def _line(self) -> dict[int, tuple[float, float]]:
        """The matrices with `stagger_refresh`, lined up in order, each as long as its refresh
        costs: id of a parameter -> the fraction of the line at which its first matrix begins, and
        the length of each of its matrices."""
        rules = [(one, one.rule) for one in self.params]
        costs = [
            (one, rule.refresh_cost(one.layout.matrix))
            for one, rule in rules
            if isinstance(rule, RefreshingRule) and rule.stagger_refresh
        ]
        total = sum(one.layout.batch * cost for one, cost in costs) or 1.0
        begins = accumulate((one.layout.batch * cost / total for one, cost in costs), initial=0.0)
        return {
            id(one.param): (begin, cost / total)
            for begin, (one, cost) in zip(begins, costs, strict=False)
        }

    def shift(self, param: Tensor, number: int, interval: int) -> int:
        """Return how many steps before the end of an interval matrix `number` of a parameter with
        `stagger_refresh` is refreshed, so that refreshes cost about the same at every step: floor(x
        f) for a matrix that begins at the fraction x of the line, and f steps."""
        first, width = self._line[id(param)]
        return min(interval - 1, int((first + number * width) * interval + 1e-9))


def _form(one: ParamInfo) -> tuple[object, ...]:
    """Return what the layout of a parameter depends on, but for its group."""
    x = one.param if one.spread is None else local(one.param)
    return x.shape, x.dtype, x.device, x.is_contiguous()


def group_options(given: Mapping[str, Any], rule: type[Rule], default: Rule) -> dict[str, Any]:
    """Return all options of a group with this rule: the given ones; then those of the optimizer's
    default rule; then the rule's defaults.

    If the default rule has a rule of this class for vectors (SOAP has AdamW), the options of that
    one take the place of its own."""
    on_vectors = default.on_vectors()
    source = on_vectors if type(on_vectors) is rule else default
    found = {}
    for name, option in options_of(rule).items():
        if name in given:
            found[name] = given[name]
        elif name in options_of(type(source)) and (
            type(source) is rule or name in SHARED or option.default is MISSING
        ):
            found[name] = getattr(source, name)
        else:
            found[name] = option.default
    return found


SHARED = frozenset({"lr", "weight_decay", *options_of(Rule)}) - {"matrix_layout"}
"""Options that a group takes from the optimizer's default rule even if its own rule is of another
class."""


def plain_options(group: Mapping[str, Any], rule: type[Rule]) -> dict[str, Any]:
    """Return the options of a group, and its `partition_dim` if it has one, as plain values, which
    may be out of range."""
    own = {name: option.plain(group[name]) for name, option in options_of(rule).items()}
    if "partition_dim" in group:
        own["partition_dim"] = as_count(group["partition_dim"])
    return own


def names_of(group: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a group's parameters for error messages."""
    names = group.get("param_names")
    for index in range(len(group["params"])):
        yield f"parameter {names[index]!r}" if names else f"parameter {index} of its group"


def comparable(value: Any) -> Any:
    """Return a hashable value that is equal for equal values of an option."""
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, list):
        return tuple(value)
    return id(value) if callable(value) else value
