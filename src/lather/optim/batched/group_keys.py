"""Checks keys of parameter groups that are no options of the group's rule.

Groups come from other programs: trainers label and scale them, schedulers store values in them, and
other optimizers choose a rule and its options by them. A key that changes no number is ignored, and
so is a key that asks for what the group does anyway. A key that asks for another rule or another
step is refused, because otherwise the group would take a step that nobody asked for. Unknown keys
are ignored and named in a warning. Ignored keys stay in the group.

    HARMLESS, multipliers           torch's switches, values of schedulers, labels: ignored
    RULE_KEYS, use_X, is_X, X       the rule: `use_muon`, `algorithm`; refused unless the group's
    WHAT_HAPPENS                    a property of the step: `amsgrad`; refused unless it has it
    OTHER_NAMES                     options under other names: `learning_rate`; refused
    options of other rules          refused, but for those that something has copied (`_copied`)
    near misses                     misspelt options: refused

Keys count in lower case, with underscores where a word begins: `useMuon` is `use_muon`.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Collection, Mapping
from typing import Any

from lather.optim.batched.arguments import equivalent
from lather.optim.batched.known_keys import (
    ALIASES,
    ASKING,
    FALL_BACK,
    HARMLESS,
    LABELS_OR_RULES,
    MULTIPLIERS,
    NO_RULE,
    OPTIMIZERS,
    OTHER_NAMES,
    RULE_KEYS,
    TORCH_ADAM,
    WHAT_HAPPENS,
)
from lather.optim.options import holds, name_of, options_of
from lather.optim.plain import plain
from lather.optim.rule import Rule

_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SWITCH = re.compile(r"^(use|is)_")

Rules = Mapping[str, type[Rule]]
"""Rules by name."""

GROUP_KEYS = {"params", "param_names", "rule", "partition_dim"}
"""Keys with a meaning that are no options of a rule: those of torch, the rule, and the dim of
tensor-parallel shards."""

LIKENESS = 0.8
"""Least similarity to an option at which an unknown key is taken for a misspelt option."""


def unknown_keys(
    group: Mapping[str, Any],
    rule: Rule,
    rules: Rules,
    exempt: Collection[str] = (),
    inert: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the keys of a group that mean nothing to its rule, for a warning. Raises ValueError
    for a key that asks for another rule or step than the group has, or that looks like a misspelt
    option.

    Args:
        group: the group, with all its keys.
        rule: its rule, with the options of the group.
        rules: rules whose options are known, by name.
        exempt: keys that may be options of other rules, whatever their values.
        inert: values that an optimizer puts into all its groups, whatever their rules: equal values
            may be options of other rules.
    """
    known = options_of(type(rule)).keys() | GROUP_KEYS
    if "lr" in group:
        known |= {"lr_factor"}  # a scheduler's, which does not change the group's rate
    extra = [key for key in group if key not in known and _lower(key) not in HARMLESS]
    if not extra:
        return []
    of_adam = {"betas", "eps"}.intersection(extra) if group.keys() >= TORCH_ADAM else set()
    allowed = {*exempt, *_copied(group, extra, rule, rules, inert or {})}
    others = sorted((key for key in extra if key not in of_adam), key=str)
    unknown = [str(x) for x in others if not _is_known(x, group[x], rule, rules, allowed)]
    return [*of_adam, *unknown]


def _copied(
    group: Mapping[str, Any],
    extra: Collection[Any],
    rule: Rule,
    rules: Rules,
    inert: Mapping[str, Any],
) -> set[str]:
    """Return the keys that are options of other rules because something has copied them there:

    - values that the optimizer puts into all its groups (`inert`);
    - all options of another rule, several of which the group's rule does not have: an optimizer
      with that default rule has put them there;
    - `eps` of torch.optim.Muon, the least norm by which it divides;
    - `momentum`, where it is the first of the rule's betas: MMEngine's schedulers write both.
    """
    keys = inert.keys() & set(extra)
    copied = {key for key in keys if holds(operator.eq, plain(group[key]), inert[key])}
    for other in rules.values() if "rule" in group else ():
        options = options_of(other).keys()
        if options <= group.keys() and len(options - options_of(type(rule)).keys()) > 1:
            copied |= options
    if "momentum" in group and plain(group["momentum"]) == getattr(rule, "betas", [None])[0]:
        copied.add("momentum")
    return copied | ({"eps"} if "ns_steps" in group else set())


def asks(key: Any) -> bool:
    """Whether a key that is no option may be refused, depending on its value."""
    lower = _lower(key)
    is_optimizer = _word(lower) in OPTIMIZERS | ALIASES.keys()
    return lower in ASKING or _SWITCH.match(lower) is not None or is_optimizer


def listed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays and tensors of a group under keys of which `asks` is true, as numbers and
    lists: arrays cannot be compared to detect a change."""
    arrays = {key: x for key, x in group.items() if hasattr(x, "tolist") and hasattr(x, "shape")}
    return {key: x.tolist() for key, x in arrays.items() if asks(key)}


def _lower(key: Any) -> str:
    """Return a key in the form in which it is looked up; "" if it is no text."""
    return _NEW_WORD.sub("_", key).lower() if isinstance(key, str) else ""


def _is_known(key: Any, value: Any, rule: Rule, rules: Rules, allowed: Collection[str]) -> bool:
    """Whether a key that is no option of the rule is known to ask for nothing else than the rule
    does; raises if it does."""
    if not isinstance(key, str):
        return False
    lower, value = _lower(key), plain(value)
    what, name = f"{key}={value!r} in a parameter group", name_of(type(rule))
    if asked := _asked_rule(lower, value, what, rules):
        if not _is_rule(asked, rule):
            text = f"{what} asks for {asked}, but the group's rule is {name!r}"
            raise ValueError(f"{text}: {_remedy(key, asked, rules)}")
        return True
    if lower in WHAT_HAPPENS:
        happens, remedy = WHAT_HAPPENS[lower]
        try:
            is_so = bool(happens(value, rule))
        except (RuntimeError, TypeError, ValueError):
            single = "give one value (True or False, a number, a word), or leave the key out"
            raise ValueError(f"{what} is not valid: {single}") from None
        if not is_so:
            raise ValueError(f"{what} asks for another step than its rule {name!r} takes: {remedy}")
        return True
    if lower in RULE_KEYS:
        return value is None or (isinstance(value, str) and _word(value) in NO_RULE)
    if lower in LABELS_OR_RULES or key in allowed or lower.startswith("is_"):
        return True
    _refuse_option(key, what, rule, rules)
    return lower.endswith(MULTIPLIERS)


def _refuse_option(key: str, what: str, rule: Rule, rules: Rules) -> None:
    """Raise ValueError if a key is an option of another rule or a misspelt option."""
    name, options, lower = name_of(type(rule)), list(options_of(type(rule))), _lower(key)
    meant = OTHER_NAMES.get(lower, lower)
    near = [meant] if meant in options else difflib.get_close_matches(lower, options, 1, LIKENESS)
    owners = [name for name, other in rules.items() if meant in options_of(other)]
    if owners and meant not in options:
        option = f"option {meant!r}" if meant != key else "option"
        guess = f"did you mean {near[0]!r}? Otherwise " if near and near[0].endswith(lower) else ""
        more = f"; {text}" if not guess and (text := equivalent(lower, options)) else ""
        raise ValueError(
            f"{what} is an {option} of {', '.join(owners)}, not of the group's rule {name!r}: "
            f'{guess}leave it out, or give the group one of these as its "rule"{more}'
        )
    prefix, option = _divided(lower, rules)
    if prefix and not _is_rule(prefix, rule):
        raise ValueError(
            f"{what} is for parameters that take the step of {prefix}, and the group's rule is "
            f"{name!r}: give them a group with {_rule_text(prefix, rules)}, and options without "
            f'"{prefix}_"'
        )
    if prefix and option not in options:
        no_option = f"{option!r} is no option of the group's rule {name!r}"
        raise ValueError(f"{what} has no meaning, because {no_option}: leave it out")
    near = [option] if prefix else near
    if near and not lower.endswith(MULTIPLIERS):
        known = ", ".join(sorted([*options, *GROUP_KEYS]))
        guess = f"did you mean {near[0]!r}? Known options: {known}"
        raise ValueError(f"unknown option {key!r} in a parameter group: {guess}")


def _asked_rule(key: str, value: Any, what: str, rules: Rules) -> str:
    """Return the rule for which a key of a group asks: "adamw", or "not lion" for any other than
    that. Empty if the key asks for no rule.

    Raises ValueError for a value of `use_X` or `is_X` that is neither true nor false.
    """
    words = {*OPTIMIZERS, *ALIASES, *map(_word, rules)}
    if key == "use_fallback":
        key, value = "use_adamw", None if value is False else value
    word = _word(_SWITCH.sub("", key))
    if word in words:
        if isinstance(value, int):
            return word if value else "adamw" if word in FALL_BACK else f"not {word}"
        if _SWITCH.match(key) and not isinstance(value, str | None):
            raise ValueError(f"{what} is not valid: give True or False, or leave the key out")
        return ""
    if key not in RULE_KEYS | LABELS_OR_RULES:
        return ""
    name = getattr(value, "__name__", getattr(value, "name", ""))
    word = _word(value if isinstance(value, str) else str(name))
    return word if word in words else ""


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower().rpartition(":")[2].removesuffix("rule"))


def _is_rule(asked: str, rule: Rule) -> bool:
    """Whether a rule, or a rule from which it derives, is the rule that is asked for."""
    if asked.startswith("not "):
        return not _is_rule(asked.removeprefix("not "), rule)
    classes = [cls for cls in type(rule).__mro__ if issubclass(cls, Rule)]
    names = {_word(text) for cls in classes for text in (name_of(cls), cls.__name__)}
    is_normalized = asked != "normuon" or bool(getattr(rule, "normalize", None))
    return is_normalized and not names.isdisjoint({_word(asked), ALIASES.get(asked, asked)})


def _rule_text(asked: str, rules: Rules) -> str:
    """Return the entry of a group for a rule; "" if no known rule is asked for."""
    names = {_word(asked), ALIASES.get(asked, asked)}
    entries = [f'"rule": "{name}"' for name in rules if _word(name) in names][:1]
    return ", ".join([*entries, *['"normalize": "row"'] * (asked == "normuon")])


def _remedy(key: str, asked: str, rules: Rules) -> str:
    if text := _rule_text(asked, rules):
        return f"give the group {text}, or leave {key} out"
    if asked.startswith("not "):
        return f'give the group another "rule", or leave {key} out'
    give = "give these parameters to another optimizer"
    return f"Lather has no such rule; {give}, or leave {key} out"


def _divided(key: str, rules: Rules) -> tuple[str, str]:
    """Divide `adamw_betas` into the rule and its option, under our name; ("", "") if the key has
    not this form."""
    for match in re.finditer("_", key):
        prefix, option = key[: match.start()], key[match.end() :]
        option = OTHER_NAMES.get(option, option)
        is_option = any(option in options_of(rule) for rule in rules.values())
        if is_option and _rule_text(_word(prefix), rules):
            return prefix, option
    return "", ""
