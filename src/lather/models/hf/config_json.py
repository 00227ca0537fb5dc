"""Converts the configurations of model families from and to Hugging Face's `config.json`.

A field of a `config.json` is a field of the configuration, or is supported only with the values
that say what is built, or has no influence on training (see `lather.models.hf.known_fields` and
`Family`). Other values are errors, so that the model is always the described model. Fields that no
code for the family reads are passed over; `unread_fields` names them. Whoever knows better than
these lists gives `ignore_fields`.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from lather.errors import ConfigError, as_toml
from lather.models.families import FAMILIES, ModelConfig, family_of, find_family
from lather.models.family import FP8, Family, FamilyConfig
from lather.models.hf.fp8 import SIDE
from lather.models.hf.known_fields import DEFAULTS, NEUTRAL, NO_INFLUENCE, OFF, WRITTEN
from lather.models.rotary import ORIGINAL_LENGTH, Llama3RopeConfig, YarnConfig

QUANTIZATION = ("quantization_config", "compression_config", "quantization")
"""Fields that describe packed weights: those of transformers, of compressed-tensors and of MLX."""
BLOCK_SIZE = "weight_block_size"
ROTARY_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
PARTIAL = "partial_rotary_factor"
ROTARY_DIM = "rotary_dim"
ARCHITECTURES = "architectures"
COMMON_OF_PARTS = (ARCHITECTURES, "model_type", "tie_word_embeddings")
"""Fields that stand beside those of the text model, if these are nested."""
MAX_INTEGER = 10**8
MAX_CHARACTERS = 80
"""Characters of a value that a message shows."""
WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
Scaling = YarnConfig | Llama3RopeConfig
OF_BLOCKS = {
    "layer_types": lambda config: list(config.attention_types),
    "mlp_layer_types": lambda config: [
        "dense" if config.is_dense(index) else "sparse" for index in range(config.num_hidden_layers)
    ],
}
"""Fields of any family that describe the blocks, and how to compute them."""


def config_from_hugging_face(
    mapping: Mapping[str, Any], *, model_type: str = "", ignore_fields: Collection[str] = ()
) -> ModelConfig:
    """Return the configuration that a parsed `config.json` describes.

    `model_type`: the family, as in `[model]`; empty: that which the file names. `ignore_fields`:
    fields that are passed over; `rope_scaling.KEY` for one in another. Raises ConfigError, with the
    name of the field, for an unsupported family, field or value, for missing fields, and for fields
    to be ignored that are missing or that the model is built from.
    """
    family = _family_of_file(mapping.get("model_type"), model_type)
    mapping = _without_ignored(_flat(mapping, family), ignore_fields, family)
    mapping = _with_partial_factor(_without_aliases(mapping, family.aliases), family)
    for name in QUANTIZATION:
        if mapping.get(name) is not None:
            _check_quantization(name, mapping[name], family)
    fields = {**_read_fields(mapping, family), **_read_rotary(mapping, family)}
    fields["model_type"] = model_type or family.model_type
    config: ModelConfig = family.config(**fields)
    for name, values in _supported_values(config, family).items():
        _check_value(name, mapping.get(name), values, family)
    return config


def _family_of_file(published: Any, model_type: str) -> Family:
    """Return the family with the published `model_type`, or that which `model_type` names."""
    if model_type:
        family = find_family(model_type)
        if published != family.model_type:
            raise ConfigError(
                f"model_type = {_shown(published)} is another family than {model_type}, which is "
                f"published as {family.model_type!r}: give the family that belongs to the model"
            )
        return family
    if not isinstance(published, str) or published not in FAMILIES:
        raise ConfigError(
            f"model_type = {_shown(published)} is not supported: it must be one of "
            f"{', '.join(FAMILIES)}; for a family of your own give also model_type as module:FAMILY"
        )
    return FAMILIES[published]


def _without_ignored(
    mapping: Mapping[str, Any], ignored: Collection[str], family: Family
) -> dict[str, Any]:
    """Return the fields without those to be ignored."""
    rest, read = dict(mapping), {*_names(family), *family.aliases, *ROTARY_FIELDS}
    scaling_fields = typing.get_type_hints(_scaling_class(family))
    in_rotary = {"rope_type", "type", "rope_theta", PARTIAL, *scaling_fields}
    read |= {ROTARY_DIM} & family.written.keys()
    read |= {f"{outer}.{inner}" for outer in ROTARY_FIELDS for inner in in_rotary}
    for name in ignored:
        outer, dot, inner = name.partition(".")
        section = rest.get(outer) if dot else rest
        if not isinstance(section, Mapping) or (inner or outer) not in section:
            raise ConfigError(
                f"ignore_fields has {name!r}, but the file has no such field: leave it out"
            )
        if name in read:
            raise ConfigError(
                f"ignore_fields has {name!r}, from which a {family.model_type} model is built: "
                "correct it in the file instead"
            )
        if dot:
            rest[outer] = {key: value for key, value in section.items() if key != inner}
        else:
            del rest[outer]
    return rest


def unread_fields(mapping: Mapping[str, Any], family: Family) -> list[str]:
    """Return the fields of a parsed `config.json` that `config_from_hugging_face` accepted without
    knowing them: no code for the family reads them. Null counts as left out."""
    mapping = _flat(mapping, family)
    known = {*_names(family), *family.aliases, *family.ignored, *NO_INFLUENCE}
    known |= {*WRITTEN, *NEUTRAL, *OF_BLOCKS, *family.written, *family.agreeing}
    known |= {*ROTARY_FIELDS, *QUANTIZATION, ARCHITECTURES, ORIGINAL_LENGTH}
    return [name for name, value in mapping.items() if value is not None and name not in known]


def config_to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """Return a `config.json` that transformers loads. The caller adds the dtype of the weights."""
    family = family_of(config)
    fields: dict[str, Any] = {ARCHITECTURES: [family.architecture]}
    for name in _names(family):
        value = getattr(config, name)
        if value is not None or name in family.nullable:
            fields[name] = list(value) if isinstance(value, tuple) else value
    fields["model_type"] = family.model_type
    fields |= {name: values[0] for name, values in WRITTEN.items()}
    fields |= _values(family.written, config) | _rotary_fields(config)
    if not family.text_field:
        return fields
    common = {name: fields[name] for name in COMMON_OF_PARTS}
    return {**common, family.text_field: fields | {"model_type": f"{family.model_type}_text"}}


def _flat(mapping: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return the fields of the text model, and the common ones that it does not have itself, side
    by side."""
    name = family.text_field
    if not name:
        return mapping
    text = mapping.get(name)
    if not isinstance(text, Mapping):
        raise ConfigError(
            f"{name} = {_shown(text)} is not valid: it must hold the fields of the text model"
        )
    common = {key: mapping.get(key) for key in (ARCHITECTURES, "model_type")}
    return {**{key: value for key, value in mapping.items() if key != name}, **text, **common}


def _names(family: Family) -> list[str]:
    """Return the names of the configuration's fields, without rotary settings."""
    names = [field.name for field in dataclasses.fields(family.config)]
    return [name for name in names if name not in ROTARY_FIELDS]


def _values(fields: Mapping[str, Any], config: FamilyConfig) -> dict[str, Any]:
    """Compute those values that are functions of the configuration."""
    return {name: value(config) if callable(value) else value for name, value in fields.items()}


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


def _read_fields(mapping: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of the configuration, without rotary settings."""
    names, hints = _names(family), typing.get_type_hints(family.config)
    defaults = {**DEFAULTS, **family.defaults}
    fields = {
        name: _typed(mapping[name], hints[name], name)
        for name in names
        if mapping.get(name) is not None
    }
    optional = {*fields, *defaults, *(family.nullable & mapping.keys())}
    if missing := [name for name in names if name not in optional]:
        raise ConfigError(
            f"missing fields: {', '.join(missing)}; a {family.model_type} model cannot be built "
            "without them"
        )
    for name in {*names} & defaults.keys() - fields.keys():
        value = defaults[name]
        fields[name] = value(fields) if callable(value) else value
    return fields


def _supported_values(config: FamilyConfig, family: Family) -> dict[str, tuple[Any, ...]]:
    """Return the values that a file may have in fields that are not read."""
    read = {*_names(family), *family.ignored}
    neutral = {name: values for name, values in NEUTRAL.items() if name not in read}
    computed = _values({**OF_BLOCKS, **family.agreeing, **family.written}, config)
    if config.rope_scaling is not None:  # transformers prefers this field to that of YaRN
        computed[ORIGINAL_LENGTH] = config.rope_scaling.original_max_position_embeddings
    named = ([name] for name in (family.architecture, *family.other_architectures))
    single = {name: (value,) for name, value in computed.items()}
    return {**neutral, **WRITTEN, **single, ARCHITECTURES: tuple(named)}


def _check_quantization(name: str, quantization: Any, family: Family) -> None:
    """Raise ConfigError unless the weights are in a packed form that can be read."""
    is_named = isinstance(quantization, Mapping) and "quant_method" in quantization
    method = quantization["quant_method"] if is_named else quantization
    field, value = f"{name}{'.quant_method' * is_named}", method
    expected: str | list[int] = family.quantization
    supported = f"{_shown(expected)} or left out"
    if is_named and method == FP8 == family.quantization:
        field, value = f"{name}.{BLOCK_SIZE}", quantization.get(BLOCK_SIZE)
        expected = [SIDE, SIDE]
        supported = _shown(expected)
    if value != expected:
        raise ConfigError(
            f"{field} = {_shown(value)} is not supported for {family.model_type}: it must be "
            f"{supported}; give a copy of the model whose weights are in bf16, fp16 or fp32"
        )


def _check_value(name: str, value: Any, supported: tuple[Any, ...], family: Family) -> None:
    """Raise ConfigError unless the value is supported. Null counts as left out; True is not 1."""
    if value is None or any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in supported
    ):
        return
    if isinstance(value, list) and len(value) > 1 and isinstance(supported[0], list):
        name, value, supported = _first_difference(name, value, supported[0])
    may_be_off = supported[-len(OFF) :] == OFF
    words = list(map(_shown, supported[: -len(OFF)] if may_be_off else supported))
    if may_be_off:
        words.append("null, false, 0 or left out, since no model of this family has it")
    raise ConfigError(
        f"{name} = {_shown(value)} is not supported for {family.model_type}: it must be "
        f"{' or '.join(words)}; give such a model, correct the field if it is wrong, or name it in "
        "ignore_fields if it has no influence"
    )


def _first_difference(name: str, value: list[Any], right: list[Any]) -> tuple[str, Any, Any]:
    """Return name, value and supported values of the first entry that is not right, or of the
    length."""
    if len(value) != len(right):
        return f"the length of {name}", len(value), (len(right),)
    index = next(index for index, entry in enumerate(value) if entry != right[index])
    return f"{name}[{index}]", value[index], (right[index],)


def _rotary_fields(config: FamilyConfig) -> dict[str, Any]:
    """Return the rotary settings of a configuration in both styles: `rope_theta` and `rope_scaling`
    (transformers 4, the hub), and `rope_parameters` (transformers 5)."""
    scaling = None
    if config.rope_scaling is not None:
        rope_type = {"rope_type": config.rope_scaling.rope_type}
        scaling = rope_type | _set_fields(config.rope_scaling)
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    if hasattr(config, PARTIAL):
        parameters[PARTIAL] = getattr(config, PARTIAL)
    values = (config.rope_theta, scaling, parameters)
    return dict(zip(ROTARY_FIELDS, values, strict=True))


def _with_partial_factor(mapping: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return the fields with the `partial_rotary_factor` of their rotary settings, if the family
    has this field, or that of `rotary_dim`, if the family is published with it."""
    if PARTIAL not in _names(family):
        return mapping
    ropes = {key: rope for key in ROTARY_FIELDS if isinstance(rope := mapping.get(key), Mapping)}
    factors = {PARTIAL: mapping.get(PARTIAL)}
    factors |= {f"{name}.{PARTIAL}": rope.get(PARTIAL) for name, rope in ropes.items()}
    factor = _common({name: value for name, value in factors.items() if value is not None})
    size, width = mapping.get(ROTARY_DIM), mapping.get("head_dim")
    has_size = factor is None and ROTARY_DIM in family.written
    if has_size and isinstance(size, int) and isinstance(width, int):
        factor = size / max(width, 1)
    return {**mapping, **{key: {**rope, PARTIAL: None} for key, rope in ropes.items()}} | {
        PARTIAL: factor
    }


def _read_rotary(mapping: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` of a configuration, from either style."""
    thetas: dict[str, float] = {}
    scalings: dict[str, Scaling | None] = {}
    if mapping.get("rope_theta") is not None:
        thetas["rope_theta"] = _typed(mapping["rope_theta"], float, "rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = mapping.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{name} = {_shown(rope)} is not valid: it must be an object or null")
        if rope.get("rope_theta") is not None:
            thetas[f"{name}.rope_theta"] = _typed(rope["rope_theta"], float, f"{name}.rope_theta")
        rope = {key: value for key, value in rope.items() if key not in family.ignored}
        longest = mapping.get("max_position_embeddings")
        scalings[name] = _read_scaling(name, rope, _scaling_class(family), longest)
    if not thetas and "rope_theta" in family.defaults:
        thetas["rope_theta"] = family.defaults["rope_theta"]
    if not thetas:
        raise ConfigError("missing fields: rope_theta; give it or rope_parameters.rope_theta")
    if family.rope_scaling_required and not scalings:
        raise ConfigError("missing fields: rope_scaling; give it or rope_parameters")
    return {"rope_theta": _common(thetas), "rope_scaling": _common(scalings)}


def _scaling_class(family: Family) -> type[Scaling]:
    hint = typing.get_type_hints(family.config)["rope_scaling"]
    scaling_class: type[Scaling] = typing.get_args(hint)[0]
    return scaling_class


def _common(values: Mapping[str, Any]) -> Any:
    """Return the value that all these fields have; None if there are no fields."""
    if len(set(values.values())) > 1:
        fields = " and ".join(
            f"{name} = {json.dumps(_set_fields(value) if isinstance(value, Scaling) else value)}"
            for name, value in values.items()
        )
        raise ConfigError(f"{fields} contradict each other: keep one of them")
    return next(iter(values.values()), None)


def _set_fields(scaling: Scaling) -> dict[str, Any]:
    """Return the fields that are not None."""
    fields = dataclasses.asdict(scaling).items()
    return {name: value for name, value in fields if value is not None}


def _read_scaling(
    name: str, rope: Mapping[str, Any], scaling_class: type[Scaling], max_length: Any
) -> Scaling | None:
    names = {rope[key] for key in ("rope_type", "type") if isinstance(rope.get(key), str)}
    rope_type = "/".join(sorted(names)) or "default"
    if rope_type not in ("default", scaling_class.rope_type):
        raise ConfigError(
            f"{name}.rope_type = {rope_type!r} is not supported: it must be 'default' or "
            f"{scaling_class.rope_type!r}"
        )
    hints = {} if rope_type == "default" else typing.get_type_hints(scaling_class)
    values: dict[str, Any] = {}
    for key, value in rope.items():
        has_no_influence = value is None or (key == PARTIAL and value == 1)
        if key in ("rope_type", "type", "rope_theta") or has_no_influence:
            continue
        if key not in hints:
            raise ConfigError(
                f"{name}.{key} = {_shown(value)} is not supported for rope_type {rope_type!r}: "
                "remove it if it has no influence"
            )
        values[key] = _typed(value, hints[key], f"{name}.{key}")
    if rope_type == "default":
        return None
    if "factor" not in values:
        raise ConfigError(f"missing fields: {name}.factor; rope_type {rope_type!r} needs it")
    if ORIGINAL_LENGTH not in values:  # as in transformers
        values[ORIGINAL_LENGTH] = _typed(max_length, int, "max_position_embeddings")
    return scaling_class(**values)


def _shown(value: Any) -> str:
    """Write a value with the words of JSON, a string in single quotes; the end of a long text is
    cut."""
    text = as_toml(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def _typed(value: Any, hint: Any, name: str) -> Any:
    """Convert a value to the type of a field: only an int to a float and a list to a tuple; all
    other types must match. Raises ConfigError, with the field's name."""
    if typing.get_origin(hint) is types.UnionType:
        hint = next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} = {_shown(value)} is not valid: it must be a list")
        return tuple(_typed(item, typing.get_args(hint)[0], name) for item in value)
    limit = MAX_INTEGER if hint is int else 10**300
    if type(value) is int and abs(value) >= limit:
        raise ConfigError(
            f"{name} = {str(value)[:20]}... is not valid: it must be below {limit:.0e}"
        )
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{name} = {_shown(value)} is not valid: it must be {WORDS[hint]}")
    return value
