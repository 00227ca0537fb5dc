"""The rules, one file each. An import here registers a rule under its name, which `rule` in
parameter groups and `[optim] name` of the trainer accept, and exports its optimizer from
`lather.optim`.
"""

from __future__ import annotations

import importlib
from typing import Any

from lather.optim.engine.optimizer import MatrixOptimizer as _Optimizer
from lather.optim.rule import Rule
from lather.optim.rules.adamw import AdamW as AdamW
from lather.optim.rules.kl_soap import KLSOAP as KLSOAP
from lather.optim.rules.kl_soap import REKLS as REKLS
from lather.optim.rules.kl_soap import StackedSOAP as StackedSOAP
from lather.optim.rules.muon import Muon as Muon
from lather.optim.rules.soap import SOAP as SOAP
from lather.optim.rules.soap import EmbeddingSOAP as EmbeddingSOAP
from lather.optim.rules.soap_muon import SOAPMuon as SOAPMuon

_OPTIMIZERS = [
    one
    for one in list(vars().values())
    if isinstance(one, type) and issubclass(one, _Optimizer) and one is not _Optimizer
]

OPTIMIZER_OF: dict[type[Rule], type[_Optimizer]] = {one.rule: one for one in _OPTIMIZERS}
"""The registered rules, each with the optimizer whose default rule it is."""
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in OPTIMIZER_OF}
"""The registered rules by name."""


def find_rule(name: str) -> type[Rule]:
    """Return the rule that is registered under `name`, or import it if `name` is `module:Class`.
    Raises ValueError if there is none."""
    if name in RULES:
        return RULES[name]
    module, colon, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module) if colon else None
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f" ({error})" if colon else ""
        raise ValueError(
            f"rule {name!r} is not known{problem}: give one of {', '.join(RULES)}, or module:Class "
            "of your own"
        ) from None
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise ValueError(
            f"rule {name!r} is not a subclass of lather.optim.Rule: give the class of a rule"
        )
    return found
