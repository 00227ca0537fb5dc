"""Fields that say the same in two ways, or one of which makes the other meaningless: a choice on
the command line replaces the file's alternatives to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lather.config.optim import KINDS
from lather.errors import ConfigError

_OF_KINDS = {"lr": ("lr_factor",), "lr_factor": ("lr",)}
REPLACED: Mapping[str, tuple[str, ...]] = {
    "data.source": ("data.path", "data.weights"),
    "model.aux_loss_alpha": ("moe.balance_coefficient",),
    "model.router_aux_loss_coef": ("moe.balance_coefficient",),
    "model.seq_aux": ("moe.balance_level",),
    **{
        f"{section}.{field}": tuple(f"{section}.{other}" for other in others)
        for section in (f"optim.{kind}" for kind in KINDS)
        for field, others in _OF_KINDS.items()
    },
}
"""Field -> its alternatives. `data.path`, and a coefficient and level of `[moe]`, take precedence
over the other by themselves."""


def without_replaced(mapping: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the values of a file without the alternatives to fields that the command line gives.

    Raises ConfigError if the command line gives a field and an alternative to it.
    """
    kept = dict(mapping)
    for field in given:
        for other in REPLACED.get(field, ()):
            if other in given:
                both = " and ".join(f"--{one.replace('_', '-')}" for one in (field, other))
                raise ConfigError(f"{both} are both given: leave one of them out")
            kept = _without(kept, other)
    return kept


def _without(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy without the key of this dotted name."""
    first, _, rest = name.partition(".")
    if not rest:
        return {key: value for key, value in mapping.items() if key != first}
    inner = mapping.get(first)
    return (
        {**mapping, first: _without(inner, rest)} if isinstance(inner, Mapping) else dict(mapping)
    )
