"""`[optim]`: a rule with all its options, settings of each kind of parameters, and learning-rate
schedules.

    [optim]             name = "muon", its options, the schedule
    [optim.experts]     routed experts                      rule: that of [optim]
    [optim.matrices]    all other matrices                  rule: that of [optim]
    [optim.rest]        embeddings, head, norms, biases     rule: adamw, with lr_factor times the
                                                            learning rate
    [optim.router]      routers                             as [optim.rest], unless a rule is given

The fields depend on the rules, so each choice of rules has a dataclass of its own: `optim_class`
creates it, and `optim_config` an instance. A kind with the rule of `[optim]` inherits all options
from there. A kind with another rule inherits weight decay and the options that every rule has; its
other defaults are those of its rule. Controls (`lather.optim.controls`) are inherited by experts
and matrices alone, and by a router from the rest. Options of the schedule that a kind leaves out
are those of `[optim]`, or for a router without a rule those of the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass, replace
from typing import Annotated, Any, ClassVar, cast

from lather.argument import Argument
from lather.config.kind_config import KINDS, KindConfig
from lather.config.rate_schedule import (
    SCHEDULE_OPTIONS,
    DecayFraction,
    MinRatio,
    RateSchedule,
    Shape,
    WarmupSteps,
)
from lather.config.rule_fields import (
    MEASURED_TOKENS,
    START_WORDS,
    STARTS,
    as_text,
    check_ranges,
    default_lr,
    described,
    in_toml,
    inherited_by,
    option_fields,
    rule_named,
    shown,
)
from lather.config.rule_names import (
    DEFAULT_RULE,
    RuleNames,
    chosen_rules,
    default_factor,
)
from lather.errors import ConfigError, require
from lather.optim import Rule
from lather.optim.controls import merged
from lather.optim.options import Positive, name_of, options_of
from lather.optim.plain import is_count
from lather.optim.rules import RULES


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: str = DEFAULT_RULE
    """Rule of matrices and experts."""
    lr: float | None = None
    """Peak learning rate of matrices and experts; left out: the rule's default for the number of
    tokens in a step."""
    schedule: Shape = "linear"
    """Shape of the learning rate after warm-up. linear and cosine: decay over the rest of the run.
    wsd, 1-sqrt and power: constant, then a cooldown over the last decay_fraction: linear, 1 -
    sqrt(x), or (1 - x)^decay_power at a fraction x of the cooldown."""
    warmup_steps: WarmupSteps = 20
    """Steps of linear warm-up, or below 1 their fraction of the run."""
    decay_fraction: DecayFraction = 0.2
    """Fraction of the run that is the cooldown of wsd, 1-sqrt and power, at least one step."""
    decay_power: Positive = 2.0
    """Exponent of the cooldown of power; 1: that of wsd."""
    min_lr_ratio: MinRatio = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak."""
    per_head: bool = False
    """Treat each head of an attention's projections of queries, keys and values as a matrix of its
    own; output projections stay whole."""

    rules: ClassVar[Mapping[str, type[Rule]]]
    """Rule of `[optim]`, under "", and the rule of each kind."""
    rule_names: ClassVar[RuleNames]
    """Names of the rules for which the class was created (`chosen_rules`)."""

    def __post_init__(self) -> None:
        if type(self) is OptimConfig:
            raise TypeError("OptimConfig has no options of a rule: use optim_config(name, ...)")
        check_ranges(self, "optim.", OptimConfig)
        sections = {kind: vars(self.section(kind)) for kind in KINDS}
        names = chosen_rules({"name": self.name, **sections})
        constraint = (
            f"for the rules {dict(self.rule_names)}: use optim_config(name, ...) for others"
        )
        require(names == self.rule_names, "optim", dict(names), constraint)
        self.rule  # noqa: B018 - its construction checks its options
        self._rules  # noqa: B018
        for kind in ("rest", *KINDS):  # the rest first: a router inherits from it
            check_ranges(self.schedule_of(kind), f"optim.{kind}.")

    @functools.cached_property
    def rule(self) -> Rule:
        """The rule of `[optim]`, with all its options."""
        options = {name: getattr(self, name) for name in option_fields(self.rules[""])}
        return _make_rule(
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
        """The rule of each kind, made of its defaults, of what it inherits from `[optim]`, and of
        the options of its section."""
        rules = {}
        for kind, rule in self.rules.items():
            if not kind:
                continue
            layout = "per_expert" if kind == "experts" else "tensor"
            if kind == "experts" and self.stacks_experts:
                layout = "stacked"
            defaults = {name: default for name, (_, default) in option_fields(rule).items()}
            options = {
                **{name: value for name, value in defaults.items() if value is not None},
                **{name: getattr(self, name) for name in _inherited(kind, self.rules)},
            }
            options = {
                **merged(options, self._set_in(kind, option_fields(rule).keys() - {"lr"})),
                **{"lr": self.lr_of(kind), "nonfinite": "ignore", "matrix_layout": layout},
            }
            rules[kind] = _make_rule(rule, options, f"optim.{kind}.")
        return rules

    def _set_in(self, kind: str, names: Collection[str]) -> dict[str, Any]:
        """Return those of the named options that the section of a kind sets; a router without a
        rule of its own has those of the rest, too."""
        section = self.section(kind)
        options = {name: getattr(section, name) for name in names}
        options = {name: value for name, value in options.items() if value is not None}
        inherits = kind == "router" and not section.rule
        return merged(self._set_in("rest", names), options) if inherits else options

    def schedule_of(self, kind: str = "") -> RateSchedule:
        """Return the schedule of a kind of parameters, or that of `[optim]`."""
        values = {name: getattr(self, name) for name in SCHEDULE_OPTIONS}
        return RateSchedule(**values | (self._set_in(kind, SCHEDULE_OPTIONS) if kind else {}))

    def own_schedules(self, *, has_experts: bool = True) -> dict[str, RateSchedule]:
        """Return the schedules of kinds of a model with or without experts that do not have that of
        `[optim]`."""
        schedules = {kind: self.schedule_of(kind) for kind in _kinds(has_experts)}
        return {kind: each for kind, each in schedules.items() if each != self.schedule_of()}

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

    def _factor(self, kind: str) -> float:
        factor = self.section(kind).lr_factor
        return default_factor(kind, self.rules) if factor is None else factor

    def fractions(self) -> list[tuple[str, str, float]]:
        """Return the options that are fractions of the run: the kind in whose section they stand,
        empty for `[optim]`; the option; the fraction."""
        sections = {"": self, **{kind: self.section(kind) for kind in KINDS}}
        return [
            (kind, name, value)
            for kind, section in sections.items()
            for name in STARTS
            if isinstance(value := getattr(section, name, None), float)
        ]

    def with_starts(self, start_of: Callable[[str, str, float], float]) -> OptimConfig:
        """Return a copy with other values in the place of the `fractions`: `start_of` of each."""
        config = self
        for kind, name, fraction in self.fractions():
            change: dict[str, Any] = {name: start_of(kind, name, fraction)}
            if kind:
                change = {kind: replace(config.section(kind), **change)}
            config = replace(config, **change)
        return config

    def describe_rates(self, *, has_experts: bool = True) -> str:
        """Name the rule and the peak learning rate of every kind of parameters that a model with
        or without experts has."""
        kinds: dict[str, list[str]] = {}
        for kind in _kinds(has_experts):
            rate = f"{name_of(self.rules[kind])} at {self.lr_of(kind):.3g}"
            kinds.setdefault(rate, []).append(kind)
        return "; ".join(f"{rate} for {' and '.join(names)}" for rate, names in kinds.items())

    def resolved(self, tokens_per_step: int) -> OptimConfig:
        """Return a copy with all defaults filled in that are not defaults of a field: the learning
        rate for steps of `tokens_per_step` tokens, and the rule, rate and options of kinds that
        differ from `[optim]`."""
        changes: dict[str, Any] = {}
        for kind in KINDS:
            section, rule = self.section(kind), self.rules[kind]
            if kind == "rest" or (section.rule and rule is not self.rules[""]):
                made = self.rule_of(kind)
                names = option_fields(rule).keys() - _inherited(kind, self.rules) - {"lr"}
                options: dict[str, Any] = {name: as_text(getattr(made, name)) for name in names}
                factor = self._factor(kind) if section.lr is None else None
                changes[kind] = replace(section, rule=name_of(rule), lr_factor=factor, **options)
        if self.lr is None:
            changes["lr"] = default_lr(self.rules[""], tokens_per_step)
        return replace(self, **changes)

    def __reduce__(self) -> tuple[Callable[..., OptimConfig], tuple[()]]:
        """Copy by value: pickle cannot find classes by name that are created at run time."""
        return functools.partial(optim_config, **asdict(self)), ()


def _kinds(has_experts: bool) -> tuple[str, ...]:
    return tuple(KINDS) if has_experts else ("matrices", "rest")


def _make_rule(rule: type[Rule], options: dict[str, Any], prefix: str) -> Rule:
    for name, option in options_of(rule).items():
        if option.default is MISSING and options.get(name) is None:
            raise ConfigError(
                f"{prefix}{name} is not given, and {name_of(rule)!r} has no default for it: give "
                f"{prefix}{name}"
            )
    for name in options.keys() & {*STARTS}:
        value = options[name]
        is_fraction = isinstance(value, float) and 0 < value < 1
        require(is_fraction or is_count(value, 0), prefix + name, value, START_WORDS)
        options = {**options, name: 1 if is_fraction else value}  # until the steps are known
    try:
        return rule(**options)
    except ValueError as error:
        raise ConfigError(in_toml(str(error), prefix)) from None


def optim_config(name: str = DEFAULT_RULE, **values: Any) -> OptimConfig:
    """Build `[optim]` in Python from options of the rule and mappings for sections. Raises
    ConfigError for a bad value, TypeError for an unknown option."""
    values = {"name": name, **values}
    cls = optim_class(chosen_rules(values))
    for kind in KINDS:
        if isinstance(values.get(kind), Mapping):
            values[kind] = cls.__annotations__[kind](**values[kind])
    return cls(**values)


@functools.cache
def optim_class(rule_names: RuleNames) -> type[OptimConfig]:
    """Return the dataclass of `[optim]` for these rules."""
    rules: dict[str, type[Rule]] = {}
    for kind, name in rule_names:
        field_name = f"optim.{kind}.rule" if kind else "optim.name"
        rules[kind] = rule_named(name, field_name) if name else rules["rest"]
    rule = rules[""]
    least, most = (default_lr(rule, tokens) for tokens in MEASURED_TOKENS)
    of_lr = f"{least:g}"
    if most != least:
        few, many = MEASURED_TOKENS
        of_lr += f" for steps of {few:,} tokens or fewer, {most:g} from {many:,} on"
    about = (
        f"Rule of matrices and experts: {', '.join(RULES)}, or module:Class of your own. Its "
        "options follow."
    )
    fields_of_class: list[Any] = [
        ("name", Annotated[str, Argument(description=about)], name_of(rule)),
        _left_out("lr", float, "Peak learning rate of matrices and experts.", of_lr),
    ]
    for name, (hint, default) in _options_as_fields(rule, OptimConfig):
        argument = Argument(description=functools.partial(described, rule, name))
        of_field = hint if default is not None else hint | None
        fields_of_class.append((name, Annotated[of_field, argument], default))
    for kind in KINDS:
        section = _kind_class(kind, rules)
        fields_of_class.append((kind, section, field(default_factory=section)))
    about = f"{name_of(rule)}: {(rule.__doc__ or '').partition(chr(10))[0]}"
    return make_dataclass(
        f"OptimConfig of {name_of(rule)}",
        fields_of_class,
        bases=(OptimConfig,),
        frozen=True,
        namespace={
            "rules": rules,
            "rule_names": rule_names,
            "__doc__": f"Optimizer and learning-rate schedule. {about}",
        },
    )


def _inherited(kind: str, rules: Mapping[str, type[Rule]]) -> set[str]:
    """Return the options that a kind of parameters inherits from `[optim]`."""
    as_matrices = kind in {"experts", "matrices"}
    return inherited_by(rules[kind], rules[""], as_matrices=as_matrices)


def _kind_class(kind: str, rules: Mapping[str, type[Rule]]) -> type[KindConfig]:
    """Return the dataclass of the settings of a kind. Help lists the names of the options that the
    kind inherits, and does not describe them."""
    rule = rules[kind]
    above = "rest" if kind == "router" and rule is rules["rest"] else ""
    factor = "that of the rest" if above else f"{default_factor(kind, rules):g}"
    fields_of_class = [
        _left_out("lr", float, "Peak learning rate, in place of lr_factor."),
        _left_out("lr_factor", float, "Peak learning rate as a factor of optim.lr.", factor),
    ]
    inherited = inherited_by(rule, rule) if above else _inherited(kind, rules)
    for name, (hint, default) in _options_as_fields(rule, KindConfig):
        text = functools.partial(described, rule, name)
        fields_of_class.append(
            _left_out(name, hint, text, shown(default), hidden=name in inherited)
        )
    about = f"{KINDS[kind]} Rule: {name_of(rule)}."
    further = [*SCHEDULE_OPTIONS, *(name for name in option_fields(rule) if name in inherited)]
    names = ", ".join(f"--optim.{kind}.{name.replace('_', '-')}" for name in further)
    source = f"--optim{'.' if above else ''}{above}"
    about += f" Further options, with defaults from {source}: {names}."
    return make_dataclass(
        f"KindConfig {kind}",
        fields_of_class,
        bases=(KindConfig,),
        frozen=True,
        namespace={"options_rule": rule, "__doc__": about},
    )


def _left_out(
    name: str, hint: Any, text: str | Callable[[], str], default: str = "", hidden: bool = False
) -> Any:
    """Return a field that is None where it is not given, with the default of its option in
    words."""
    argument = Argument(description=text, default=default, hidden=hidden)
    return (name, Annotated[hint | None, argument], None)


def _options_as_fields(rule: type[Rule], section: type) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the options of a rule that become fields of a section. Raises ConfigError for an option
    with the name of a field that the section has already."""
    fields_of_section = {each.name for each in fields(section)} | {*KINDS}
    for name, option in option_fields(rule).items():
        if name == "lr":
            continue
        if name in fields_of_section:
            raise ConfigError(
                f"rule {name_of(rule)!r} has an option {name!r}, which [optim] has already: rename "
                "the rule's option"
            )
        yield name, option
