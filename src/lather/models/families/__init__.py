"""The model families, a file each. `Family` describes the content of a file;
docs/adding-a-family.md says how to write one, here or in a module of your own."""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping
from contextlib import nullcontext

import torch

from lather.errors import ConfigError, require
from lather.models.decoder import Decoder
from lather.models.family import Family, FamilyConfig
from lather.models.mtp import MultiTokenPrediction

ModelConfig = FamilyConfig
"""The configuration of any family."""
DEFAULT_FAMILY = "deepseek_v2"
"""The family of a configuration that names none."""
_NAMES = (
    "deepseek_v2:FAMILY",
    "deepseek_v3:FAMILY",
    "deepseek_v3:KIMI_K2",
    "dots1:FAMILY",
    "ernie4_5_moe:FAMILY",
    "glm4_moe:FAMILY",
    "gpt_oss:FAMILY",
    "llama:FAMILY",
    "minimax_m2:FAMILY",
    "mistral:FAMILY",
    "mixtral:FAMILY",
    "olmoe:FAMILY",
    "qwen2_moe:FAMILY",
    "qwen3:FAMILY",
    "qwen3_5_moe:FAMILY",
    "qwen3_5_moe:TEXT",
    "qwen3_moe:FAMILY",
    "qwen3_next:FAMILY",
)


def _named(package: str, name: str) -> Family:
    module, _, attribute = name.partition(":")
    family = getattr(importlib.import_module(package + module), attribute, None)
    if not isinstance(family, Family):
        raise TypeError(f"{module} has no lather.models.family.Family of the name {attribute!r}")
    return family


FAMILIES: Mapping[str, Family] = types.MappingProxyType(
    {family.model_type: family for family in (_named(f"{__name__}.", name) for name in _NAMES)}
)
"""The families of this package, by the `model_type` of their published `config.json`."""


def find_family(model_type: str, key: str = "model.model_type") -> Family:
    """Return the family of this package with this `model_type`, or import the family that
    `module:FAMILY` names.

    Raises ConfigError, which names the value's `key`, if there is none.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(map(repr, FAMILIES))
    require(":" in model_type, key, model_type, f"one of {known}, or module:FAMILY of your own")
    try:
        return _named("", model_type)
    except Exception as error:  # whatever the module raises
        reason = f"{error}" if isinstance(error, ImportError | TypeError) else repr(error)
        raise ConfigError(
            f"{key} = {model_type!r} is not valid: it must be module:FAMILY of a module that can "
            f"be imported ({reason}): correct the name or the module, start in its folder, or add "
            "that folder to PYTHONPATH"
        ) from error


def family_of(config: ModelConfig) -> Family:
    """Return the family of a configuration. Raises ConfigError if its `model_type` names none, or
    one with another class of configurations."""
    family = find_family(config.model_type)
    words = f"the family of a {type(config).__name__}: give module:FAMILY of the module that has it"
    require(isinstance(config, family.config), "model.model_type", config.model_type, words)
    return family


def build_model(
    config: ModelConfig,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Decoder:
    """Build the model on `device`. Its weights are drawn on CPU from `generator` (None: torch's
    default), so that they are the same on every device.

    On the meta device no weights are drawn and no memory is used; this gives the sizes, or a model
    whose weights are loaded later.
    """
    is_meta = device is not None and device.type == "meta"
    block = family_of(config).block
    with torch.device("meta") if is_meta else nullcontext():
        total = config.num_hidden_layers + config.num_nextn_predict_layers
        blocks = [block(config, index) for index in range(total)]
        for further in blocks[config.num_hidden_layers :]:
            further.mtp = MultiTokenPrediction(config.hidden_size, config.rms_norm_eps)
        decoder = Decoder(blocks, config)
    if is_meta:
        return decoder
    with torch.no_grad():
        for name, value in decoder.fresh_weights(config.initializer_range, generator):
            decoder.get_parameter(name).copy_(value)
    return decoder.to(device)
