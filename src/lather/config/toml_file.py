"""Reads and writes a configuration as TOML; every error names the file and the key.

`[model]` is the configuration of one model family: its key `model_type` names the family,
"deepseek_v2" if left out. `format` is the number of the format of runs (`lather.formats`), which
the file of a run has; others need none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from lather.config.alternatives import without_replaced
from lather.config.config import Config, LoopConfig
from lather.config.nearest import hint_of
from lather.config.optim import (
    DEFAULT_RULE,
    KindConfig,
    OptimConfig,
    chosen_rules,
    optim_class,
)
from lather.config.rule_fields import UNIONS, owners
from lather.config.run_folder import check_format, run_folder
from lather.errors import ConfigError, as_toml, require
from lather.files import read_text
from lather.formats import RUN
from lather.models.families import ModelConfig
from lather.models.hf.model_folder import CONFIG_FILE, read_config

C = TypeVar("C")


Unknown = tuple[str, str]
"""A key that there is not, and a hint on what may be meant, which may be empty."""


def load_config(
    path: Path | None,
    rules: Mapping[str, str] | None = None,
    run_dir: str = "",
    init_from: str = "",
    *,
    given: Collection[str] = (),
    unknown: list[Unknown] | None = None,
) -> Config:
    """Read a configuration from a TOML file; every error names the file and the key. Without a file
    it is the default configuration.

    `rules` replaces names of rules in the file, by "name" or "<kind>.rule"; options that the new
    rules do not have are then dropped. `run_dir` and `init_from` replace those of the file. Without
    `[model]` the model is that of `init_from`.

    `given`: dotted names of the fields for which the command line has values; the file's
    alternatives to them (`lather.config.alternatives`) are dropped, and optional sections of them
    are there, with their defaults. `unknown`: takes the keys that there are not; without it they
    are an error.

    Raises RunError if the run in `run_dir` has another format.
    """
    mapping = without_replaced(_read(path) if path else {}, given)
    named = [run_dir or mapping.get("run_dir"), init_from or mapping.get("init_from")]
    run_dir, init_from = (
        value if isinstance(value, str) else "" for value in named
    )  # others are refused below
    if run_dir:
        check_format(Path(run_dir))
    with _naming(path):
        mapping = _with_model(mapping, init_from, run_dir)
        optim = mapping.get("optim", {})
        if isinstance(optim, dict):
            mapping = {**mapping, "optim": _with_rules(optim, rules or {})}
        mapping = _with_sections(mapping, Config, [name.split(".") for name in given])
        return config_from_mapping(mapping, unknown)


def load_run(run_dir: Path) -> Config:
    """Read the configuration of a run; every error names the file and the key. Raises RunError if
    the run has another format."""
    check_format(run_dir)
    path = run_dir / "config.toml"
    mapping = _read(path)
    with _naming(path):
        return config_of_run(mapping)


@contextlib.contextmanager
def _naming(path: Path | None) -> Iterator[None]:
    """Begin a ConfigError of the block with the name of the file, if there is one."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from None


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
    fields = tomllib.loads(tomli_w.dumps(_without_none(dataclasses.asdict(model))))
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


def _with_rules(optim: dict[str, Any], rules: Mapping[str, str]) -> dict[str, Any]:
    """Replace rules of an `[optim]`, and drop the options that only the replaced rules have."""
    chosen = dict(optim)
    for name, rule in rules.items():
        kind, dot, _ = name.partition(".")
        section = optim.get(kind, {})
        if dot and isinstance(section, dict):
            chosen[kind] = {**section, "rule": rule}
        elif not dot:
            chosen["name"] = rule
    before, after = (optim_class(chosen_rules(one)) for one in (optim, chosen))
    return _without_lost(chosen, before, after) if before is not after else chosen


def _without_lost(mapping: dict[str, Any], before: type, after: type) -> dict[str, Any]:
    """Drop the keys that are fields of the class `before` and not of `after`."""
    old, new = _hints(before), _hints(after)
    kept = {key: value for key, value in mapping.items() if key in new or key not in old}
    sections = {
        key
        for key, value in kept.items()
        if isinstance(value, dict) and dataclasses.is_dataclass(new.get(key))
    }
    return kept | {key: _without_lost(kept[key], old[key], new[key]) for key in sections}


def _with_sections(
    mapping: Mapping[str, Any],
    cls: type,
    names: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Add an empty section where one that is left out has fields among `names`, which are divided
    at their dots."""
    whole, hints = dict(mapping), _hints(cls)
    for section in dict.fromkeys(first for first, *rest in names if rest and first in hints):
        inner = whole.get(section, {})
        if (sections := _sections(hints[section])) and isinstance(inner, dict):
            below = [rest for first, *rest in names if first == section and rest]
            is_optional = types.NoneType in typing.get_args(hints[section])
            inner = _with_sections(inner, _chosen(sections, inner, section), below)
            if is_optional or inner:
                whole[section] = inner
    return whole


def config_from_mapping(mapping: Mapping[str, Any], unknown: list[Unknown] | None = None) -> Config:
    """Build a `Config` from nested mappings; missing keys get their defaults. Unknown keys are
    added to `unknown`, or raise a ConfigError that names them all."""
    if unknown is None:
        return _checked(Config, mapping, "")
    unknown += _unknown_keys(Config, mapping, "")
    try:
        return _build(Config, mapping, "")
    except ConfigError:
        if not unknown:
            raise
        raise ConfigError(describe_unknown(unknown)) from None  # a wrong value may be due to them


def _checked(cls: type[C], mapping: Mapping[str, Any], prefix: str) -> C:
    if unknown := list(_unknown_keys(cls, mapping, prefix)):
        raise ConfigError(describe_unknown(unknown))
    return _build(cls, mapping, prefix)


def describe_unknown(unknown: Sequence[Unknown], noun: str = "key") -> str:
    """Name all keys or options that there are not, each with its hint."""
    if len(unknown) == 1:
        ((name, text),) = unknown
        return f"unknown {noun} {name}; {text}" if text else f"unknown {noun} {name}"
    parts = [f"{name}: {text}" if text else name for name, text in unknown]
    return f"{len(unknown)} unknown {noun}s: {'; '.join(parts)}"


def _unknown_keys(cls: type, mapping: Mapping[str, Any], prefix: str) -> Iterator[Unknown]:
    """Yield the keys that are no fields, those of sections included."""
    hints = _hints(cls)
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if key not in hints:
            yield repr(name), _owner(cls, key) or _nearest(name, cls)
        elif (sections := _sections(hints[key])) and isinstance(value, dict):
            yield from _unknown_keys(_chosen(sections, value, name), value, f"{name}.")


def config_to_toml(config: Config) -> str:
    """Write a configuration as TOML, with the format of a run; `load_config` reads the same one
    back."""
    return tomli_w.dumps({"format": RUN.number, **_without_none(dataclasses.asdict(config))})


def field_names(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields, without the sections themselves."""
    for name, hint in _hints(cls).items():
        if sections := _sections(hint):
            yield from dict.fromkeys(
                key for section in sections for key in field_names(section, f"{prefix}{name}.")
            )
        else:
            yield f"{prefix}{name}"


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = typing.get_type_hints(cls)
    return {one.name: hints[one.name] for one in dataclasses.fields(cls)}


def _sections(hint: Any) -> list[type]:
    """Return the dataclasses that a field of this type may hold; none if it is a plain value."""
    if hint is OptimConfig:
        return [optim_class((("", DEFAULT_RULE),))]
    return [
        one
        for one in typing.get_args(hint) or (hint,)
        if isinstance(one, type) and dataclasses.is_dataclass(one)
    ]


def _chosen(sections: list[type], mapping: Mapping[str, Any], name: str) -> type:
    """Return the class of a section: for `[optim]` by its rules, for `[model]` by its
    `model_type`."""
    if issubclass(sections[0], OptimConfig):
        return optim_class(chosen_rules(mapping))
    if len(sections) == 1:
        return sections[0]
    by_type = {getattr(section, "model_type", ""): section for section in sections}
    model_type = mapping.get("model_type", next(iter(by_type)))
    require(
        model_type in list(by_type),
        f"{name}.model_type",
        model_type,
        f"one of {', '.join(map(repr, by_type))}",
    )
    return by_type[model_type]


def _without_none(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in mapping.items()
        if value is not None
    }


def _build(cls: type[C], mapping: Mapping[str, Any], prefix: str) -> C:
    """Build a dataclass from the keys of a mapping that are its fields."""
    hints = _hints(cls)  # type: ignore[arg-type]  # a type variable, which mypy does not know to be hashable
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        name = prefix + key
        if key not in hints:
            continue
        if sections := _sections(hints[key]):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{name} = {as_toml(value)} is not valid: it must be a section, [{name}]"
                )
            values[key] = _build(_chosen(sections, value, name), value, f"{name}.")
        else:
            values[key] = _convert(value, hints[key], name)
    return cls(**values)


def _owner(cls: type, key: str) -> str:
    """Name the model families or rules that have the key."""
    if issubclass(cls, OptimConfig | KindConfig):
        return owners(key, cls.rules[""] if issubclass(cls, OptimConfig) else cls.options_rule)
    is_family = cls in _sections(_hints(Config)["model"])
    return families_with(key, getattr(cls, "model_type", "")) if is_family else ""


def families_with(key: str, model_type: str) -> str:
    """Name the model families that have a key, which the family `model_type` has not; empty:
    none."""
    families = _sections(_hints(Config)["model"])
    having = [getattr(family, "model_type", "") for family in families if key in _hints(family)]
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
        key for key in field_names() if key.count(".") == 1 and key.partition(".")[0] != section
    ]
    return (
        hint_of(name, [*siblings, *sections, *below, *elsewhere])
        or f"known keys: {', '.join(siblings)}"
    )


def _convert(value: Any, hint: Any, name: str) -> Any:
    """Convert a TOML value to the field's type; only an int to a float is converted, any other
    mismatch raises ConfigError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        *others, last = (arg for arg in args if arg is not types.NoneType)
        for one in others:
            with contextlib.suppress(ConfigError):
                return _convert(value, one, name)
        return _convert(value, last, name)
    if origin is Literal:
        require(value in args, name, value, "one of " + ", ".join(map(as_toml, args)))
        return value
    if origin is tuple:
        of_any_length = args[-1] is Ellipsis
        fits = isinstance(value, list) and (of_any_length or len(value) == len(args))
        require(fits, name, value, "a list" if of_any_length else f"a list of {len(args)} numbers")
        hints = args[:1] * len(value) if of_any_length else args
        return tuple(_convert(item, one, name) for item, one in zip(value, hints, strict=True))
    if origin is dict:
        require(isinstance(value, dict), name, value, f"a section, [{name}]")
        return {key: _convert(item, args[1], f"{name}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) <= sys.float_info.max, name, value, "a number that a float can hold")
        return float(value)
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    require(type(value) is hint, name, value, words[hint])
    return value
