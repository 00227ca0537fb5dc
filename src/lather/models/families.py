"""The model families, and the conversion of their configurations from and to Hugging Face's
`config.json`.

A field of a `config.json` is a field of the configuration, or supported only with values that say
what is built, or without influence on training (`lather.models.hf.known_fields`, and the family's
own). Other values of these fields are errors, so that the model is never another than the one
described. Fields that no code for the family reads are passed over; `unread_fields` names them.
Rotary settings are read and written in both styles: `rope_theta` and `rope_scaling` (transformers
4, the hub), and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lather.errors import ConfigError, as_toml
from lather.models import deepseek_v2, gpt_oss, qwen3_moe
from lather.models.decoder import Decoder
from lather.models.deepseek_v2 import DeepseekV2Config
from lather.models.gpt_oss import GptOssConfig
from lather.models.hf.config_fields import PublishedConfig
from lather.models.hf.known_fields import FIXED, NEUTRAL, NO_INFLUENCE, OFF
from lather.models.qwen3_moe import Qwen3MoeConfig
from lather.models.rotary import YarnConfig

ModelConfig = DeepseekV2Config | Qwen3MoeConfig | GptOssConfig


@dataclass(frozen=True)
class Family:
    """A model family: its configuration, its builder, and its description in Hugging Face
    folders."""

    model_type: str
    """Hugging Face name of the family."""
    config: type[ModelConfig]
    build: Callable[..., Decoder]
    """Builds the model from a configuration, a generator and, optionally, a device."""
    published: PublishedConfig


_FAMILIES = (
    Family("deepseek_v2", DeepseekV2Config, deepseek_v2.build_deepseek_v2, deepseek_v2.PUBLISHED),
    Family("qwen3_moe", Qwen3MoeConfig, qwen3_moe.build_qwen3_moe, qwen3_moe.PUBLISHED),
    Family("gpt_oss", GptOssConfig, gpt_oss.build_gpt_oss, gpt_oss.PUBLISHED),
)
FAMILIES: Mapping[str, Family] = types.MappingProxyType(
    {family.model_type: family for family in _FAMILIES}
)

OPTIONAL = frozenset({"rms_norm_eps", "initializer_range", "tie_word_embeddings"})
"""Fields of any family that may be left out, like `PublishedConfig.optional`."""

LARGEST = 10**8
"""Upper limit for integers in a configuration."""
LONGEST = 80
"""Characters of a value that a message shows."""
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
ROPE_TYPES = ("default", "yarn")
QUANTIZATION = ("quantization_config", "compression_config", "quantization")
"""Fields that describe packed weights: those of transformers, of compressed-tensors and of MLX."""


def build_model(
    config: ModelConfig,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Decoder:
    """Build the model on `device`, with weights drawn on CPU from `generator` (None: torch's
    default); on the meta device without weights."""
    return FAMILIES[config.model_type].build(config, generator, device)


def config_from_hugging_face(mapping: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that a parsed `config.json` describes.

    Raises ConfigError, with the name of the field, for an unsupported family, field or value, and
    for missing fields.
    """
    model_type = mapping.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"model_type = {_shown(model_type)} is not supported: it must be one of "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    published = family.published
    mapping = _without_aliases(mapping, published.aliases)
    _check_fixed(mapping, family)
    rope_theta, rope_scaling = _read_rope(mapping, published)

    hints = typing.get_type_hints(family.config)
    names = [
        field.name for field in dataclasses.fields(family.config) if field.name not in ROPE_FIELDS
    ]
    optional = OPTIONAL | published.optional | published.defaults.keys() | published.nullable
    missing = [name for name in names if mapping.get(name) is None and name not in optional]
    missing += [name for name in sorted(published.nullable) if name not in mapping]
    if missing:
        raise ConfigError(
            f"missing fields: {', '.join(missing)}; a {family.model_type} model cannot be built "
            "without them"
        )
    fields = {
        name: _typed(mapping[name], hints[name], name)
        for name in names
        if mapping.get(name) is not None
    }
    for name, default in published.defaults.items():
        if name not in fields:
            fields[name] = default(fields) if callable(default) else default
    config = family.config(**fields, rope_theta=rope_theta, rope_scaling=rope_scaling)
    for name, derive in published.derived.items():
        _check_value(name, mapping.get(name), (derive(config),), family)
    for name, values in _agreeing(config, family).items():
        _check_value(name, mapping.get(name), values, family)
    return config


def unread_fields(mapping: Mapping[str, Any]) -> list[str]:
    """Return the fields of a parsed `config.json` that `config_from_hugging_face` accepted without
    knowing them: no code for the family reads them. Null counts as left out."""
    family = FAMILIES[mapping["model_type"]]
    published = family.published
    checked = {"architectures", *QUANTIZATION, "original_max_position_embeddings"}
    checked |= {*FIXED, *NEUTRAL, *published.fixed, *published.derived, *published.agreeing}
    known = {*_own_fields(family), *ROPE_FIELDS, *published.aliases} | checked | NO_INFLUENCE
    return [name for name, value in mapping.items() if value is not None and name not in known]


def config_to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """Return a `config.json` that transformers loads, in the order of the fields. The caller adds
    the dtype of the weights."""
    published = FAMILIES[config.model_type].published
    fields: dict[str, Any] = {"architectures": [published.architecture]}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in ROPE_FIELDS and not (
            value is None and field.name not in published.nullable
        ):
            fields[field.name] = list(value) if isinstance(value, tuple) else value
    fields |= {name: values[0] for name, values in {**FIXED, **published.fixed}.items()}
    fields |= {name: derive(config) for name, derive in published.derived.items()}
    fields |= published.written
    scaling = None
    if config.rope_scaling is not None:
        given = {
            name: value
            for name, value in dataclasses.asdict(config.rope_scaling).items()
            if value is not None
        }
        scaling = {"rope_type": "yarn", **given}
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    return {
        **fields,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }


def _own_fields(family: Family) -> set[str]:
    """Return the fields of the configuration, and the family's fields without influence."""
    fields = {field.name for field in dataclasses.fields(family.config)}
    return {*fields, *family.published.ignored, *family.published.written}


def _agreeing(config: ModelConfig, family: Family) -> dict[str, tuple[Any, ...]]:
    """Return the fields that say what is built anyway, and the values with which they do."""
    published = family.published
    own = _own_fields(family) | {*FIXED, *published.fixed, *published.derived}
    found = {
        name: values(config) if callable(values) else values
        for name, values in {**NEUTRAL, **published.agreeing}.items()
        if name not in own
    }
    if config.rope_scaling is not None:  # transformers prefers this field to that of YaRN
        length = config.rope_scaling.original_max_position_embeddings
        found["original_max_position_embeddings"] = (length,)
    return found


def _without_aliases(mapping: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    renamed = dict(mapping)
    for alias, name in aliases.items():
        value = renamed.pop(alias, None)
        if value is not None and renamed.setdefault(name, value) != value:
            raise ConfigError(
                f"{alias} = {_shown(value)} contradicts {name} = {_shown(renamed[name])}: they are "
                "one field, keep one"
            )
    return renamed


def _check_fixed(mapping: Mapping[str, Any], family: Family) -> None:
    published = family.published
    _check_value("architectures", mapping.get("architectures"), ([published.architecture],), family)
    for name, values in {**FIXED, **published.fixed}.items():
        _check_value(name, mapping.get(name), values, family)
    for name in QUANTIZATION:
        if mapping.get(name) is not None:
            _check_quantization(name, mapping[name], family)


def _check_quantization(name: str, quantization: Any, family: Family) -> None:
    """Raise ConfigError unless the weights are in a packed form that can be read."""
    readable = family.published.quantization
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if readable is None or method != readable:
        supported = (
            "must be left out" if readable is None else f"must be {_shown(readable)} or left out"
        )
        is_named = isinstance(quantization, Mapping) and "quant_method" in quantization
        what = (
            f"{name}.quant_method = {_shown(method)}"
            if is_named
            else f"{name} = {_shown(quantization)}"
        )
        raise ConfigError(
            f"{what} is not supported for {family.model_type}: "
            f"it {supported}; give a copy of the model whose weights are in bf16, fp16 or fp32"
        )


def _check_value(name: str, value: Any, supported: tuple[Any, ...], family: Family) -> None:
    """Raise ConfigError unless the value is supported. Null counts as left out; True is not 1."""
    if value is not None and not any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in supported
    ):
        may_be_off = supported[-len(OFF) :] == OFF
        shown = supported[: -len(OFF)] if may_be_off else supported
        words = list(map(_shown, shown))
        if may_be_off:
            words.append("null, false, 0 or left out, since no model of this family has it")
        text = _shown(value)
        is_cut = any(one.endswith("...") for one in (text, *words))
        if is_cut and isinstance(value, list) and shown and isinstance(shown[0], list):
            name, text, words = _difference(name, value, shown[0])
        raise ConfigError(
            f"{name} = {text} is not supported for {family.model_type}: it must be "
            f"{' or '.join(words)}; give such a model, or correct the field if it is wrong"
        )


def _difference(name: str, value: list[Any], right: list[Any]) -> tuple[str, str, list[str]]:
    """Return the first entry in which a list is not right: its name, its text and the right
    text."""
    if len(value) != len(right):
        return f"the length of {name}", str(len(value)), [str(len(right))]
    index = next(index for index, entry in enumerate(value) if entry != right[index])
    return f"{name}[{index}]", _shown(value[index]), [_shown(right[index])]


def _shown(value: Any) -> str:
    """Write a value with the words of JSON, texts in single quotes; the end of a long one is
    cut."""
    text = as_toml(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _read_rope(
    mapping: Mapping[str, Any], published: PublishedConfig
) -> tuple[float, YarnConfig | None]:
    """Read both styles of rotary settings; if both are given they must agree."""
    given = [
        (name, mapping[name])
        for name in ("rope_scaling", "rope_parameters")
        if mapping.get(name) is not None
    ]
    thetas = (
        {}
        if mapping.get("rope_theta") is None
        else {"rope_theta": _typed(mapping["rope_theta"], float, "rope_theta")}
    )
    scalings: dict[str, YarnConfig | None] = {}
    for name, rope in given:
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{name} = {_shown(rope)} is not valid: it must be an object or null")
        if rope.get("rope_theta") is not None:
            thetas[f"{name}.rope_theta"] = _typed(rope["rope_theta"], float, f"{name}.rope_theta")
        scalings[name] = _read_scaling(name, rope, mapping)
    if not thetas:
        raise ConfigError("missing fields: rope_theta; give it or rope_parameters.rope_theta")
    if not scalings and published.rope_scaling_required:
        raise ConfigError("missing fields: rope_scaling; give it or rope_parameters")
    for values in (thetas, scalings):
        if len(set(values.values())) > 1:
            contradiction = " and ".join(
                f"{name} = {_scaling_text(value)}" for name, value in values.items()
            )
            raise ConfigError(f"{contradiction} contradict each other: keep one of them")
    return next(iter(thetas.values())), next(iter(scalings.values()), None)


def _scaling_text(value: float | YarnConfig | None) -> str:
    if isinstance(value, YarnConfig):
        fields = dataclasses.asdict(value).items()
        return json.dumps({name: one for name, one in fields if one is not None})
    return _shown(value)


def _read_scaling(
    name: str, rope: Mapping[str, Any], mapping: Mapping[str, Any]
) -> YarnConfig | None:
    kinds = {rope[key] for key in ("rope_type", "type") if isinstance(rope.get(key), str)} or {
        "default"
    }
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind not in ROPE_TYPES:
        raise ConfigError(
            f"{name}.rope_type = {'/'.join(sorted(kinds))!r} is not supported: it must be one of "
            f"{', '.join(map(repr, ROPE_TYPES))}"
        )
    hints = typing.get_type_hints(YarnConfig) if kind == "yarn" else {}
    values: dict[str, Any] = {}
    for key, value in rope.items():
        if (
            key in ("rope_type", "type", "rope_theta")
            or value is None
            or (key == "partial_rotary_factor" and value == 1)
        ):
            continue
        if key not in hints:
            raise ConfigError(
                f"{name}.{key} = {_shown(value)} is not supported for rope_type {kind!r}: remove "
                "it if it has no influence"
            )
        values[key] = _typed(value, hints[key], f"{name}.{key}")
    if kind == "default":
        return None
    if "factor" not in values:
        raise ConfigError(f"missing fields: {name}.factor; YaRN needs it")
    if "original_max_position_embeddings" not in values:  # as in transformers
        values["original_max_position_embeddings"] = _typed(
            mapping.get("max_position_embeddings"), int, "max_position_embeddings"
        )
    return YarnConfig(**values)


def _typed(value: Any, hint: Any, name: str) -> Any:
    """Convert a JSON value to the field's type: only an int to a float and a list to a tuple; all
    other types must match."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} = {_shown(value)} is not valid: it must be a list")
        return tuple(_typed(item, typing.get_args(hint)[0], name) for item in value)
    limit = LARGEST if hint is int else 10**300
    if type(value) is int and abs(value) >= limit:
        raise ConfigError(
            f"{name} = {str(value)[:20]}... is not valid: it must be below {limit:.0e}"
        )
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{name} = {_shown(value)} is not valid: it must be {words[hint]}")
    return value
