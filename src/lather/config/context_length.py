"""Completes the scaling of a model's rotary embedding, `[model.rope_scaling]`: what it leaves out
is taken from the model, and the model's maximal length follows it.

Hugging Face's and vLLM's meanings are kept. An original length that is left out is the model's
`max_position_embeddings` before the scaling. YaRN reaches the original length times its factor.
Published Llama 3 models reach another length than this product; theirs grows with the factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from lather.config.fields import convert, family_named, fields_of, merged
from lather.errors import ConfigError
from lather.models.families import DEFAULT_FAMILY, ModelConfig
from lather.models.rotary import ORIGINAL_LENGTH, Llama3RopeConfig, YarnConfig

SCALING, LENGTH = "rope_scaling", "max_position_embeddings"


def reaching(model: ModelConfig) -> ModelConfig:
    """Return the configuration of a published model with the maximal length that its YaRN reaches,
    where `max_position_embeddings` still is the length before it."""
    scaling = model.rope_scaling
    if not isinstance(scaling, YarnConfig):
        return model
    longest = round(scaling.factor * scaling.original_max_position_embeddings)
    longest = max(longest, model.max_position_embeddings)
    return dataclasses.replace(model, max_position_embeddings=longest)


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration in which those of dotted names replace others, with what
    these leave out of `[model.rope_scaling]`. Raises ConfigError if that lacks its factor."""
    whole, before = merged(values, overrides), values.get("model", {})
    given = {name.removeprefix("model.") for name in overrides if name.startswith("model.")}
    if isinstance(whole.get("model"), Mapping) and isinstance(before, Mapping):
        whole["model"] = completed(before, whole["model"], given)
        scaling = whole["model"].get(SCALING)
        if isinstance(scaling, Mapping) and scaling.get("factor") is None:
            raise ConfigError(
                "model.rope_scaling.factor is missing: give the new maximal length divided by the "
                "original one, or leave out all of [model.rope_scaling]"
            )
    return whole


def completed(
    before: Mapping[str, Any], model: Mapping[str, Any], given: Collection[str]
) -> dict[str, Any]:
    """Return the values of `[model]` with an original length and, unless it is `given`, with the
    maximal length that follows from the scaling, if one of the names `given` is of the scaling.

    `before`: the values without those `given`; names of the scaling begin with "rope_scaling.".
    """
    scaling = model.get(SCALING)
    is_given = any(name.startswith(f"{SCALING}.") for name in given)
    if not is_given or not isinstance(scaling, Mapping) or scaling.get("factor") is None:
        return dict(model)
    family = family_named(model.get("model_type", DEFAULT_FAMILY), "model.model_type").config
    longest = convert(before.get(LENGTH, family.max_position_embeddings), int, f"model.{LENGTH}")
    scaling = {ORIGINAL_LENGTH: longest, **scaling}
    after = {**model, SCALING: scaling}
    if LENGTH in given:
        return after
    key = f"model.{SCALING}"
    factor = convert(scaling["factor"], float, f"{key}.factor")
    length = convert(scaling[ORIGINAL_LENGTH], int, f"{key}.{ORIGINAL_LENGTH}")
    earlier, reached = before.get(SCALING), factor * length
    old = earlier.get("factor") if isinstance(earlier, Mapping) else None
    if fields_of(family)[SCALING].sections == (Llama3RopeConfig,) and old is not None:
        old = convert(old, float, f"{key}.factor")
        reached = longest / old * factor if old >= 1 else math.inf
    if factor >= 1 and 1 <= reached < math.inf:  # others are refused when the model is built
        after[LENGTH] = round(reached)
    return after
