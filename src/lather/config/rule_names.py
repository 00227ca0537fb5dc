"""The rules of an `[optim]`, by kind of parameters, and the ratio of the rates of the rest to the
rates of the matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lather.config.kind_config import KINDS
from lather.errors import require
from lather.optim import Rule

RuleNames = tuple[tuple[str, str], ...]
"""Names of rules by kind, which can be hashed."""

DEFAULT_RULE = "muon"
"""Rule of matrices and experts: of the rules that cost little time and state, it gains most
(docs/results.md)."""
REST_RULE = "adamw"
REST_FACTORS = {
    ("adamw", "adamw"): 16.0,
    ("muon", "adamw"): 2.0,
    ("soap_muon", "adamw"): 2.0,
    ("soap", "adamw"): 8.0,
    ("shampoo", "adamw"): 8.0,
    ("psgd_kron", "adamw"): 16.0,
    ("adamuon", "adamw"): 1.6,
    ("scion", "adamw"): 1.6,
    ("muon", "embedding_soap"): 1.6,
    ("soap_muon", "embedding_soap"): 1.6,
}
"""Ratio of the learning rate of the rest to that of the matrices, by (rule of matrices, rule of the
rest); 1 for all other pairs. From docs/results.md; those of shampoo, psgd_kron, adamuon and scion
from single runs (docs/log.md)."""


def chosen_rules(mapping: Mapping[str, Any]) -> RuleNames:
    """Return the names of the rules in an `[optim]`, for `optim_class`: its rule under "", and that
    of each kind. The name of a router's rule is empty if the rule is that of the rest."""
    name = mapping.get("name", DEFAULT_RULE)
    names = {"": name, "experts": name, "matrices": name, "rest": REST_RULE, "router": ""}
    for kind in KINDS:
        section = mapping.get(kind)
        rule = section.get("rule", "") if isinstance(section, Mapping) else ""
        names[kind] = rule or names[kind]
    for kind, name in names.items():
        field_name = f"optim.{kind}.rule" if kind else "optim.name"
        require(isinstance(name, str), field_name, name, "a string")
    return tuple(names.items())


def default_factor(kind: str, rules: Mapping[str, type[Rule]]) -> float:
    """Return the `lr_factor` of a kind that does not set it."""
    return REST_FACTORS.get((rules[""].name, rules[kind].name), 1.0) if kind == "rest" else 1.0
