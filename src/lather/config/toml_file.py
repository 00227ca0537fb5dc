"""Reads and writes a configuration as TOML; every error names the file and the key.

`[model]` is the configuration of one model family: its key `model_type` names the family,
"deepseek_v2" if left out. `format` is the number of the format of runs (`lather.formats`), which
the file of a run has; others need none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from lather.config.alternatives import without_replaced
from lather.config.config import Config, LoopConfig
from lather.config.fields import (
    build,
    field_names,
    merged,
    section_class,
    sections_of,
    types_of,
)
from lather.config.nearest import hint_of
from lather.config.optim import KINDS, KindConfig, OptimConfig, chosen_rules, optim_class
from lather.config.rule_fields import owners
from lather.config.run_folder import check_format, run_folder
from lather.errors import ConfigError, as_toml
from lather.files import read_text
from lather.formats import RUN
from lather.models.families import ModelConfig
from lather.models.hf.model_folder import CONFIG_FILE, read_config

RULE_NAMES = ("optim.name", *(f"optim.{kind}.rule" for kind in KINDS))
"""Fields that choose rules."""
MODEL_TYPE = "model.model_type"
"""The field that chooses the model family."""

Unknown = tuple[str, str]
"""A key that there is not, and a hint on what may be meant, which may be empty."""


def load_config(path: Path | None, given: Mapping[str, Any] | None = None) -> Config:
    """Read a configuration from a TOML file; every error names the file and the key. Without a file
    it is the default configuration. `given`: values by dotted name, which replace the file's.

    Raises RunError if the run in its `run_dir` has another format.
    """
    given = given or {}
    with naming(path, given):
        return config_from_mapping(merged(read_values(path, given), given))


def read_values(path: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a TOML file into which those of `given`, by dotted name, fit
    (`values_for`). Without `[model]` the model is that of `init_from`.

    Raises RunError if the run in `run_dir` has another format.
    """
    mapping = _read(path) if path else {}
    # values of other types are refused when the configuration is built
    run_dir, init_from = (
        value if isinstance(value := given.get(name) or mapping.get(name), str) else ""
        for name in ("run_dir", "init_from")
    )
    if run_dir:
        check_format(Path(run_dir))
    return values_for(_with_model(mapping, init_from, run_dir), given)


def values_for(mapping: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration without the alternatives to those of `given`, with the
    rules and the model family that `given` names, and without options that these rules do not
    have."""
    values = without_replaced(mapping, given)
    optim = values.get("optim", {})
    if isinstance(optim, dict):
        values["optim"] = _with_rules(optim, given)
    return merged(values, {name: given[name] for name in (MODEL_TYPE,) if name in given})


def load_run(run_dir: Path) -> Config:
    """Read the configuration of a run; every error names the file and the key. Raises RunError if
    the run has another format."""
    check_format(run_dir)
    path = run_dir / "config.toml"
    mapping = _read(path)
    with naming(path):
        return config_of_run(mapping)


@contextlib.contextmanager
def naming(path: Path | None, given: Collection[str] = ()) -> Iterator[None]:
    """Begin a ConfigError of the block with the name of the file, if there is one and the error is
    not about one of the fields `given`, whose values are not the file's."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        is_of_file = path is not None and not text.startswith((f"{path}: ", "--"))
        names = (name if "." in name else f"{name} = " for name in given)
        if not is_of_file or any(name in text for name in names):
            raise
        raise ConfigError(f"{path}: {text}") from None


def config_of_run(mapping: Mapping[str, Any]) -> Config:
    """Build the configuration that a run has saved."""
    return config_from_mapping(_without_none(mapping))


def _with_model(mapping: dict[str, Any], init_from: str, run_dir: str) -> dict[str, Any]:
    """Add `[model]` to a configuration without one: the model of the run that is already in
    `run_dir`, or else of `init_from`, if given. The default sequence length is then limited to the
    model's."""
    if "model" in mapping or not init_from:
        return mapping
    model = (
        load_run(Path(run_dir)).model
        if run_dir and (Path(run_dir) / "config.toml").is_file()
        else model_of(init_from)
    )
    fields = _without_none(dataclasses.asdict(model))
    train = mapping.get("train", {})
    if isinstance(train, dict):
        train = {
            "sequence_length": min(LoopConfig().sequence_length, model.max_position_embeddings),
            **train,
        }
    return {**mapping, "model": fields, "train": train}


def folder_of(init_from: str) -> Path:
    """Return the folder that `init_from` names; for RUN@STEP, the run directory."""
    run = init_from.rpartition("@")[0]
    return run_folder(Path(run) if run and not Path(init_from).exists() else Path(init_from))


def model_of(init_from: str) -> ModelConfig:
    """Read the model of a run directory or a Hugging Face folder. Raises ConfigError, or
    ExchangeError for a bad config.json."""
    source = folder_of(init_from)
    if (source / CONFIG_FILE).is_file():
        return read_config(source)
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
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; configs/ of the checkout holds examples"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a TOML file") from None
    except UnicodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    RUN.check(mapping.pop("format", RUN.number), path)
    return mapping


def _with_rules(optim: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Put the rules that `given` names into an `[optim]`, and drop the options that only the
    replaced rules have."""
    rules = {name.partition(".")[2]: given[name] for name in RULE_NAMES if name in given}
    chosen = merged(optim, rules)
    before, after = (optim_class(chosen_rules(one)) for one in (optim, chosen))
    return _without_lost(chosen, before, after) if before is not after else chosen


def _without_lost(mapping: dict[str, Any], before: type, after: type) -> dict[str, Any]:
    """Drop the keys that are fields of the class `before` and not of `after`."""
    old, new = types_of(before), types_of(after)
    kept = {key: value for key, value in mapping.items() if key in new or key not in old}
    sections = {
        key
        for key, value in kept.items()
        if isinstance(value, dict) and dataclasses.is_dataclass(new.get(key))
    }
    return kept | {key: _without_lost(kept[key], old[key], new[key]) for key in sections}


def config_from_mapping(mapping: Mapping[str, Any]) -> Config:
    """Build a `Config` from nested mappings; missing keys get their defaults. Raises a ConfigError
    that names all unknown keys, or the first value that is not valid."""
    if unknown := list(unknown_keys(Config, mapping)):
        raise ConfigError(describe_unknown(unknown))
    return build(Config, mapping)


def describe_unknown(unknown: Sequence[Unknown], noun: str = "key") -> str:
    """Name all keys or options that there are not, each with its hint."""
    if len(unknown) == 1:
        ((name, text),) = unknown
        return f"unknown {noun} {name}; {text}" if text else f"unknown {noun} {name}"
    parts = [f"{name}: {text}" if text else name for name, text in unknown]
    return f"{len(unknown)} unknown {noun}s: {'; '.join(parts)}"


def unknown_keys(cls: type, mapping: Mapping[str, Any], prefix: str = "") -> Iterator[Unknown]:
    """Yield the keys that are no fields, those of sections included."""
    hints = types_of(cls)
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if key not in hints:
            yield repr(name), _owner(cls, key) or _nearest(name, cls)
        elif (sections := sections_of(hints[key])) and isinstance(value, dict):
            yield from unknown_keys(section_class(sections, value, name), value, f"{name}.")


def config_to_toml(config: Config) -> str:
    """Write a configuration as TOML, with the format of a run; `load_config` reads the same one
    back."""
    return tomli_w.dumps({"format": RUN.number, **values_of_config(config)})


def values_of_config(config: Config) -> dict[str, Any]:
    """Return the values of a configuration, as its TOML would hold them."""
    return _without_none(dataclasses.asdict(config))


def _without_none(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in mapping.items()
        if value is not None
    }


def _owner(cls: type, key: str) -> str:
    """Name the model families or rules that have the key."""
    if issubclass(cls, OptimConfig | KindConfig):
        return owners(key, cls.rules[""] if issubclass(cls, OptimConfig) else cls.options_rule)
    is_family = cls in sections_of(types_of(Config)["model"])
    return families_with(key, getattr(cls, "model_type", "")) if is_family else ""


def families_with(key: str, model_type: str) -> str:
    """Name the model families that have a key, which the family `model_type` has not; empty:
    none."""
    families = sections_of(types_of(Config)["model"])
    having = [getattr(family, "model_type", "") for family in families if key in types_of(family)]
    if not having or model_type in having:
        return ""
    return (
        "it is a key of model_type "
        f"{' and '.join(map(as_toml, having))}, not of {as_toml(model_type)}"
    )


def _nearest(name: str, cls: type) -> str:
    """Suggest the section or field whose last component is most like that of `name`, or list the
    keys of its section, which is of class `cls`."""
    sections = [f.name for f in dataclasses.fields(Config)]
    section, dot, _ = name.rpartition(".")
    siblings = [f"{section}{dot}{f.name}" for f in dataclasses.fields(cls)]
    below = field_names(cls, f"{section}{dot}")
    elsewhere = [
        key
        for key in field_names(Config)
        if key.count(".") == 1 and key.partition(".")[0] != section
    ]
    return (
        hint_of(name, [*siblings, *sections, *below, *elsewhere])
        or f"known keys: {', '.join(siblings)}"
    )
