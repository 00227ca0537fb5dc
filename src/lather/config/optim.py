"""`[optim]`: a rule with all its options, settings of each kind of parameters, and the
learning-rate schedule.

    [optim]             name = "muon", its options, the schedule
    [optim.experts]     routed experts                      rule: that of [optim]
    [optim.matrices]    all other matrices                  rule: that of [optim]
    [optim.rest]        embeddings, head, norms, biases     rule: adamw, with lr_factor times the
                                                            learning rate
    [optim.router]      routers                             as [optim.rest], unless a rule is given

The fields depend on the rules, so each choice of rules has a dataclass of its own: `optim_class`
creates it, and `optim_config` an instance. A kind with the rule of `[optim]` inherits all options
from there. A kind with another rule inherits weight decay and the options that every rule has; its
other defaults are those of its rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, cast

from lather.argument import Argument
from lather.config.rule_fields import (
    MEASURED_TOKENS,
    as_text,
    default_lr,
    described,
    fields_of,
    in_toml,
    inherited_by,
    rule_named,
    shown,
)
from lather.errors import ConfigError, require
from lather.optim import Rule
from lather.optim.options import name_of, options_of
from lather.optim.rules import RULES

KINDS = {
    "experts": "Routed experts, where their settings differ from [optim].",
    "matrices": (
        "Matrices other than experts, embeddings, head and router, "
        "where their settings differ from [optim]."
    ),
    "router": "Routers: with the settings of [optim.rest], unless a rule is given.",
    "rest": "Embeddings, head, norms and biases.",
}
"""Kinds of parameters, with their description in `--help`."""

DEFAULT_RULE = "muon"
"""Rule of matrices and experts: the one that gains most among those that cost little time and state
(docs/results.md)."""
REST_RULE = "adamw"
REST_FACTORS = {
    ("adamw", "adamw"): 16.0,
    ("muon", "adamw"): 2.0,
    ("soap_muon", "adamw"): 2.0,
    ("soap", "adamw"): 8.0,
    ("muon", "embedding_soap"): 1.6,
    ("soap_muon", "embedding_soap"): 1.6,
}
"""Ratio of the learning rate of the rest to that of the matrices, by (rule of matrices, rule of the
rest); 1 for all other pairs. From docs/results.md."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: str = DEFAULT_RULE
    """Rule of matrices and experts."""
    lr: float | None = None
    """Peak learning rate of matrices and experts; left out: the rule's default for the number of
    tokens in a step."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """Shape of the learning rate after warm-up, for all parameters; wsd: constant, then linear
    decay over the last decay_fraction."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay_fraction: float = 0.2
    """Fraction of the run over which wsd decays."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak."""

    rules: ClassVar[Mapping[str, type[Rule]]]
    """Rule of `[optim]`, under "", and the rule of each kind."""
    given: ClassVar[tuple[tuple[str, str], ...]]
    """Names of the rules for which the class was created (`chosen_rules`)."""

    def __post_init__(self) -> None:
        if type(self) is OptimConfig:
            raise TypeError("OptimConfig has no options of a rule: use optim_config(name, ...)")
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "at least 0 steps")
        require(
            0 < self.decay_fraction <= 1, "optim.decay_fraction", self.decay_fraction, "in (0, 1]"
        )
        require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "in [0, 1]")
        rules = chosen_rules(
            {"name": self.name} | {kind: vars(self.section(kind)) for kind in KINDS}
        )
        require(
            rules == self.given,
            "optim",
            dict(rules),
            f"for the rules {dict(self.given)}: use optim_config(name, ...) for others",
        )
        self.rule  # noqa: B018 - its construction checks its options
        self._rules  # noqa: B018

    @functools.cached_property
    def rule(self) -> Rule:
        """The rule of `[optim]`, with all its options."""
        options = {name: getattr(self, name) for name in fields_of(self.rules[""])}
        return _made(
            self.rules[""], {"nonfinite": "ignore", **options, "lr": self.peak_lr}, "optim."
        )

    @property
    def peak_lr(self) -> float:
        """`lr`, or the rule's default for steps of 1,024 tokens if `lr` is left out."""
        return default_lr(self.rules[""]) if self.lr is None else self.lr

    @property
    def stacks_experts(self) -> bool:
        """Whether the experts' rule treats all experts of a layer as one stacked matrix."""
        return bool(options_of(self.rules["experts"])["matrix_layout"].default == "stacked")

    def section(self, kind: str) -> KindConfig:
        """The settings of one kind."""
        return cast(KindConfig, getattr(self, kind))

    def rule_of(self, kind: str) -> Rule:
        """Return the rule of one kind of parameters, with all its options."""
        return self._rules[kind]

    @functools.cached_property
    def _rules(self) -> Mapping[str, Rule]:
        """The rule of each kind; the router inherits from the rest."""
        return {kind: self._make_rule(kind) for kind in ("experts", "matrices", "rest", "router")}

    def _make_rule(self, kind: str) -> Rule:
        """Make the rule of one kind; raises ConfigError if its options contradict each other."""
        rule, own = self.rules[kind], self._own(kind)
        shared = {name: getattr(self, name) for name in inherited_by(rule, self.rules[""])}
        options = (
            {name: default for name, (_, default) in fields_of(rule).items() if default is not None}
            | shared
            | own
        )
        layout = (
            "tensor" if kind != "experts" else "stacked" if self.stacks_experts else "per_expert"
        )
        decided = {"lr": self.lr_of(kind), "nonfinite": "ignore", "matrix_layout": layout}
        return _made(rule, {**options, **decided}, f"optim.{kind}.")

    def lr_of(self, kind: str) -> float:
        """Return the peak learning rate of one kind."""
        section = self.section(kind)
        if section.lr is not None:
            if section.lr_factor is not None:
                raise ConfigError(
                    f"optim.{kind}.lr = {section.lr} and optim.{kind}.lr_factor = "
                    f"{section.lr_factor} are both given: leave one of them out"
                )
            if not self.peak_lr and section.lr:
                raise ConfigError(
                    f"optim.lr = 0 with optim.{kind}.lr = {section.lr}: all learning rates are "
                    "scaled with optim.lr: give it a number > 0"
                )
            return section.lr
        if section.lr_factor is None and kind == "router" and not section.rule:
            return self.lr_of("rest")
        return self.peak_lr * self._factor(kind)

    def describe_rates(self) -> str:
        """Name the rule and the peak learning rate of every kind of parameters."""
        kinds: dict[str, list[str]] = {}
        for kind in KINDS:
            kinds.setdefault(f"{name_of(self.rules[kind])} at {self.lr_of(kind):.3g}", []).append(
                kind
            )
        return "; ".join(f"{rate} for {' and '.join(names)}" for rate, names in kinds.items())

    def _factor(self, kind: str) -> float:
        factor = self.section(kind).lr_factor
        return default_factor(kind, self.rules) if factor is None else factor

    def _own(self, kind: str) -> dict[str, Any]:
        """Return the options that are given for this kind alone."""
        section = self.section(kind)
        own = {name: getattr(section, name) for name in fields_of(self.rules[kind]) if name != "lr"}
        own = {name: value for name, value in own.items() if value is not None}
        return own if kind != "router" or section.rule else self._own("rest") | own

    def resolved(self, tokens_per_step: int) -> OptimConfig:
        """Return a copy with all defaults filled in that are not defaults of a field: the learning
        rate for steps of `tokens_per_step` tokens, and the rule, rate and options of kinds that
        differ from `[optim]`."""
        changes: dict[str, KindConfig] = {}
        for kind, rule in self.rules.items():
            if not kind or (
                kind != "rest" and (rule is self.rules[""] or not self.section(kind).rule)
            ):
                continue
            made, section = self.rule_of(kind), self.section(kind)
            factor = None if section.lr is not None else self._factor(kind)
            own = fields_of(rule).keys() - inherited_by(rule, self.rules[""]) - {"lr"}
            options: dict[str, Any] = {name: as_text(getattr(made, name)) for name in own}
            changes[kind] = replace(section, rule=name_of(rule), lr_factor=factor, **options)
        lr = default_lr(self.rules[""], tokens_per_step) if self.lr is None else self.lr
        return replace(self, lr=lr, **changes)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Callable[..., OptimConfig], tuple[()]]:
        """Copy by value: pickle cannot find classes by name that are created at run time."""
        return functools.partial(optim_config, **asdict(self)), ()


@dataclass(frozen=True)
class KindConfig:
    """Settings of one kind of parameters."""

    rule: str = ""
    """Rule of these parameters, if it is another one; together with this option, --help optim shows
    the options of that rule."""
    lr: float | None = None
    """Peak learning rate of these parameters; left out: lr_factor times optim.lr."""
    lr_factor: float | None = None
    """Peak learning rate of these parameters as a factor of optim.lr; left out: the factor of the
    rules for these parameters."""

    options_rule: ClassVar[type[Rule]]
    """The rule whose options the class has as fields."""


def _made(rule: type[Rule], options: dict[str, Any], prefix: str) -> Rule:
    for name, option in options_of(rule).items():
        if option.default is MISSING and options.get(name) is None:
            raise ConfigError(
                f"{prefix}{name} is not given, and {name_of(rule)!r} has no default for it: give "
                f"{prefix}{name}"
            )
    try:
        return rule(**options)
    except ValueError as error:
        raise ConfigError(in_toml(str(error), prefix)) from None


def default_factor(kind: str, rules: Mapping[str, type[Rule]]) -> float:
    """Return the `lr_factor` of a kind that does not set it."""
    return REST_FACTORS.get((rules[""].name, rules[kind].name), 1.0) if kind == "rest" else 1.0


def _default_rules(name: str) -> dict[str, str | None]:
    """Return the rule of each kind that does not name one, given the rule of `[optim]`; None: the
    rule of the rest."""
    return {"experts": name, "matrices": name, "rest": REST_RULE, "router": None}


def optim_config(name: str = DEFAULT_RULE, **values: Any) -> OptimConfig:
    """Build `[optim]` in Python from options of the rule and mappings for sections. Raises
    ConfigError for a bad value, TypeError for an unknown option."""
    values = {"name": name, **values}
    cls = optim_class(chosen_rules(values))
    sections = {
        kind: cls.__annotations__[kind](**values[kind])
        for kind in KINDS
        if isinstance(values.get(kind), Mapping)
    }
    return cls(**{**values, **sections})


def chosen_rules(mapping: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the names of the rules in an `[optim]`, for `optim_class`: its own, and those of kinds
    that name another than their default."""
    found = {"": mapping.get("name", DEFAULT_RULE)}
    for kind in KINDS:
        section = mapping.get(kind)
        named = section.get("rule", "") if isinstance(section, Mapping) else ""
        if named and named != _default_rules(found[""])[kind]:
            found[kind] = named
    for kind, name in found.items():
        require(
            isinstance(name, str), f"optim.{kind}.rule" if kind else "optim.name", name, "a string"
        )
    return tuple(found.items())


@functools.cache
def optim_class(given: tuple[tuple[str, str], ...]) -> type[OptimConfig]:
    """Return the dataclass of `[optim]` for these rules (`chosen_rules`)."""
    names = dict(given)
    rules = {"": rule_named(names[""], "optim.name")}
    for kind in ("experts", "matrices", "rest", "router"):
        name = names.get(kind) or _default_rules(names[""])[kind]
        rules[kind] = rules["rest"] if name is None else rule_named(name, f"optim.{kind}.rule")
    about = (
        f"Rule of matrices and experts: {', '.join(RULES)}, or "
        "module:Class of your own. Its options follow."
    )
    own: list[Any] = [
        ("name", Annotated[str, Argument(describe=lambda: about)], name_of(rules[""])),
        _lr_field(rules[""]),
    ]
    for name, (hint, default) in fields_of(rules[""]).items():
        if name != "lr":
            _refuse_if_taken(rules[""], name, OptimConfig)
            argument = Argument(describe=functools.partial(described, rules[""], name))
            own.append(
                (name, Annotated[hint if default is not None else hint | None, argument], default)
            )
    for kind in KINDS:
        section = _kind_class(kind, rules)
        own.append((kind, section, field(default_factory=section)))
    namespace = {"rules": rules, "given": given}
    made = make_dataclass(
        f"OptimConfig of {names['']}",
        own,
        bases=(OptimConfig,),
        frozen=True,
        namespace=namespace,
    )
    made.__doc__ = (
        f"Optimizer and learning-rate schedule. {name_of(rules[''])}: "
        f"{(rules[''].__doc__ or '').partition(chr(10))[0]}"
    )
    return made


def _lr_field(rule: type[Rule]) -> Any:
    least, most = (default_lr(rule, tokens) for tokens in MEASURED_TOKENS)
    of_default = f"{least:g}"
    if most != least:
        of_default = (
            f"{least:g} for steps of {MEASURED_TOKENS[0]:,} tokens or "
            f"fewer, {most:g} from {MEASURED_TOKENS[1]:,} on"
        )
    return _left_out("lr", float, "Peak learning rate of matrices and experts.", of_default)


def _left_out(name: str, hint: Any, text: str, of_default: str) -> Any:
    """Return a field that is None where it is not given, and the default of its option, in
    words."""
    argument = Argument(describe=lambda: text, default=of_default)
    return (name, Annotated[hint | None, argument], None)


def _kind_class(kind: str, rules: Mapping[str, type[Rule]]) -> type[KindConfig]:
    """Return the dataclass of the settings of a kind. Help lists the names of the options that the
    kind inherits from `[optim]`, and does not describe them."""
    rule = rules[kind]
    is_rests = kind == "router" and rule is rules["rest"]
    above = "--optim.rest" if is_rests else "--optim"
    factor = f"{default_factor(kind, rules):g}" if not is_rests else "that of the rest"
    own: list[Any] = [
        _left_out("lr", float, "Peak learning rate, in place of lr_factor.", ""),
        _left_out("lr_factor", float, "Peak learning rate as a factor of optim.lr.", factor),
    ]
    listed = []
    for name, (hint, default) in fields_of(rule).items():
        if name == "lr":
            continue
        _refuse_if_taken(rule, name, KindConfig)
        of_default = f"as {above}" if name in inherited_by(rule, rules[""]) else shown(default)
        is_other = kind == "rest" or (rule is not rules[""] and not is_rests)
        is_hidden = not is_other or name in options_of(Rule)
        if is_hidden:
            listed.append(f"--optim.{kind}.{name.replace('_', '-')}")
        describe = functools.partial(described, rule, name)
        argument = Argument(hidden=is_hidden, describe=describe, default=of_default)
        own.append((name, Annotated[hint | None, argument], None))
    made = make_dataclass(
        f"KindConfig {kind}",
        own,
        bases=(KindConfig,),
        frozen=True,
        namespace={"options_rule": rule},
    )
    more = f" Further options, with defaults from {above}: {', '.join(listed)}." if listed else ""
    made.__doc__ = f"{KINDS[kind]} Rule: {name_of(rule)}.{more}"
    return made


def _refuse_if_taken(rule: type[Rule], name: str, base: type) -> None:
    taken = {one.name for one in fields(base)} - {"lr"} | {*KINDS}
    if name in taken:
        raise ConfigError(
            f"rule {name_of(rule)!r} has an option {name!r}, which [optim] has already: rename the "
            "rule's option"
        )
