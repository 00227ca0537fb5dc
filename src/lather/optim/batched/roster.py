"""The roster: all parameters of an optimizer, each with the rule of its group, its layout, and the
ranks over which it is spread.

As in torch, a parameter group is a dict of plain values: the options of its rule by name, and
`rule`, the name of the rule. Schedulers and users may change them between steps; a roster is valid
for as long as nothing but numbers has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lather.boxes import local
from lather.device import is_gpu
from lather.optim.batched.group_keys import asks
from lather.optim.batched.matrix_layout import Layout
from lather.optim.controls import CONTROLS, merged
from lather.optim.options import options_of
from lather.optim.plain import as_count, rate_of
from lather.optim.rule import Matrix, RefreshingRule, Rule
from lather.optim.sharded.placement import Spread


class GroupSettings:
    """The settings of a parameter group. Numbers among its options may change from step to step; if
    anything else changes, the roster is made again."""

    def __init__(self, group: dict[str, Any], rule: type[Rule]) -> None:
        """Read the settings of a group. Raises ValueError for an option out of range."""
        self.plain = plain_options(group, rule)
        """Options but the learning rate, and `partition_dim` if there is one, as plain values."""
        self.group, self.rule = group, rule(**{name: self.plain[name] for name in options_of(rule)})
        self.lr = rate_of(self.plain.pop("lr"))
        """Learning rate in this step."""
        deciding = list(dict.fromkeys(["rule", "partition_dim", *self.plain]))
        asking = [key for key in group if key not in self.plain and asks(key)]
        self.names = [*deciding, *asking]
        """Names of the values that are compared to detect a change: `rule`, `partition_dim`, all
        options but the learning rate, and keys that are no options but may be refused."""
        self._num_deciding = len(deciding)
        """Number of the values on which a step depends."""
        self.values = [*map({**group, **self.plain}.get, self.names)]
        self.ids = list(map(id, group["params"]))
        self.keys = frozenset(group)
        """All keys of the group."""
        self.version = 0
        """Number of times that the learning rate or another number has changed."""
        self.variants: list[tuple[Matrix, Rule]] = []
        """The different matrices of the group, each with the rule that `Rule.on` returns for it."""
        self._variant_of: dict[object, int] = {}
        self.number = 0
        """Number of the settings; groups whose parameters may form one run in this step have the
        same number."""

    def variant_of(self, layout: Layout) -> int:
        """Return the number of the layout's matrix and rule among the variants."""
        rule = layout.rule
        key = layout.matrix, type(layout), rule.weight_rounding, *rule.dtypes.values()
        if key not in self._variant_of:
            self._variant_of[key] = len(self.variants)
            _add_variant(self.variants, layout.matrix, layout.rule)
        return self._variant_of[key]

    def read_numbers(self) -> bool:
        """Read the learning rate and changed numbers from the group. Return False if anything else
        has changed: then the roster has to be made again."""
        options = plain_options(self.group, type(self.rule))
        lr = rate_of(options["lr"])
        if not 0 <= lr < math.inf:
            return False  # a new roster will raise
        values = [*map({**self.group, **options}.get, self.names)]
        is_changed = values != self.values
        if is_changed:
            triples = zip(self.names, self.values, values, strict=True)
            changed = [name for name, old, new in triples if old != new]
            if not all(isinstance(getattr(self.rule, x, None), float | tuple) for x in changed):
                return False
            try:
                rule = type(self.rule)(
                    **{name: options[name] for name in options_of(type(self.rule))}
                )
            except ValueError:
                return False  # a new roster will raise, and name the group
            variants: list[tuple[Matrix, Rule]] = []
            for matrix, old in self.variants:
                new = rule.on(matrix)
                of_dtype = {name: getattr(old, name) for name in ("state_dtype", "weight_rounding")}
                if any(getattr(new, name) != value for name, value in of_dtype.items()):
                    new = replace(new, **of_dtype)  # as `rule_for_dtype` does
                _add_variant(variants, matrix, new)
                if _structure(matrix, old) != _structure(*variants[-1]):
                    return False
            self.rule, self.values, self.variants = rule, values, variants
        self.version += is_changed or lr != self.lr
        self.lr = lr
        del options["lr"]
        self.group.update(options)
        return True

    def key(self) -> tuple[Any, ...]:
        """Return everything in these settings on which a step depends."""
        return (type(self.rule), self.lr, *map(comparable, self.values[: self._num_deciding]))


def _add_variant(variants: list[tuple[Matrix, Rule]], matrix: Matrix, rule: Rule) -> None:
    """Add a matrix with its rule. Equal rules become the same object: runs of the same rule are
    updated together."""
    same = (old for _, old in variants if type(old) is type(rule) and old == rule)
    variants.append((matrix, next(same, rule)))


def _structure(matrix: Matrix, rule: Rule) -> tuple[object, ...]:
    """Return everything about a rule for a matrix on which a plan depends, but for numbers."""
    controls = rule.controls_matrices, rule.decays_cautiously
    return type(rule), rule.dims(matrix), rule.couples_decay, controls, rule.state(matrix)


class Change(NamedTuple):
    """The change of weights W by an update U in a step."""

    lr: float = 0.0
    decay: float = 0.0
    """W = (1 - decay) W - lr U, unless U `replaces` the weights."""
    replaces: bool = False
    """Whether W = U."""
    rounding: str = "nearest"
    """Rounding of W, `weight_rounding`."""


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
        self._variant = self.settings.variant_of(self.layout)

    @property
    def rule(self) -> Rule:
        """Rule of the parameter's matrices, with the numbers of this step. (That of the layout has
        those of the time when the roster was made.)"""
        return self.settings.variants[self._variant][1]

    @cached_property
    def num_norms(self) -> int:
        """Number of norms of the gradient that are measured: of each expert, of the parameter, or
        none."""
        if self.layout.has_experts:
            return self.layout.batch
        return int(self.settings.rule.nonfinite != "ignore")

    @cached_property
    def dtypes_of_norms(self) -> tuple[torch.dtype, torch.dtype]:
        """dtype in which the norms are computed, that of the parameter or of the arithmetic,
        whichever is wider; and dtype of the arithmetic, which must have the squares of norms."""
        arithmetic = self.rule.compute_dtype
        return torch.promote_types(self.param.dtype, arithmetic), arithmetic

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank gathers and updates the parameter (`ownership="replicated"`)."""
        is_replicated = self.rule.ownership == "replicated"
        return is_replicated and self.spread is not None and not self.layout.elementwise

    @property
    def takes_factor(self) -> bool:
        """Whether the rule multiplies gradients by a factor as it reads them; otherwise they are
        multiplied in place before the step."""
        return is_gpu(self.param.device) and self.rule.takes_factor

    @cached_property
    def needs_weights(self) -> bool:
        """Whether the update depends on the weights."""
        return self.rule.couples_decay or self.is_controlled

    @cached_property
    def is_controlled(self) -> bool:
        """Whether the update of a step is the new weights (`lather.optim.controls.stepped`)."""
        return self.layout.is_controlled or self.rule.decays_cautiously

    @cached_property
    def has_statistics(self) -> bool:
        """Whether the rule defines `statistics` for this parameter."""
        return bool(self.layout.dims) and type(self.rule).statistics is not Rule.statistics

    def change(self) -> Change:
        """Return the change of the weights by the update of this step."""
        lr, rounding = self.settings.lr, self.rule.weight_rounding
        if self.is_controlled:
            return REPLACEMENT._replace(rounding=rounding)
        return Change(lr, self.rule.decay(lr), rounding=rounding)


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
        self.group_ids = [id(settings.group) for settings in groups]
        self.places = places
        self.is_current = True
        """Whether all changes of the groups have been read; otherwise the roster is useless."""
        self._forms = list(map(_form, params))
        self.pattern: list[int] = []
        """For each group, the number of the first group with the same settings."""
        self._number_groups()

    def read_numbers(self) -> bool:
        """Read the numbers of the groups again. Return False if anything else has changed: then the
        roster has to be made again."""
        if not all(settings.read_numbers() for settings in self.groups):
            return False
        self._number_groups()
        return list(map(_form, self.params)) == self._forms

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
        rules = [(info, info.rule) for info in self.params]
        costs = [
            (info, rule.refresh_cost(info.layout.matrix))
            for info, rule in rules
            if isinstance(rule, RefreshingRule) and rule.stagger_refresh
        ]
        total = sum(info.layout.batch * cost for info, cost in costs) or 1.0
        begins = accumulate((info.layout.batch * cost / total for info, cost in costs), initial=0.0)
        return {
            id(info.param): (begin, cost / total)
            for begin, (info, cost) in zip(begins, costs, strict=False)
        }

    def shift(self, param: Tensor, number: int, interval: int) -> int:
        """Return how many steps before the end of an interval matrix `number` of a parameter with
        `stagger_refresh` is refreshed, so that refreshes cost about the same at every step: floor(x
        f) for a matrix that begins at the fraction x of the line, and f steps."""
        first, width = self._line[id(param)]
        return min(interval - 1, int((first + number * width) * interval + 1e-9))


def _form(info: ParamInfo) -> tuple[object, ...]:
    """Return what the layout of a parameter depends on, but for its group."""
    x = info.param if info.spread is None else local(info.param)
    return x.shape, x.dtype, x.device, x.is_contiguous()


LAYOUT = frozenset({"matrix_layout", "head_rows", "head_columns"})
SHARED = frozenset({"lr", "weight_decay", *options_of(Rule)}) - LAYOUT
"""Options that a group takes from the optimizer's default rule even if its rule is of another
class, but for `CONTROLS`."""


def group_options(group: Mapping[str, Any], rule: type[Rule], default: Rule) -> dict[str, Any]:
    """Return all options of a group with this rule: those that the group gives; then those of the
    optimizer's default rule; then the rule's defaults. A group that names its rule has no controls
    of the default rule.

    If the default rule has a rule of this class for vectors (SOAP has AdamW), the options of that
    rule take the place of its own."""
    on_vectors = default.on_vectors()
    source = on_vectors if type(on_vectors) is rule else default
    options = {name: option.default for name, option in options_of(rule).items()}
    for name in options.keys() & options_of(type(source)).keys():
        is_shared = type(source) is rule or name in SHARED or options[name] is MISSING
        if is_shared and not ("rule" in group and name in CONTROLS):
            options[name] = getattr(source, name)
    if group.get("matrix_layout", "per_head") != "per_head":  # the default rule's heads are not its
        options |= {"head_rows": None, "head_columns": None}
    return merged(options, {name: group[name] for name in options.keys() & group.keys()})


def plain_options(group: Mapping[str, Any], rule: type[Rule]) -> dict[str, Any]:
    """Return the options of a group, and its `partition_dim` if it has one, as plain values, which
    may be out of range."""
    options = {name: option.plain(group[name]) for name, option in options_of(rule).items()}
    if "partition_dim" in group:
        options["partition_dim"] = as_count(group["partition_dim"])
    return options


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
