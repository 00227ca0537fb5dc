"""The roster: all parameters of an optimizer, each with the rule of its group, its layout, and the ranks over which it is spread.

As in torch, a parameter group is a dict of plain values: the options of its rule by name, and `rule`, the name of the rule. Schedulers and
users may change them between steps; a roster is valid for as long as nothing but learning rates has changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lather.optim.engine.matrix_layout import Layout
from lather.optim.options import options_of
from lather.optim.rule import Rule
from lather.optim.sharded.placement import Spread

KNOWN_KEYS = {"params", "param_names", "name", "rule", "partition_dim"}
KNOWN_KEYS |= {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
"""Keys that a parameter group may have besides options: torch's own, a label, the rule, the dim of tensor-parallel shards, and keys that
torch's learning-rate schedulers add."""

TORCH_KEYS = {
    "amsgrad",
    "betas",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "ns_coefficients",
    "ns_steps",
}
"""Options of torch's own optimizers, which groups that were made for them contain."""

MULTIPLIERS = ("_mult", "_multiplier", "_scale")
"""Suffixes of keys that other trainers add to groups; such keys are never taken for misspelt options."""

OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay"}
"""Names that other libraries use for our options."""

LIKENESS = 0.8
"""Least similarity to an option at which an unknown key is taken for a misspelt option."""


@dataclass(eq=False)
class GroupSettings:
    """The settings of a parameter group at the time when the roster was made."""

    group: dict[str, Any]
    rule: Rule
    names: tuple[str, ...]
    """Names of the values that are compared to detect a change: `rule`, `partition_dim` and all options but the learning rate."""
    values: list[Any]
    ids: list[int]
    """ids of the group's parameters."""
    lr: float
    """Learning rate in this step."""
    number: int = 0
    """Number of the settings; groups whose parameters may form one run in this step have the same number."""

    @classmethod
    def of(cls, group: dict[str, Any], rule: type[Rule]) -> GroupSettings:
        """Read the settings of a group. Raises ValueError for an option out of range."""
        options = options_of(rule)
        made = rule(**{name: group[name] for name in options})
        names = ("rule", "partition_dim", *(name for name in options if name != "lr"))
        return cls(group, made, names, list(map(group.get, names)), list(map(id, group["params"])), float(group["lr"]))

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
    has_experts: bool = field(init=False)
    """Whether the matrices are experts with bases of their own; experts without gradient keep their statistics."""
    num_norms: int = field(init=False)
    """Number of norms of the gradient that are measured: one for each expert, one, or none."""
    wide: torch.dtype = field(init=False)
    """dtype in which the norms are computed."""

    def __post_init__(self) -> None:
        self.has_experts = self.layout.kind == "per_expert" and bool(self.layout.dims)
        is_measured = self.has_experts or self.settings.rule.nonfinite != "ignore"
        self.num_norms = (self.layout.batch if self.has_experts else 1) if is_measured else 0
        self.wide = torch.promote_types(self.param.dtype, torch.float32)

    @property
    def rule(self) -> Rule:
        return self.layout.rule

    @property
    def keeps_norm(self) -> bool:
        """Whether the update is the new weights, scaled to the norm that they had at the first step (`keep_norm`)."""
        return self.layout.rule.keep_norm and len(self.layout.inner) > 1

    @property
    def needs_weights(self) -> bool:
        """Whether the update depends on the weights."""
        return self.layout.rule.couples_decay or self.keeps_norm

    @property
    def has_statistics(self) -> bool:
        """Whether the rule defines `statistics` for this parameter."""
        return bool(self.layout.dims) and type(self.layout.rule).statistics is not Rule.statistics

    def rates(self) -> tuple[float, float]:
        """Return (lr, decay) of W = (1 - decay) W - lr U in this step; (-1, 1), that is W = U, if U is the new weights (`keeps_norm`)."""
        return (-1.0, 1.0) if self.keeps_norm else (self.settings.lr, self.layout.rule.decay(self.settings.lr))


@dataclass(eq=False)
class Roster:
    """All parameters, group by group."""

    groups: list[GroupSettings]
    params: list[ParamInfo]
    frozen: list[Tensor]
    """Parameters that require no gradient and have no state; `params` does not contain them."""
    places: list[Any] = field(default_factory=list)
    """Memory addresses and strides of `params`."""


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
