"""The rules, a file for each. A rule that is listed here is registered under its name, which `rule`
in parameter groups and `[optim] name` of the trainer accept; its optimizer is in
`lather.optim.optimizers`.
"""

from __future__ import annotations

import importlib
from typing import Any

from lather.optim.rule import Rule
from lather.optim.rules.adamuon import AdaMuonRule
from lather.optim.rules.adamw import AdamWRule
from lather.optim.rules.kl_soap import KLSOAPRule, REKLSRule, StackedSOAPRule
from lather.optim.rules.muon import MuonRule
from lather.optim.rules.psgd_kron import PSGDKronRule
from lather.optim.rules.scion import ScionRule
from lather.optim.rules.shampoo import ShampooRule
from lather.optim.rules.soap import EmbeddingSOAPRule, SOAPRule
from lather.optim.rules.soap_muon import SOAPMuonRule

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        *(AdamWRule, KLSOAPRule, REKLSRule, StackedSOAPRule),
        *(MuonRule, SOAPRule, EmbeddingSOAPRule, SOAPMuonRule),
        *(ShampooRule, PSGDKronRule, AdaMuonRule, ScionRule),
    )
}
"""The registered rules by name."""


def find_rule(name: str) -> type[Rule]:
    """Return the rule that is registered under `name`, or import it if `name` is `module:Class`.
    Raises ValueError if there is none."""
    if name in RULES:
        return RULES[name]
    module, colon, qualname = name.partition(":")
    try:
        rule: Any = importlib.import_module(module) if colon else None
        for part in qualname.split("."):
            rule = getattr(rule, part)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f" ({error})" if colon else ""
        raise ValueError(
            f"rule {name!r} is not known{problem}: give one of {', '.join(RULES)}, or module:Class "
            "of your own"
        ) from None
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise ValueError(
            f"rule {name!r} is not a subclass of lather.optim.Rule: give the class of a rule"
        )
    return rule
