"""Reads and writes a configuration as TOML; every error names the file and the key.

`[model]` is the configuration of one model family: its key `model_type` names the family, which is
"deepseek_v2" if left out, or module:FAMILY. `format` is the number of the format of runs
(`lather.formats`), which the file of a run has; others need none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

import tomli_w

from lather.config.config import Config
from lather.config.context_length import LENGTH, SCALING, completed, reaching, with_overrides
from lather.config.fields import (
    build,
    family_named,
    field_names,
    fields_of,
    merged,
    section_at,
    without,
)
from lather.config.kind_config import KINDS, KindConfig
from lather.config.loop import LoopConfig
from lather.config.optim import OptimConfig
from lather.config.rule_fields import owners
from lather.config.run_folder import check_format, run_folder
from lather.config.suggestions import suggestion
from lather.errors import ConfigError, as_toml
from lather.files import read_text
from lather.formats import RUN
from lather.hub import CONFIG_FILE
from lather.models.families import FAMILIES, ModelConfig
from lather.models.hf.model_folder import Reading, read_config

CHOICES = ("model.model_type", "optim.name", *(f"optim.{kind}.rule" for kind in KINDS))
"""Fields that decide which other fields there are."""
REPLACED: Mapping[str, tuple[str, ...]] = {
    "data.source": ("data.path", "data.weights", "data.revision"),
    **{f"optim.{kind}.lr": (f"optim.{kind}.lr_factor",) for kind in KINDS},
    **{f"optim.{kind}.lr_factor": (f"optim.{kind}.lr",) for kind in KINDS},
}
"""Field -> its alternatives: fields that say the same otherwise, or that make it meaningless.
`FamilyConfig.balance_fields` has those of `[model]`. Within a file, `data.path`, and a coefficient
and level of `[moe]`, take precedence."""


def load_config(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a configuration from a TOML file, or return the default configuration. `overrides`:
    values by dotted name, which replace the file's.

    Raises RunError if the run in its `run_dir` has another format.
    """
    overrides = overrides or {}
    with naming(path, overrides):
        return config_from_mapping(with_overrides(read_values(path, overrides), overrides))


def load_run(run_dir: Path) -> Config:
    """Read the configuration of a run. Raises RunError if the run has another format."""
    check_format(run_dir)
    path = run_dir / "config.toml"
    mapping = _read(path)
    with naming(path):
        return config_from_mapping(mapping)


@contextlib.contextmanager
def naming(path: Path | None, overrides: Collection[str] = ()) -> Iterator[None]:
    """Begin a ConfigError of the block with the name of the file, unless it is about one of the
    fields `overrides`, whose values are not the file's."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        is_of_file = path is not None and not text.startswith((f"{path}: ", "--"))
        names = (name if "." in name else f"{name} = " for name in overrides)
        if not is_of_file or any(name in text for name in names):
            raise
        raise ConfigError(f"{path}: {text}") from None


def read_values(path: Path | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a TOML file into which those of `overrides`, by dotted name, fit
    (`values_for`). Without `[model]` the model is that of `init_from`.

    Raises RunError if the run in `run_dir` has another format.
    """
    mapping = _read(path) if path else {}
    # values of other types are refused when the configuration is built
    run_dir, init_from = (
        value if isinstance(value := overrides.get(name) or mapping.get(name), str) else ""
        for name in ("run_dir", "init_from")
    )
    if run_dir:
        check_format(Path(run_dir))
    if init_from:
        mapping = _with_model(mapping, init_from, run_dir, overrides)
    if isinstance(model := mapping.get("model"), dict):
        before = {name: value for name, value in model.items() if name != SCALING}
        mapping["model"] = completed(before, model, _flat(model))
    return values_for(mapping, overrides)


def values_for(mapping: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration with the rules and the model family that `overrides`
    names, without options that these rules lack, and without the alternatives to `overrides`.

    Raises ConfigError if `overrides` has a field and an alternative to it.
    """
    chosen = {name: overrides[name] for name in CHOICES if isinstance(overrides.get(name), str)}
    values = merged(mapping, {name: value for name, value in chosen.items() if value})
    known = {name for name, _ in unknown_keys(mapping)}
    lost = [name for name, _ in unknown_keys(values) if name not in known]
    for name in lost:
        if name.startswith("optim."):
            values = without(values, name)
    family = section_at(Config, "model", values)
    assert family is not None
    assert issubclass(family, ModelConfig)
    of_balance = {f"model.{name}": (f"moe.{key}",) for name, key in family.balance_fields.items()}
    replaced = {**REPLACED, **of_balance}
    for name in overrides:
        for other in replaced.get(name, ()):
            if other in overrides:
                both = " and ".join(f"--{field.replace('_', '-')}" for field in (name, other))
                raise ConfigError(f"{both} are both given: leave one of them out")
            values = without(values, other)
    return values


def _with_model(
    mapping: dict[str, Any], init_from: str, run_dir: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Add `[model]` to a configuration that has at most the model's family and length: the model of
    the run that is already in `run_dir`, or else of `init_from`. The default sequence length is
    then at most the model's."""
    given = mapping.get("model", {})
    if not isinstance(given, dict) or given.keys() - {"model_type", SCALING, LENGTH}:
        return mapping
    if run_dir and (Path(run_dir) / "config.toml").is_file():
        model = load_run(Path(run_dir)).model
    else:
        model_type = overrides.get("model.model_type") or given.get("model_type", "")
        if model_type:
            family_named(model_type, "model.model_type")
        ignored = overrides.get("ignore_fields") or mapping.get("ignore_fields", ())
        ignored = [ignored] if isinstance(ignored, str) else ignored
        model = model_of(init_from, model_type=model_type, ignore_fields=ignored)
    train = mapping.get("train", {})
    if isinstance(train, dict):
        length = min(LoopConfig().sequence_length, model.max_position_embeddings)
        train = {"sequence_length": length, **train}
    theirs = without_none(dataclasses.asdict(model))
    values = completed(theirs, merged(theirs, _flat(given)), _flat(given))
    return {**mapping, "model": values, "train": train}


def _flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section by dotted name, with those of its own sections."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        inner = _flat(value) if isinstance(value, dict) else {}
        flat |= {f"{key}.{name}": item for name, item in inner.items()} or {key: value}
    return flat


def folder_of(init_from: str) -> Path:
    """Return the folder that `init_from` names; for RUN@STEP, the run directory."""
    run = init_from.rpartition("@")[0]
    return run_folder(Path(run) if run and not Path(init_from).exists() else Path(init_from))


def model_of(init_from: str, **reading: Unpack[Reading]) -> ModelConfig:
    """Read the model of a run directory, or of a Hugging Face folder, whose config.json is read as
    `reading` says, with the length that its YaRN reaches. Raises ConfigError, or ExchangeError for
    a bad config.json."""
    source = folder_of(init_from)
    if (source / CONFIG_FILE).is_file():
        return reaching(read_config(source, **reading))
    if not (source / "config.toml").is_file():
        raise ConfigError(
            f"init_from = {init_from!r} is not valid: it must be a run directory, or a folder with "
            "config.json and safetensors"
        )
    return load_run(source).model


def _read(path: Path) -> dict[str, Any]:
    """Read the keys of a file without its format. Raises RunError for a format that is not
    read."""
    try:
        mapping = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}): give a TOML file, such as one of configs/"
        ) from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    RUN.check(mapping.pop("format", RUN.number), path)
    return mapping


def config_from_mapping(mapping: Mapping[str, Any]) -> Config:
    """Build a `Config` from nested mappings; missing keys, and those that are None, get their
    defaults. Raises a ConfigError that names all unknown keys, or the first value that is not
    valid."""
    mapping = without_none(mapping)
    if unknown := [(repr(name), hint) for name, hint in unknown_keys(mapping)]:
        raise ConfigError(describe_unknown(unknown, "key"))
    return build(Config, mapping)


def describe_unknown(unknown: Collection[tuple[str, str]], noun: str) -> str:
    """Describe unknown keys or options, as they are written, each with its hint, which may be
    empty."""
    if len(unknown) == 1:
        ((name, hint),) = unknown
        return f"unknown {noun} {name}; {hint}" if hint else f"unknown {noun} {name}"
    parts = [f"{name}: {hint}" if hint else name for name, hint in unknown]
    return f"{len(unknown)} unknown {noun}s: {'; '.join(parts)}"


def unknown_keys(
    mapping: Mapping[str, Any], cls: type = Config, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each key that is no field, also in sections, and a hint on what it
    may mean."""
    fields = fields_of(cls)
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if key not in fields:
            yield name, owner_of(key, cls) or _nearest(name, cls)
        elif fields[key].sections and isinstance(value, dict):
            yield from unknown_keys(value, fields[key].section(value, name), f"{name}.")


def config_to_toml(config: Config) -> str:
    """Write a configuration as TOML, with the format of a run. `load_config` reads it again."""
    return tomli_w.dumps({"format": RUN.number, **values_of_config(config)})


def values_of_config(config: Config) -> dict[str, Any]:
    """Return the values of a configuration, as its TOML would hold them."""
    return without_none(dataclasses.asdict(config))


def without_none(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping without the values that are None, also in its sections."""
    return {
        key: without_none(value) if isinstance(value, dict) else value
        for key, value in mapping.items()
        if value is not None
    }


def owner_of(key: str, cls: type | None) -> str:
    """Say which model families or rules have a key that the section `cls` lacks; empty: none."""
    if cls is None:
        return ""
    if issubclass(cls, OptimConfig | KindConfig):
        return owners(key, cls.rules[""] if issubclass(cls, OptimConfig) else cls.options_rule)
    names = [as_toml(name) for name, family in FAMILIES.items() if key in fields_of(family.config)]
    if not issubclass(cls, ModelConfig) or key in fields_of(cls) or not names:
        return ""
    listed = " and ".join(", ".join(names).rsplit(", ", 1))
    return f"it is a key of model_type {listed}, not of {as_toml(cls.model_type)}"


def _nearest(name: str, cls: type) -> str:
    """Suggest the section or field that `name` may mean, or list the keys of its section, which is
    of class `cls`."""
    section, dot, _ = name.rpartition(".")
    siblings = [f"{section}{dot}{key}" for key in fields_of(cls)]
    elsewhere = [key for key in field_names(Config) if key.count(".") == 1]
    candidates = [*siblings, *fields_of(Config), *field_names(cls, f"{section}{dot}"), *elsewhere]
    return suggestion(name, candidates) or f"known keys: {', '.join(siblings)}"
