"""The roster: all parameters of an optimizer, each with the rule of its group, its layout, and the ranks over which it is spread.

As in torch, a parameter group is a dict of plain values: the options of its rule by name, and `rule`, the name of the rule. Schedulers and
users may change them between steps; a roster is valid for as long as nothing but learning rates has changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lather.optim.engine.matrix_layout import Layout
from lather.optim.options import options_of
from lather.optim.rule import RefreshingRule, Rule
from lather.optim.sharded.placement import Spread

KNOWN_KEYS = {"params", "param_names", "name", "rule", "partition_dim"}
KNOWN_KEYS |= {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
"""Keys that a parameter group may have besides options: torch's own, a label, the rule, the dim of tensor-parallel shards, and keys that
torch's learning-rate schedulers add."""

TORCH_KEYS = {"amsgrad", "betas", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused"}
TORCH_KEYS |= {"ns_coefficients", "ns_steps"}
"""Options of torch's own optimizers (Adam's, then Muon's), which groups that were made for them contain."""

MULTIPLIERS = ("_mult", "_multiplier", "_scale")
"""Suffixes of keys that other trainers add to groups; such keys are never taken for misspelt options."""

OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay"}
"""Names that other libraries use for our options."""

LIKENESS = 0.8
"""Least similarity to an option at which an unknown key is taken for a misspelt option."""


class GroupSettings:
    """The settings of a parameter group at the time when the roster was made."""

    def __init__(self, group: dict[str, Any], rule: type[Rule]) -> None:
        """Read the settings of a group. Raises ValueError for an option out of range."""
        options = options_of(rule)
        self.group, self.rule = group, rule(**{name: group[name] for name in options})
        self.names = ("rule", "partition_dim", *(name for name in options if name != "lr"))
        """Names of the values that are compared to detect a change: `rule`, `partition_dim` and all options but the learning rate."""
        self.values, self.ids = list(map(group.get, self.names)), list(map(id, group["params"]))
        self.lr = float(group["lr"])
        """Learning rate in this step."""
        self.number = 0
        """Number of the settings; groups whose parameters may form one run in this step have the same number."""

    def key(self) -> tuple[Any, ...]:
        """Return everything in these settings on which a step depends."""
        return (type(self.rule), self.lr, *(comparable(value) for value in self.values))


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
    """Parts of the parameter on the ranks of its mesh; None: the parameter is not spread over ranks."""

    @cached_property
    def rule(self) -> Rule:
        return self.layout.rule

    @cached_property
    def num_norms(self) -> int:
        """Number of norms of the gradient that are measured: one for each expert, one, or none."""
        return self.layout.batch if self.layout.has_experts else int(self.settings.rule.nonfinite != "ignore")

    @cached_property
    def dtypes_of_norms(self) -> tuple[torch.dtype, torch.dtype]:
        """dtype in which the norms are computed, that of the parameter or of the arithmetic,
        whichever is wider; and dtype of the arithmetic, which must have the squares of norms."""
        arithmetic = self.rule.compute_dtype
        return torch.promote_types(self.param.dtype, arithmetic), arithmetic

    @cached_property
    def is_gathered(self) -> bool:
        """Whether every rank gathers and updates the parameter (`ownership="replicated"`)."""
        return self.spread is not None and self.layout.kind != "elements" and self.rule.ownership == "replicated"

    @cached_property
    def needs_weights(self) -> bool:
        """Whether the update depends on the weights."""
        return self.rule.couples_decay or self.layout.keeps_norm

    @cached_property
    def has_statistics(self) -> bool:
        """Whether the rule defines `statistics` for this parameter."""
        return bool(self.layout.dims) and type(self.rule).statistics is not Rule.statistics

    def rates(self) -> tuple[float, float]:
        """Return (lr, decay) of W = (1 - decay) W - lr U in this step; (-1, 1), that is W = U, if U is the new weights (`keep_norm`)."""
        return (-1.0, 1.0) if self.layout.keeps_norm else (self.settings.lr, self.rule.decay(self.settings.lr))


class Roster:
    """All parameters, group by group."""

    def __init__(self, groups: list[GroupSettings], params: list[ParamInfo], frozen: list[Tensor]) -> None:
        """`frozen`: parameters that require no gradient and have no state; `params` does not contain them."""
        self.groups, self.params, self.frozen = groups, params, frozen
        self.group_ids = [id(known.group) for known in groups]
        self.places: list[Any] = []
        """Memory addresses and strides of the parameters, set by the optimizer."""

    @cached_property
    def _line(self) -> dict[int, tuple[float, float]]:
        """The matrices with `stagger_refresh`, lined up in order, each as long as its refresh costs: id of a parameter -> the fraction of
        the line at which its first matrix begins, and the length of each of its matrices."""
        rules = [(one, one.rule) for one in self.params]
        costs = [
            (one, rule.refresh_cost(one.layout.matrix)) for one, rule in rules if isinstance(rule, RefreshingRule) and rule.stagger_refresh
        ]
        total = sum(one.layout.batch * cost for one, cost in costs) or 1.0
        begins = accumulate((one.layout.batch * cost / total for one, cost in costs), initial=0.0)
        return {id(one.param): (begin, cost / total) for begin, (one, cost) in zip(begins, costs, strict=False)}

    def shift(self, param: Tensor, number: int, interval: int) -> int:
        """Return how many steps before the end of an interval matrix `number` of a parameter with `stagger_refresh` is refreshed, so that
        refreshes cost about the same at every step: floor(x f) for a matrix that begins at the fraction x of the line, and f steps."""
        first, width = self._line[id(param)]
        return min(interval - 1, int((first + number * width) * interval + 1e-9))


def group_options(given: Mapping[str, Any], rule: type[Rule], default: Rule) -> dict[str, Any]:
    """Return all options of a group with this rule: the given ones; then those of the optimizer's default rule; then the rule's defaults.

    If the default rule has a rule of this class for vectors (SOAP has AdamW), the options of that one take the place of its own.
    """
    on_vectors = default.on_vectors()
    source = on_vectors if type(on_vectors) is rule else default
    found = {}
    for name, option in options_of(rule).items():
        if name in given:
            found[name] = given[name]
        elif name in options_of(type(source)) and (type(source) is rule or name in SHARED or option.default is MISSING):
            found[name] = getattr(source, name)
        else:
            found[name] = option.default
    return found


SHARED = frozenset({"lr", "weight_decay", *options_of(Rule)}) - {"matrix_layout"}
"""Options that a group takes from the optimizer's default rule even if its own rule is of another class."""


def check_keys(group: Mapping[str, Any], rule: type[Rule], others: Iterable[str] = ()) -> None:
    """Raise ValueError for a key that looks like a misspelt option. Keys in `others`, and options of torch's optimizers, are allowed."""
    options = list(options_of(rule))
    for key in sorted(set(group) - set(options) - KNOWN_KEYS - TORCH_KEYS - set(others)):
        near = [OTHER_NAMES[key]] if key in OTHER_NAMES else difflib.get_close_matches(key, options, 1, LIKENESS)
        if near and not key.endswith(MULTIPLIERS):
            known = ", ".join(sorted([*options, *KNOWN_KEYS]))
            raise ValueError(f"unknown option {key!r} in a parameter group: did you mean {near[0]!r}? Known options: {known}")


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
