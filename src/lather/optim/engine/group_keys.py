"""Keys of parameter groups that are no options of the group's rule: which are kept, and which are
refused.

Groups come from other programs: trainers label and scale them, schedulers keep their own values in
them, and other optimizers choose a rule and its options by them. A key that changes no number is
kept and ignored. A key that asks for what the group does anyway is kept, too. One that asks for
another rule or another step is refused, because otherwise a group would take a step that nobody
asked for. Keys of which nothing is known are kept and named in a warning.

    HARMLESS, multipliers           torch's switches, values of schedulers, labels: kept
    RULE_KEYS, use_X, is_X          the rule: `use_muon`, `algorithm`; kept if it is the group's
    WHAT_HAPPENS                    a property of the step: `amsgrad`; kept if the step has it
    OTHER_NAMES                     options under other names: `learning_rate`; refused
    options of other rules          refused, unless an optimizer has put them into all its groups
    near misses                     misspelt options: refused
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lather.optim.engine.known_keys import (
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
from lather.optim.options import name_of, options_of
from lather.optim.plain import plain
from lather.optim.rule import Rule

Rules = Mapping[str, type[Rule]]
"""Rules by name."""

OWN_KEYS = {"params", "param_names", "rule", "partition_dim"}
"""Keys with a meaning that are no options of a rule: torch's own, the rule, and the dim of
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
        inert: values that an optimizer puts into all its groups, whatever their rules: equal ones
            may be options of other rules.
    """
    extra = sorted(group.keys() - options_of(type(rule)).keys() - OWN_KEYS - HARMLESS, key=str)
    if not extra:
        return []
    equal = {key for key in extra if inert and key in inert and plain(group[key]) == inert[key]}
    allowed = equal | {*exempt, *_copied(group, rule, rules)}
    if "ns_steps" in group:
        allowed.add("eps")  # torch.optim.Muon's: the least norm by which it divides
    of_adam = {"betas", "eps"}.intersection(extra) if group.keys() >= TORCH_ADAM else set()
    asking = (key for key in extra if key not in of_adam)
    return [
        *of_adam,
        *(str(key) for key in asking if not _is_known(key, group[key], rule, rules, allowed)),
    ]


def asks(key: Any) -> bool:
    """Whether the value of a key that is no option decides whether the key is kept or refused."""
    return isinstance(key, str) and (key in ASKING or key.startswith(("use_", "is_")))


def _is_known(key: Any, value: Any, rule: Rule, rules: Rules, allowed: Collection[str]) -> bool:
    """Whether a key that is no option of the rule is known to ask for nothing else than the rule
    does; raises if it does."""
    if not isinstance(key, str):
        return False
    what, name = f"{key}={value!r} in a parameter group", name_of(type(rule))
    if (asked := _asked_rule(key, value, rules)) is not None:
        if not _is_rule(asked, rule):
            remedy = _remedy(key, asked, rules)
            raise ValueError(f"{what} asks for {asked}, but the group's rule is {name!r}: {remedy}")
        return True
    if key in WHAT_HAPPENS:
        holds, remedy = WHAT_HAPPENS[key]
        if not holds(value, rule):
            raise ValueError(f"{what} asks for another step than its rule {name!r} takes: {remedy}")
        return True
    leaves_it_open = key in RULE_KEYS and (value is None or isinstance(value, str))
    if leaves_it_open or key in LABELS_OR_RULES or key in allowed or key.startswith("is_"):
        return True
    return _is_multiplier_or_refused(key, what, rule, rules)


def _is_multiplier_or_refused(key: str, what: str, rule: Rule, rules: Rules) -> bool:
    """Whether a key is a trainer's multiplier. Raises ValueError for an option of another rule,
    and for a misspelt option."""
    name = name_of(type(rule))
    options, meant = list(options_of(type(rule))), OTHER_NAMES.get(key, key)
    near = [meant] if meant in options else difflib.get_close_matches(key, options, 1, LIKENESS)
    others = [] if meant in options else rules.items()
    owners = [name for name, other in others if meant in options_of(other)]
    if owners:
        option = f"option {meant!r}" if meant != key else "option"
        guess = f"did you mean {near[0]!r}? Otherwise " if near and near[0].endswith(key) else ""
        raise ValueError(
            f"{what} is an {option} of {', '.join(owners)}, not of the group's rule {name!r}: "
            f'{guess}leave it out, or give the group one of these as its "rule"'
        )
    if (prefix := _prefix(key, rules)) is not None:
        text = _rule_text(prefix, rules)
        raise ValueError(
            f"{what} is for parameters that take the step of {prefix}, and the group's rule is "
            f'{name!r}: give them a group with {text}, and options without "{prefix}_"'
        )
    if near and not key.endswith(MULTIPLIERS):
        known = ", ".join(sorted([*options, *OWN_KEYS]))
        guess = f"did you mean {near[0]!r}? Known options: {known}"
        raise ValueError(f"unknown option {key!r} in a parameter group: {guess}")
    return key.endswith(MULTIPLIERS)


def _asked_rule(key: str, value: Any, rules: Rules) -> str | None:
    """Return which rule a key of a group asks for: a word such as "adamw", "not lion" for any
    other than that, or None if the key asks for no rule."""
    words = OPTIMIZERS | ALIASES.keys() | set(map(_word, rules))
    match = re.fullmatch(r"(?:use|is)_(\w+)", key)
    if match and (word := _word(match[1])) in words:
        if not isinstance(plain(value), int):
            return None
        return word if value else ("adamw" if word in FALL_BACK else f"not {word}")
    named = getattr(value, "__name__", getattr(value, "name", None))
    text = value if isinstance(value, str) else named
    if key not in RULE_KEYS | LABELS_OR_RULES or not isinstance(text, str):
        return None
    whole, first = _word(text), _word(re.split(r"[_\-. ]", text)[0])
    asked = next((word for word in (whole, first) if word in words), None)
    return asked or (whole if key in RULE_KEYS and whole not in NO_RULE else None)


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower().rpartition(":")[2].removesuffix("rule"))


def _is_rule(asked: str, rule: Rule) -> bool:
    """Whether a rule, or one from which it derives, is the one that is asked for."""
    if asked.startswith("not "):
        return not _is_rule(asked.removeprefix("not "), rule)
    classes = [cls for cls in type(rule).__mro__ if issubclass(cls, Rule)]
    names = {_word(text) for cls in classes for text in (name_of(cls), cls.__name__)}
    is_normalized = asked != "normuon" or bool(getattr(rule, "normalize", None))
    return is_normalized and not names.isdisjoint({asked, ALIASES.get(asked, asked)})


def _rule_text(asked: str, rules: Rules) -> str | None:
    """Return the entry of a group for a rule, or None if no known rule is the one that is asked
    for."""
    wanted = {asked, ALIASES.get(asked, asked)}
    name = next((name for name in rules if _word(name) in wanted), None)
    return name and f'"rule": "{name}"' + (', "normalize": "row"' if asked == "normuon" else "")


def _remedy(key: str, asked: str, rules: Rules) -> str:
    if (text := _rule_text(asked, rules)) is not None:
        return f"give the group {text}, or leave {key} out"
    if asked.startswith("not "):
        return f'give the group another "rule", or leave {key} out'
    give = "give these parameters to another optimizer"
    return f"Lather has no such rule; {give}, or leave {key} out"


def _prefix(key: str, rules: Rules) -> str | None:
    """Return the word before an option of some rule: "adamw" for `adamw_betas`; None if the key
    has not this form."""
    prefix, _, option = key.partition("_")
    known = option in OTHER_NAMES or any(option in options_of(rule) for rule in rules.values())
    return prefix if known and _word(prefix) in OPTIMIZERS and _rule_text(prefix, rules) else None


def _copied(group: Mapping[str, Any], rule: Rule, rules: Rules) -> Iterator[str]:
    """Yield the options of rules all of whose options a group has, several of which its own rule
    does not have: an optimizer with that default rule has put them there."""
    own = options_of(type(rule)).keys()
    for other in rules.values() if "rule" in group else ():
        options = options_of(other).keys()
        if options <= group.keys() and len(options - own) > 1:
            yield from options
