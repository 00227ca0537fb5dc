"""Rules whose state is rounded to a format after every step and every refresh, as if it were stored
in it: formats can be compared before the optimizers have them.

    float32             no rounding
    bfloat16            bf16 with stochastic rounding; bfloat16_nearest: to the nearest
    int8                the code that `lather.kernels.quantized` has for the kind of entry, with
                        stochastic rounding; int8_nearest: to the nearest
    linear              127 equal steps up to the next power of two; linear_nearest
    coarse              4 bits of exponent and 3 of mantissa for moments, in place of 3 and 4, and 5
                        and 3 for second moments, in place of 4 and 4; coarse_nearest
    orthonormal         bases in int8 to the nearest, made orthonormal again when they are read, by
                        a step of Newton-Schulz
    diagonal            factors in the linear code, each element in units of the root of the product
                        of its two diagonal elements, which stay in fp32
    int16               the same in 16 bits, to the nearest

Factors are symmetric, so rounding is that of their lower triangles.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lather.kernels.quantized import (
    BASIS,
    POSITIVE,
    SIGNED,
    Code,
    dequantize,
    num_blocks,
    quantize_,
)
from lather.kernels.stochastic_rounding import round_to_bf16
from lather.kernels.triangle import pack_triangle, unpack_triangle
from lather.optim.rule import Rule, State
from lather.optim.rules.adamw import AdamWRule
from lather.optim.rules.muon import MuonRule
from lather.optim.rules.soap import SOAPRule
from lather.optim.rules.soap_muon import SOAPMuonRule

Format = Literal[
    "float32",
    "bfloat16",
    "bfloat16_nearest",
    "int8",
    "int8_nearest",
    "linear",
    "linear_nearest",
    "coarse",
    "coarse_nearest",
    "orthonormal",
    "diagonal",
    "int16",
]
INT16 = 2**15 - 1
COARSE = {True: Code(16, is_signed=True), False: Code(32, is_signed=False)}
LINEAR = {True: Code(1, is_signed=True), False: Code(1, is_signed=False)}


def rounded(x: Tensor, form: str, code: Code, step: int) -> Tensor:
    """Return x (B, ..., n) as it is read again from a format, of which `code` is the int8."""
    name, _, nearest = form.partition("_")
    if name == "bfloat16":
        return (x.bfloat16() if nearest else round_to_bf16(x, step)).float()
    code = {"linear": LINEAR, "coarse": COARSE}.get(name, {}).get(code.is_signed, code)
    x = x.contiguous()
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = x.new_empty(*x.shape[:-1], num_blocks(x.shape[-1]))
    quantize_(x, codes, scales, step, code=code, stochastic=not nearest and name != "orthonormal")
    y = dequantize(codes, scales, code=code)
    return 1.5 * y - 0.5 * y @ (y.mT @ y) if name == "orthonormal" else y


def rounded_factor(k: Tensor, form: str, step: int) -> Tensor:
    if form not in {"diagonal", "int16"}:
        triangle = rounded(pack_triangle(k), form, SIGNED, step)
        return unpack_triangle(triangle, k.shape[-1])
    scale = k.diagonal(dim1=-2, dim2=-1).clamp_min(1e-38).rsqrt()
    scale = scale.unsqueeze(-1) * scale.unsqueeze(-2)
    triangle = pack_triangle(k * scale)
    if form == "int16":
        triangle = triangle.mul(INT16).round().clamp(-INT16, INT16) / INT16
    else:
        triangle = rounded(triangle, "linear", SIGNED, step)
    whole = unpack_triangle(triangle, k.shape[-1]) / scale
    whole.diagonal(dim1=-2, dim2=-1).copy_(k.diagonal(dim1=-2, dim2=-1))
    return whole


@dataclass(frozen=True)
class CodedMoments(Rule):
    """Rounds moments after each update."""

    _: KW_ONLY
    moments: Format = "int8"
    """Format of momenta."""
    squares: Format = "int8"
    """Format of second moments."""

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        u = super().update(g, s, t)
        self.round_moments(s, t)
        return u

    def round_moments(self, s: State, t: int) -> None:
        forms = {"exp_avg": self.moments, "momentum_buffer": self.moments}
        for name, form in {**forms, "exp_avg_sq": self.squares}.items():
            if name in s and form != "float32":
                x = s[name]
                rows = x.view(1, -1) if x.dim() < 2 else x
                code = POSITIVE if name == "exp_avg_sq" else SIGNED
                x.copy_(rounded(rows, form, code, t).view_as(x))


@dataclass(frozen=True)
class CodedState(CodedMoments):
    """Rounds moments and factors after each update, and bases and moments after each refresh."""

    _: KW_ONLY
    bases: Format = "int8_nearest"
    """Format of bases."""
    factors: Format = "bfloat16"
    """Format of factors."""

    def update(self, g: Tensor, s: State, t: int) -> Tensor:
        u = super().update(g, s, t)
        for k in s.by_dim("factor").values() if self.factors != "float32" else ():
            k.copy_(rounded_factor(k, self.factors, t))
        return u

    def refresh(self, s: State, dim: int, method: str, first: bool) -> Any:
        failed = super().refresh(s, dim, method, first)  # type: ignore[misc]
        if self.bases != "float32":
            q = s[f"basis_{dim}"]
            q.copy_(rounded(q, self.bases, BASIS, dim))
        self.round_moments(s, dim)
        return failed


@dataclass(frozen=True)
class CodedAdamW(CodedMoments, AdamWRule):
    """AdamW with rounded moments."""

    def step_whole(self, *arguments: Any) -> bool:
        return False


@dataclass(frozen=True)
class CodedMuon(CodedMoments, MuonRule):
    """Muon with a rounded momentum."""


@dataclass(frozen=True)
class CodedSOAP(CodedState, SOAPRule):
    """SOAP with rounded state."""


@dataclass(frozen=True)
class CodedSOAPMuon(CodedState, SOAPMuonRule):
    """SOAP-Muon with rounded state."""
