"""The common part of the families' configurations: checks of fields, and the description of a
published `config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lather.errors import require
from lather.models.rotary import YarnConfig


@dataclass(frozen=True)
class CheckedFields:
    """The fields that every family has, with the names and meanings of the published `config.json`,
    and checks whose errors name a field as `model.<field>`."""

    model_type: str = ""
    """Hugging Face name of the model family."""
    vocab_size: int = 4096
    """Number of tokens in the vocabulary."""
    hidden_size: int = 192
    """Width of the residual stream."""
    num_hidden_layers: int = 6
    """Number of blocks, dense ones included."""
    num_attention_heads: int = 6
    """Number of attention heads; of query heads, where several share a key-value head."""
    num_experts_per_tok: int = 2
    """Number of routed experts per token (top-k)."""
    max_position_embeddings: int = 2048
    """Maximal length of a sequence, in tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: YarnConfig | None = None
    """YaRN, which adapts the rotary embedding to longer sequences; left out: no YaRN."""
    rms_norm_eps: float = 1e-6
    """Constant added to the mean square in RMSNorm."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = False
    """Use the embedding as the weight of the head, too."""

    def _require(self, name: str, holds: bool, constraint: str) -> None:
        require(holds, f"model.{name}", getattr(self, name), constraint)

    def _require_family_and_ranges(self, may_be_zero: tuple[str, ...]) -> None:
        """The model's type is the family's; every integer is at least 1 and every float finite and
        above 0, but for some that may be 0."""
        for one in fields(self):
            value, least = getattr(self, one.name), int(one.name not in may_be_zero)
            if one.name == "model_type":
                self._require(one.name, value == one.default, repr(one.default))
            elif one.type == "int" or (one.type == "int | None" and value is not None):
                self._require(
                    one.name,
                    value >= least,
                    f"at least {least}{', or left out' * (one.type != 'int')}",
                )
            elif one.type == "float":
                in_range, words = (
                    (value > 0, "greater than 0") if least else (value >= 0, "at least 0")
                )
                self._require(one.name, in_range and value < math.inf, f"{words} and finite")

    def _require_at_most(self, name: str, most: str) -> None:
        limit = getattr(self, most)
        self._require(
            name,
            getattr(self, name) <= limit,
            f"at most {most} ({limit}): lower {name} or raise {most}",
        )

    def _require_divides(self, name: str, whole: str) -> None:
        multiple = getattr(self, whole)
        self._require(
            name, multiple % getattr(self, name) == 0, f"a divisor of {whole} ({multiple})"
        )

    def _require_rotary(self, size: str) -> None:
        self._require(size, getattr(self, size) % 2 == 0, "even: rotary embedding rotates pairs")
        if self.rope_scaling is not None:
            self._require(
                "rope_theta",
                self.rope_theta > 1,
                "greater than 1 for YaRN, which divides by its logarithm",
            )


def kinds_of_layers(num_layers: int, dense: Container[int]) -> list[str]:
    """Return transformers' word for each block, which may have experts or be dense."""
    return ["dense" if index in dense else "sparse" for index in range(num_layers)]


@dataclass(frozen=True)
class PublishedConfig:
    """The fields of a family's published `config.json` that are read or written differently from
    fields of the configuration."""

    architecture: str
    """Name of the class in transformers."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that are supported only with these values, or left out, or null; the first value is
    written."""
    agreeing: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are not written, and the values that say what is built anyway; a function
    computes these from the configuration."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that may be left out or null, and their values in that case; a function computes the
    value from the fields read."""
    optional: frozenset[str] = frozenset()
    """Fields that may be left out or null, too, if their default in the configuration is
    transformers'."""
    derived: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Fields whose values are computed from the configuration."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields, and the names that they stand for."""
    ignored: frozenset[str] = frozenset()
    """Fields of this family without influence on training."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Fields without influence on training that are written, and their values."""
    nullable: frozenset[str] = frozenset()
    """Fields that must be present and may be null."""
    quantization: str | None = None
    """The `quant_method` of quantized weights that can be read."""
    rope_scaling_required: bool = False
    """True if transformers has another default for `rope_scaling` than none."""
