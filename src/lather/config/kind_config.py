"""Kinds of parameters, and the settings that each has in `[optim]` whatever its rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lather.argument import Argument
from lather.config.rate_schedule import Shape
from lather.optim import Rule

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

INHERITED = Argument(hidden=True)
"""Mark of options that help only names, since they are those of `[optim]` if they are left out."""


@dataclass(frozen=True)
class KindConfig:
    """Settings of one kind of parameters."""

    rule: str = ""
    """Rule of these parameters, if it differs; --help optim then shows the options of that rule."""
    lr: float | None = None
    """Peak learning rate of these parameters; left out: lr_factor times optim.lr."""
    lr_factor: float | None = None
    """Peak learning rate of these parameters as a factor of optim.lr; left out: the factor of the
    rules for these parameters."""
    schedule: Annotated[Shape | None, INHERITED] = None
    """Shape of the learning rate of these parameters. Left out, like the four options that follow:
    that of [optim], or for routers without a rule that of [optim.rest]."""
    warmup_steps: Annotated[int | float | None, INHERITED] = None
    """Steps of warm-up, or below 1 their fraction of the run."""
    decay_fraction: Annotated[float | None, INHERITED] = None
    """Fraction of the run that is the cooldown."""
    decay_power: Annotated[float | None, INHERITED] = None
    """Exponent of the cooldown of power."""
    min_lr_ratio: Annotated[float | None, INHERITED] = None
    """Learning rate at the end of the decay, as a fraction of the peak."""

    options_rule: ClassVar[type[Rule]]
    """The rule whose options the class has as fields."""
