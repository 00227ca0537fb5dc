"""The rotary settings of a `config.json`, in both styles: `rope_theta` and `rope_scaling`
(transformers 4, the hub), and `rope_parameters` (transformers 5)."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any

from lather.errors import ConfigError
from lather.models.family_config import FamilyConfig
from lather.models.hf.json_values import shown, typed
from lather.models.rotary import YarnConfig

ROTARY_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
ROPE_TYPES = ("default", "yarn")


def rotary_fields(config: FamilyConfig) -> dict[str, Any]:
    """Return the fields of a `config.json` for a configuration, in both styles."""
    scaling = None
    if config.rope_scaling is not None:
        scaling = {"rope_type": "yarn", **_set_fields(config.rope_scaling)}
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    values = (config.rope_theta, scaling, parameters)
    return dict(zip(ROTARY_FIELDS, values, strict=True))


def read_rotary(mapping: Mapping[str, Any], *, scaling_required: bool) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` of a configuration. Raises ConfigError if they are
    missing or not supported, or if the two styles contradict each other."""
    thetas: dict[str, float] = {}
    scalings: dict[str, YarnConfig | None] = {}
    if mapping.get("rope_theta") is not None:
        thetas["rope_theta"] = typed(mapping["rope_theta"], float, "rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = mapping.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{name} = {shown(rope)} is not valid: it must be an object or null")
        if rope.get("rope_theta") is not None:
            thetas[f"{name}.rope_theta"] = typed(rope["rope_theta"], float, f"{name}.rope_theta")
        scalings[name] = _read_scaling(name, rope, mapping.get("max_position_embeddings"))
    if not thetas:
        raise ConfigError("missing fields: rope_theta; give it or rope_parameters.rope_theta")
    if scaling_required and not scalings:
        raise ConfigError("missing fields: rope_scaling; give it or rope_parameters")
    return {"rope_theta": _common(thetas), "rope_scaling": _common(scalings)}


def _common(values: Mapping[str, Any]) -> Any:
    """Return the value that all these fields have; None if there are no fields."""
    if len(set(values.values())) > 1:
        fields = " and ".join(
            f"{name} = {json.dumps(_set_fields(value) if isinstance(value, YarnConfig) else value)}"
            for name, value in values.items()
        )
        raise ConfigError(f"{fields} contradict each other: keep one of them")
    return next(iter(values.values()), None)


def _set_fields(yarn: YarnConfig) -> dict[str, Any]:
    """Return the fields that are not None."""
    fields = dataclasses.asdict(yarn).items()
    return {name: value for name, value in fields if value is not None}


def _read_scaling(name: str, rope: Mapping[str, Any], max_length: Any) -> YarnConfig | None:
    types = {rope[key] for key in ("rope_type", "type") if isinstance(rope.get(key), str)}
    rope_type = "/".join(sorted(types)) or "default"
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"{name}.rope_type = {rope_type!r} is not supported: it must be one of "
            f"{', '.join(map(repr, ROPE_TYPES))}"
        )
    hints = typing.get_type_hints(YarnConfig) if rope_type == "yarn" else {}
    values: dict[str, Any] = {}
    for key, value in rope.items():
        has_no_influence = value is None or (key == "partial_rotary_factor" and value == 1)
        if key in ("rope_type", "type", "rope_theta") or has_no_influence:
            continue
        if key not in hints:
            raise ConfigError(
                f"{name}.{key} = {shown(value)} is not supported for rope_type {rope_type!r}: "
                "remove it if it has no influence"
            )
        values[key] = typed(value, hints[key], f"{name}.{key}")
    if rope_type == "default":
        return None
    if "factor" not in values:
        raise ConfigError(f"missing fields: {name}.factor; YaRN needs it")
    if "original_max_position_embeddings" not in values:  # as in transformers
        length = typed(max_length, int, "max_position_embeddings")
        values["original_max_position_embeddings"] = length
    return YarnConfig(**values)
