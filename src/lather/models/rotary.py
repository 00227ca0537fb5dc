"""Rotary position embedding, plain, with YaRN or as in Llama 3: computes the angles by which pairs
of a head's coordinates are rotated at each position.

Sources: RoPE (Su et al., arXiv:2104.09864); YaRN (Peng et al., arXiv:2309.00071), in the two
variants of published models: DeepSeek-V2 (pairs of neighboring coordinates, `mscale` and
`mscale_all_dim`) and GPT-OSS (pairs across the halves of a head, bounds of the ramp not rounded);
Llama 3.1 (its published `config.json`, rope_type "llama3"). Fields that are left out have the same
meaning as in Hugging Face transformers.

Letters: B sequences, S positions, H heads, N width of a head, R rotary width of a head, P = R / 2
pairs.

Frequencies and angles are computed in fp64, because an fp32 angle has an error of 0.03 at position
one million; the rotation (`lather.kernels.rotary`) is computed in fp32 or wider. All layers share
the tables of cosines and sines of a forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lather.errors import require
from lather.kernels.rotary import join_shared_key, rotate_part
from lather.shapes import Float, Int

ORIGINAL_LENGTH = "original_max_position_embeddings"
Table = Float[Tensor, "#b s p"]
"""The cosines or the sines of a rotary embedding."""


@dataclass(frozen=True)
class YarnConfig:
    """YaRN, which adapts a model that was trained on short sequences to longer sequences. The
    fields have their published names."""

    rope_type: ClassVar[str] = "yarn"

    factor: float = 1.0
    """Ratio of the new maximal length to the original length; 1: no change."""
    original_max_position_embeddings: int = 4096
    """Original maximal length of a sequence, in tokens. If a configuration leaves it out, it is the
    model's max_position_embeddings, as it was before a factor was given."""
    beta_fast: float = 32.0
    """Frequencies of pairs with more than this number of rotations within the original length are
    not changed."""
    beta_slow: float = 1.0
    """Frequencies of pairs with fewer than this number of rotations within the original length are
    divided by `factor`; those between `beta_slow` and `beta_fast` are interpolated."""
    mscale: float | None = None
    """The rotated vectors are multiplied by 1 + 0.1 `mscale` ln(factor), divided by the same term
    with `mscale_all_dim`; used only if both are set."""
    mscale_all_dim: float | None = None
    """See `mscale`; in DeepSeek-V2 the softmax's scale is also multiplied by (1 + 0.1
    `mscale_all_dim` ln(factor))^2."""
    attention_factor: float | None = None
    """Factor on the rotated vectors; none: computed from `mscale` and `mscale_all_dim`, or 1 + 0.1
    ln(factor) without them."""
    truncate: bool = True
    """Round the bounds between unchanged, interpolated and divided frequencies outwards to whole
    pairs."""

    def __post_init__(self) -> None:
        length = self.original_max_position_embeddings
        self._require("factor", 1 <= self.factor < math.inf, "at least 1 and finite")
        self._require("original_max_position_embeddings", length >= 1, "at least 1")
        self._require("beta_slow", 0 < self.beta_slow < math.inf, "greater than 0 and finite")
        self._require(
            "beta_fast",
            self.beta_slow <= self.beta_fast < math.inf,
            f"at least beta_slow ({self.beta_slow}) and finite",
        )
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            value, may_be_zero = getattr(self, name), name != "attention_factor"
            holds = value is None or 0 < value < math.inf or (may_be_zero and value == 0)
            words = "at least 0" if may_be_zero else "greater than 0"
            self._require(name, holds, f"{words} and finite, or left out")

    def _require(self, name: str, holds: bool, constraint: str) -> None:
        require(holds, f"model.rope_scaling.{name}", getattr(self, name), constraint)

    def scaled(self, plain_P: Tensor, size: int, theta: float) -> Tensor:
        """Return the radians per position of each pair, from those without YaRN."""
        low, high = self._ramp(size, theta)
        pair_P = torch.arange(len(plain_P), dtype=plain_P.dtype, device=plain_P.device)
        divided_P = ((pair_P - low) / (high - low)).clamp(0, 1)
        return plain_P * (1 - divided_P) + plain_P / self.factor * divided_P

    def _ramp(self, size: int, theta: float) -> tuple[float, float]:
        """Return the pair up to which frequencies are unchanged, and the pair from which they are
        divided by `factor`."""
        low, high = (
            size
            * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        return low, high + 0.001 if high == low else high

    def growth(self, mscale: float = 1.0) -> float:
        """Return 1 + 0.1 mscale ln(factor)."""
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def magnitude(self) -> float:
        """Return the factor on the rotated vectors."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth()

    def softmax_factor(self) -> float:
        """Return DeepSeek-V2's factor on the softmax's scale."""
        return self.growth(self.mscale_all_dim or 0.0) ** 2


@dataclass(frozen=True)
class Llama3RopeConfig:
    """The rotary embedding of Llama 3.1 and later, which adapts a model that was trained on short
    sequences to longer sequences. The fields have their published names."""

    rope_type: ClassVar[str] = "llama3"

    factor: float = 8.0
    """Divisor of the low frequencies; 1: no change."""
    original_max_position_embeddings: int = 8192
    """Original maximal length of a sequence, in tokens. If a configuration leaves it out, it is the
    model's max_position_embeddings, as it was before a factor was given."""
    low_freq_factor: float = 1.0
    """Frequencies of pairs with fewer than this number of rotations within the original length are
    divided by `factor`."""
    high_freq_factor: float = 4.0
    """Frequencies of pairs with more than this number of rotations within the original length are
    not changed; those between `low_freq_factor` and `high_freq_factor` are interpolated."""

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        for name, holds, constraint in (
            ("factor", 1 <= self.factor < math.inf, "at least 1 and finite"),
            (ORIGINAL_LENGTH, self.original_max_position_embeddings >= 1, "at least 1"),
            ("low_freq_factor", 0 < low < math.inf, "greater than 0 and finite"),
            (
                "high_freq_factor",
                low < high < math.inf,
                f"greater than low_freq_factor ({low}) and finite",
            ),
        ):
            require(holds, f"model.rope_scaling.{name}", getattr(self, name), constraint)

    def scaled(self, plain_P: Tensor, size: int, theta: float) -> Tensor:
        """Return the radians per position of each pair, from those of the plain embedding."""
        rotations_P = plain_P * self.original_max_position_embeddings / (2 * math.pi)
        between = self.high_freq_factor - self.low_freq_factor
        unchanged_P = ((rotations_P - self.low_freq_factor) / between).clamp(0, 1)
        return plain_P * unchanged_P + plain_P / self.factor * (1 - unchanged_P)

    def magnitude(self) -> float:
        """Return the factor on the rotated vectors."""
        return 1.0


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a head; layers with equal instances share their tables."""

    size: int
    """Rotary width of a head; even."""
    theta: float
    """Base of the frequencies."""
    scaling: YarnConfig | Llama3RopeConfig | None = None
    interleaved: bool = False
    """Pairs of neighboring coordinates (x_2i, x_2i+1); otherwise across the halves (x_i, x_P+i)."""

    def frequencies(self, device: torch.device) -> Float[Tensor, " p"]:
        """Return the radians per position of each pair, in fp64."""
        plain_P = self.theta ** -(
            torch.arange(0, self.size, 2, dtype=torch.float64, device=device) / self.size
        )
        if self.scaling is None:
            return plain_P
        return self.scaling.scaled(plain_P, self.size, self.theta)

    def tables(
        self, positions: Int[Tensor, "b s"]
    ) -> tuple[Float[Tensor, "b s p"], Float[Tensor, "b s p"]]:
        """Return the cosine and the sine of each pair's angle at each position, times YaRN's
        factor, in fp64."""
        angles_BSP = positions.to(torch.float64).unsqueeze(-1) * self.frequencies(positions.device)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude()
        return angles_BSP.cos() * magnitude, angles_BSP.sin() * magnitude

    def rotate(
        self,
        x_BSHN: Float[Tensor, "b s h n"],
        *tables: Float[Tensor, "#b s p"],
        last: bool = False,
    ) -> Float[Tensor, "b s h n"]:
        """Rotate the first R columns of each head, or with `last` the last R, by the angles of
        these cosines and sines; the others are copied."""
        return rotate_part(x_BSHN, *tables, halves=not self.interleaved, last=last)

    def join_shared_key(
        self,
        kv_BSHx: Float[Tensor, "b s h x"],
        k_BSR: Float[Tensor, "b s r"],
        *tables: Float[Tensor, "#b s p"],
        size: int,
    ) -> tuple[Float[Tensor, "b s h n"], Float[Tensor, "b s h u"]]:
        """Return keys and values: `size` columns of each head, behind them the key that all heads
        share, rotated by the angles of these cosines and sines; and the other columns."""
        return join_shared_key(kv_BSHx, k_BSR, *tables, halves=not self.interleaved, size=size)
