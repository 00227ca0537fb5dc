"""Rotary position embedding, plain or with YaRN: computes the angles by which pairs of a head's
coordinates are rotated at each position.

Sources: RoPE (Su et al., arXiv:2104.09864); YaRN (Peng et al., arXiv:2309.00071), in the two
variants of published models: DeepSeek-V2 (pairs of neighboring coordinates, `mscale` and
`mscale_all_dim`) and GPT-OSS (pairs across the halves of a head, bounds of the ramp not rounded).
Fields that are left out have the same meaning as in Hugging Face transformers.

Letters: B sequences, S positions, H heads, R rotary width of a head, P = R / 2 pairs.

Frequencies and angles are computed in fp64, because an fp32 angle has an error of 0.03 at position
one million; the rotation (`lather.kernels.rotary`) is computed in fp32 or wider. All layers share
the tables of cosines and sines of a forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lather.errors import require
from lather.shapes import Float, Int


@dataclass(frozen=True)
class YarnConfig:
    """YaRN, which adapts a model that was trained on short sequences to longer sequences. The
    fields have their published names."""

    factor: float = 1.0
    """Ratio of the new maximal length to the original length; 1: no change."""
    original_max_position_embeddings: int = 4096
    """Original maximal length of a sequence, in tokens."""
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
class Rotary:
    """The rotary embedding of a head; layers with equal instances share their tables."""

    size: int
    """Rotary width of a head; even."""
    theta: float
    """Base of the frequencies."""
    scaling: YarnConfig | None = None

    def frequencies(self, device: torch.device) -> Float[Tensor, " p"]:
        """Return the radians per position of each pair, in fp64."""
        plain_P = self.theta ** -(
            torch.arange(0, self.size, 2, dtype=torch.float64, device=device) / self.size
        )
        if self.scaling is None:
            return plain_P
        low, high = self._ramp(self.scaling)
        pair_P = torch.arange(self.size // 2, dtype=torch.float64, device=device)
        divided_P = ((pair_P - low) / (high - low)).clamp(0, 1)
        return plain_P * (1 - divided_P) + plain_P / self.scaling.factor * divided_P

    def _ramp(self, yarn: YarnConfig) -> tuple[float, float]:
        """Return the pair up to which frequencies are unchanged, and the pair from which they are
        divided by `factor`."""
        low, high = (
            self.size
            * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(self.theta))
            for turns in (yarn.beta_fast, yarn.beta_slow)
        )
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.size - 1)
        return low, high + 0.001 if high == low else high

    def tables(
        self, positions: Int[Tensor, "b s"]
    ) -> tuple[Float[Tensor, "b s p"], Float[Tensor, "b s p"]]:
        """Return the cosine and the sine of each pair's angle at each position, times YaRN's
        factor, in fp64."""
        angles_BSP = positions.to(torch.float64).unsqueeze(-1) * self.frequencies(positions.device)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude()
        return angles_BSP.cos() * magnitude, angles_BSP.sin() * magnitude
