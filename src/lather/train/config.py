"""The configuration of a run: frozen dataclasses, read from TOML, every value checked at construction.

Every field is documented, with its unit, by the string under it; `lather train --help` shows the same strings.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from lather.errors import ConfigError, require
from lather.models.deepseek_v2 import DeepseekV2Config
from lather.optim.soap import check_soap_options

C = TypeVar("C")


@dataclass(frozen=True)
class DataConfig:
    """Which text is learned, and where its tokens are kept."""

    source: str = "python-stdlib"
    """"python-stdlib": the running Python's own standard library; otherwise a folder of text files."""
    pattern: str = "*.py"
    """Which files below the folder are text (glob on the file name)."""
    cache_dir: str = "data"
    """Folder for tokenizer and token shards; each corpus and vocabulary size gets a folder of its own in it."""
    holdout_every: int = 20
    """One file in this many is held out for validation, files."""
    shard_tokens: int = 1_000_000
    """Size of a token shard, tokens."""

    def __post_init__(self) -> None:
        require(bool(self.source), "data.source", self.source, "'python-stdlib' or a folder")
        require(bool(self.pattern), "data.pattern", self.pattern, "a glob such as '*.txt'")
        require(bool(self.cache_dir), "data.cache_dir", self.cache_dir, "a folder")
        require(self.holdout_every >= 2, "data.holdout_every", self.holdout_every, "at least 2 files")
        require(self.shard_tokens >= 1, "data.shard_tokens", self.shard_tokens, "at least 1 token")


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["soap", "adamw"] = "soap"
    """soap: SOAP on matrices, experts one by one, AdamW on embeddings and norms. adamw: AdamW on everything."""
    lr: float = 6e-3
    """Peak learning rate, of all parameters."""
    betas: tuple[float, float] = (0.95, 0.95)
    """Decay rates of the moments of preconditioned matrices."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the moments of everything else."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay, per step and unit of learning rate."""
    shampoo_beta: float = -1.0
    """Decay rate of the Kronecker factors; negative: the second of betas."""
    precondition_frequency: int = 10
    """Steps between refreshes of the eigenbases."""
    precondition_warmup_steps: int = 0
    """Refresh at every step up to this one."""
    adam_warmup_steps: int = 1
    """Steps of plain Adam before the first eigenbases."""
    second_moment: Literal["permute", "rotate"] = "rotate"
    """How the second moment follows turning eigenbases."""
    use_eigh: bool = False
    """Refresh by whole eigendecompositions instead of orthogonal iteration."""
    use_adaptive_criteria: bool = False
    """Leave out refreshes of bases that are still good."""
    max_precond_dim: int = 8192
    """A longer dim of a matrix is not preconditioned."""
    max_update_rms: float = 0.0
    """Clip each matrix's update to this root mean square, in units of the learning rate; 0: do not clip."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """Shape of the rate after warm-up; wsd: constant, then linear over the last decay_fraction."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay_fraction: float = 0.2
    """Share of the run over which wsd decays."""
    min_lr_ratio: float = 0.1
    """Rate at the end of the decay as a share of the peak."""

    def __post_init__(self) -> None:
        try:
            check_soap_options(self.soap_options())
        except ValueError as error:
            raise ConfigError(f"optim.{error}") from None
        require(self.adam_warmup_steps >= 1, "optim.adam_warmup_steps", self.adam_warmup_steps, "at least 1 step")
        in_range = all(0 <= beta < 1 for beta in self.adam_betas)
        require(in_range, "optim.adam_betas", self.adam_betas, "two numbers in [0, 1)")
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "at least 0 steps")
        require(0 < self.decay_fraction <= 1, "optim.decay_fraction", self.decay_fraction, "in (0, 1]")
        require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "in [0, 1]")

    def soap_options(self) -> dict[str, Any]:
        """The arguments of `lather.optim.SOAP` that are set here."""
        names = (
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "shampoo_beta",
            "precondition_frequency",
            "precondition_warmup_steps",
            "adam_warmup_steps",
            "second_moment",
            "use_eigh",
            "use_adaptive_criteria",
            "max_precond_dim",
            "max_update_rms",
        )
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class LoopConfig:
    """Steps, batches and what guards them."""

    steps: int = 300
    """Optimizer steps."""
    batch_size: int = 8
    """Sequences per step."""
    micro_batch_size: int = 8
    """Sequences per forward and backward; a step accumulates batch_size / micro_batch_size of them."""
    sequence_length: int = 256
    """Tokens per sequence."""
    max_grad_norm: float = 1.0
    """Clip the norm of the gradient to this; 0: do not clip."""
    max_skipped_steps: int = 10
    """Stop after this many steps in a row whose loss or gradient was not finite."""
    validation_every: int = 100
    """Steps between validations, besides the first and the last; 0: none between."""
    validation_sequences: int = 64
    """Held-out sequences per validation."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products in bfloat16 (autocast), weights and optimizer in fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is one."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batch_size", "sequence_length", "max_skipped_steps", "validation_sequences"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        require(self.max_grad_norm >= 0, "train.max_grad_norm", self.max_grad_norm, "at least 0")
        require(self.validation_every >= 0, "train.validation_every", self.validation_every, "at least 0 steps")
        require(
            self.batch_size % self.micro_batch_size == 0,
            "train.batch_size",
            self.batch_size,
            f"a multiple of train.micro_batch_size ({self.micro_batch_size})",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of the run is saved."""

    every: int = 100
    """Steps between checkpoints; one is also made at the end and on SIGTERM."""
    keep_last: int = 2
    """Checkpoints kept; older ones are deleted."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "checkpoint.every", self.every, "at least 1 step")
        require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "at least 1")


@dataclass(frozen=True)
class LogConfig:
    """What is shown and recorded besides metrics.jsonl."""

    every: int = 10
    """Steps between lines of progress where there is no terminal."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run directory."""
    wandb_project: str = ""
    """Also report to this Weights & Biases project (extra `wandb`)."""
    sample_prompt: str = "class Queue:"
    """The sample at the end continues this."""
    sample_tokens: int = 160
    """Length of the sample at the end, tokens; 0: none."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "log.every", self.every, "at least 1 step")
        require(self.sample_tokens >= 0, "log.sample_tokens", self.sample_tokens, "at least 0 tokens")
        require(bool(self.sample_prompt), "log.sample_prompt", self.sample_prompt, "some text")


@dataclass(frozen=True)
class Config:
    """A training run."""

    run_dir: str = "runs/default"
    """Folder for everything the run writes; a run found there is resumed."""
    seed: int = 0
    """Fixes initial weights and the order of the data."""
    model: DeepseekV2Config = field(default_factory=DeepseekV2Config)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require(bool(self.run_dir), "run_dir", self.run_dir, "a folder")
        require(self.model.vocab_size >= 257, "model.vocab_size", self.model.vocab_size, "at least 257 for byte-level BPE")
        require(0 <= self.seed < 2**64, "seed", self.seed, "at least 0 and below 2**64")
        require(
            self.train.sequence_length <= self.model.max_position_embeddings,
            "train.sequence_length",
            self.train.sequence_length,
            f"at most model.max_position_embeddings ({self.model.max_position_embeddings})",
        )


# --- TOML ---------------------------------------------------------------------------------------------------------------------------


def load_config(path: Path) -> Config:
    """Read a TOML file; every error names the file and the key."""
    try:
        mapping = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; configs/ holds examples") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    try:
        return config_from_mapping(mapping)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def config_from_mapping(mapping: Mapping[str, Any]) -> Config:
    """Nested mappings to a `Config`; missing keys keep their defaults."""
    return _build(Config, mapping, "")


def config_to_toml(config: Config) -> str:
    """The resolved configuration; `load_config` gives the same one back."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def field_names(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields, sections left out."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from field_names(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _without_none(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: _without_none(value) if isinstance(value, dict) else value for key, value in mapping.items() if value is not None}


def _build(cls: type[C], mapping: Mapping[str, Any], prefix: str) -> C:
    hints = typing.get_type_hints(cls)
    for key in mapping:
        if key not in hints:
            raise ConfigError(f"unknown key {prefix + key!r}; {_nearest(prefix + key)}")
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        hint, name = hints[key], prefix + key
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ConfigError(f"{name} = {value!r} is not valid: it must be a section, [{name}]")
            values[key] = _build(typing.cast(type, hint), value, f"{name}.")
        else:
            values[key] = _convert(value, hint, name)
    return cls(**values)


def _nearest(name: str) -> str:
    """What the user may have meant: the section or field most like the last component of `name`, or the keys of its section."""
    sections = [f.name for f in dataclasses.fields(Config)]
    known = [*sections, *(key for key in field_names() if "." in key)]
    section, _, last = name.rpartition(".")

    def likeness(other: str) -> float:
        """A field of the same section wins a tie."""
        other_section, _, other_last = other.rpartition(".")
        return difflib.SequenceMatcher(None, last, other_last).ratio() + 0.1 * (section == other_section)

    if likeness(best := max(known, key=likeness)) >= 0.7:
        return f"did you mean {best!r}?"
    siblings = [other for other in known if other.startswith(f"{section}.")] or sections
    return f"known keys: {', '.join(siblings)}"


def _convert(value: Any, hint: Any, name: str) -> Any:
    """A TOML value as the field's type; an int is taken for a float, nothing else is converted."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert(value, next(arg for arg in args if arg is not type(None)), name)
    if origin is Literal:
        require(value in args, name, value, "one of " + ", ".join(repr(arg) for arg in args))
        return value
    if origin is tuple:
        require(isinstance(value, list) and len(value) == len(args), name, value, f"a list of {len(args)} numbers")
        return tuple(_convert(item, arg, name) for item, arg in zip(value, args, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) <= sys.float_info.max, name, value, "a number that a float can hold")
        return float(value)
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    require(type(value) is hint, name, value, words[hint])
    return value
