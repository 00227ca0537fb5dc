"""The parameters of an optimizer as its engine knows them: each with its group's rule, its layout, and where its parts are.

A parameter group is a dict of plain values, as torch has it: the options of its rule by name, and `rule`, the rule's name. What stands
there may change between steps, by schedulers or by hand; a roster holds for as long as nothing but learning rates has changed.
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
"""Keys that a parameter group may have besides options: torch's own, a label, the rule, the dim along which tensor-parallel shards were
cut, and what torch's learning-rate schedulers leave there."""

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
"""Options of torch's own optimizers, which are in groups that were theirs."""

MULTIPLIERS = ("_mult", "_multiplier", "_scale")
"""Ends of keys that other trainers leave in groups, however like an option they begin."""

OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay"}
"""Names that others have for our options."""

LIKENESS = 0.8
"""Similarity from which on an unknown key is taken for a misspelt option."""


@dataclass(eq=False)
class GroupSettings:
    """A parameter group as it stood when the roster was made."""

    group: dict[str, Any]
    rule: Rule
    names: tuple[str, ...]
    """Names of the values that are compared to see a change: `rule` and all options but the learning rate."""
    values: list[Any]
    ids: list[int]
    """ids of its parameters."""
    lr: float
    """Learning rate in this step."""
    number: int = 0
    """Number that is equal for groups whose parameters may share work in this step."""

    @classmethod
    def of(cls, group: dict[str, Any], rule: type[Rule]) -> GroupSettings:
        """Take the settings of a group; raises ValueError for an option out of range."""
        options = options_of(rule)
        made = rule(**{name: group[name] for name in options})
        names = ("rule", "partition_dim", *(name for name in options if name != "lr"))
        return cls(group, made, names, list(map(group.get, names)), list(map(id, group["params"])), float(group["lr"]))

    def key(self) -> tuple[Any, ...]:
        """All that a step's work depends on."""
        return (type(self.rule), self.lr, *(comparable(value) for value in self.values))


@dataclass(eq=False)
class ParamInfo:
    """A parameter of the roster. Everything is known once for all steps, so that a step only reads it."""

    param: Tensor
    settings: GroupSettings
    name: str
    """Name that errors give it."""
    layout: Layout
    """Layout of the whole parameter."""
    spread: Spread | None
    """Places of its parts; None: this process has it to itself."""
    has_experts: bool = field(init=False)
    """Whether its matrices have statistics of their own, which stay as they are where there is no gradient."""
    num_norms: int = field(init=False)
    """Norms that its gradient is judged by: of each expert, or one, or none."""
    wide: torch.dtype = field(init=False)
    """dtype in which the norms are taken."""

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
        """Whether the update is its new weights, of the norm that they had at first."""
        return self.layout.rule.keep_norm and len(self.layout.inner) > 1

    @property
    def needs_weights(self) -> bool:
        """Whether whoever computes the update has to have the weights."""
        return self.layout.rule.couples_decay or self.keeps_norm

    @property
    def has_statistics(self) -> bool:
        """Whether its statistics are a phase of their own."""
        return bool(self.layout.dims) and type(self.layout.rule).statistics is not Rule.statistics

    def rates(self) -> tuple[float, float]:
        """(lr, decay) of W = (1 - decay) W - lr U in this step; (-1, 1), that is W = U, where U is the new weights."""
        return (-1.0, 1.0) if self.keeps_norm else (self.settings.lr, self.layout.rule.decay(self.settings.lr))


@dataclass(eq=False)
class Roster:
    """All parameters, group by group."""

    groups: list[GroupSettings]
    params: list[ParamInfo]
    frozen: list[Tensor]
    """Parameters that are left out for as long as they take no gradient."""
    places: list[Any] = field(default_factory=list)
    """Where their data are in memory, and with what strides."""


def group_options(given: Mapping[str, Any], rule: type[Rule], default: Rule) -> dict[str, Any]:
    """All options of a group of this rule: as given, else as the optimizer's own rule has them, else the rule's defaults.

    The optimizer's own rule may have a rule of this class for vectors (SOAP has AdamW); then that is what it has.
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
"""Options that a group takes over from an optimizer of another rule."""


def check_keys(group: Mapping[str, Any], rule: type[Rule], others: Iterable[str] = ()) -> None:
    """Raise ValueError for a key that looks like a misspelt option. `others` and those of torch's optimizers are left as they are."""
    options = list(options_of(rule))
    for key in sorted(set(group) - set(options) - KNOWN_KEYS - TORCH_KEYS - set(others)):
        near = [OTHER_NAMES[key]] if key in OTHER_NAMES else difflib.get_close_matches(key, options, 1, LIKENESS)
        if near and not key.endswith(MULTIPLIERS):
            known = ", ".join(sorted([*options, *KNOWN_KEYS]))
            raise ValueError(f"unknown option {key!r} in a parameter group: did you mean {near[0]!r}? Known options: {known}")


def names_of(group: Mapping[str, Any]) -> Iterator[str]:
    """Names that errors give to the parameters of a group."""
    names = group.get("param_names")
    for index in range(len(group["params"])):
        yield f"parameter {names[index]!r}" if names else f"parameter {index} of its group"


def comparable(value: Any) -> Any:
    """A hashable stand-in for the value of an option."""
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, list):
        return tuple(value)
    return id(value) if callable(value) else value
