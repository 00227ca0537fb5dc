"""Rotary position embedding, plain and stretched by YaRN: which angle each pair of a head's coordinates is turned by at each position.

Sources: RoPE (Su et al., arXiv:2104.09864); YaRN (Peng et al., arXiv:2309.00071), in the two ways of published models: DeepSeek-V2 (pairs
of neighbouring coordinates, `mscale` and `mscale_all_dim`) and GPT-OSS (pairs across the halves of a head, bounds of the ramp not rounded).
What a field left out means is what Hugging Face transformers takes it for.

Letters: B sequences, S positions, H heads, R rotary width of a head, P = R / 2 pairs.

Frequencies and angles are fp64, and the turn (`lather.kernels.rotary`) is made in fp32 or wider: an fp32 angle is off by 0.03 at position
a million. The tables of cosines and sines are made once per forward pass for all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lather.errors import require
from lather.shapes import Float, Int


@dataclass(frozen=True)
class YarnConfig:
    """How a model trained on short sequences reads longer ones. Field names are the published ones."""

    factor: float = 1.0
    """How many times longer; 1: not at all."""
    original_max_position_embeddings: int = 4096
    """Longest sequence before, tokens."""
    beta_fast: float = 32.0
    """Turns within that length above which a pair's frequency is kept."""
    beta_slow: float = 1.0
    """Turns within that length below which a pair's frequency is divided by `factor`; between the two, mixed."""
    mscale: float | None = None
    """Growth of the rotated vectors with ln(factor) is 0.1 times this; used together with `mscale_all_dim` only."""
    mscale_all_dim: float | None = None
    """The same for whole queries and keys: divided out of the rotated ones and, in DeepSeek-V2, put on the softmax's scale squared."""
    attention_factor: float | None = None
    """Factor on the rotated vectors; none: by the two fields above, or 1 + 0.1 ln(factor) without them."""
    truncate: bool = True
    """Round the bounds between kept and divided frequencies outwards to whole pairs."""

    def __post_init__(self) -> None:
        self._require("factor", 1 <= self.factor < math.inf, "at least 1 and finite")
        self._require("original_max_position_embeddings", self.original_max_position_embeddings >= 1, "at least 1")
        self._require("beta_slow", 0 < self.beta_slow < math.inf, "greater than 0 and finite")
        self._require("beta_fast", self.beta_slow <= self.beta_fast < math.inf, f"at least beta_slow ({self.beta_slow}) and finite")
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            self._require(name, value is None or 0 <= value < math.inf, "at least 0 and finite, or left out")
        value = self.attention_factor
        self._require("attention_factor", value is None or 0 < value < math.inf, "greater than 0 and finite, or left out")

    def _require(self, name: str, holds: bool, constraint: str) -> None:
        require(holds, f"model.rope_scaling.{name}", getattr(self, name), constraint)

    def growth(self, mscale: float = 1.0) -> float:
        """1 + 0.1 mscale ln(factor)."""
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def magnitude(self) -> float:
        """Factor on the rotated vectors."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth()

    def softmax_factor(self) -> float:
        """DeepSeek-V2's factor on the softmax's scale."""
        return self.growth(self.mscale_all_dim or 0.0) ** 2


@dataclass(frozen=True)
class Rotary:
    """A head's rotary embedding: a value, so that layers with an equal one share its tables."""

    size: int
    """Rotary width of a head, even."""
    theta: float
    """Base of the frequencies."""
    scaling: YarnConfig | None = None

    def frequencies(self, device: torch.device) -> Float[Tensor, " p"]:
        """Radians per position of each pair, in fp64."""
        plain_P = self.theta ** -(torch.arange(0, self.size, 2, dtype=torch.float64, device=device) / self.size)
        if self.scaling is None:
            return plain_P
        low, high = self._ramp(self.scaling)
        pair_P = torch.arange(self.size // 2, dtype=torch.float64, device=device)
        divided_P = ((pair_P - low) / (high - low)).clamp(0, 1)
        return plain_P * (1 - divided_P) + plain_P / self.scaling.factor * divided_P

    def _ramp(self, yarn: YarnConfig) -> tuple[float, float]:
        """Pair up to which a frequency is kept, and pair from which it is divided."""

        def pair_with(turns: float) -> float:
            return self.size * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.size - 1)
        return low, high + 0.001 if high == low else high

    def tables(self, positions: Int[Tensor, "b s"]) -> tuple[Float[Tensor, "b s p"], Float[Tensor, "b s p"]]:
        """Cosine and sine of each pair's angle at each position, times YaRN's factor, in fp64."""
        angles_BSP = positions.to(torch.float64).unsqueeze(-1) * self.frequencies(positions.device)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude()
        return angles_BSP.cos() * magnitude, angles_BSP.sin() * magnitude
