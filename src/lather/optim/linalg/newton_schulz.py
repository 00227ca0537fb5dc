"""The polar factor of matrices by Newton-Schulz iteration, which uses matrix products only and no
decomposition.

Source: Jordan et al., "Muon" (2024), quintic coefficients; Amsel et al., "The Polar Express",
arXiv:2505.16932, a sequence of coefficients, each optimal for its step. X <- a X + (b A + c A^2) X
with A = X X^T moves every singular value toward 1 and does not change the singular vectors.
Shapes: x (B, m, n). A has the size of the smaller side, so a step costs 4 k^2 max(m, n) + 2 k^3
flops with k = min(m, n). A and A^2 are symmetric: where half of their tiles are computed, a step
costs a quarter (long matrices) to a third (square ones) less.

Trade-off: five quintic steps leave singular values between about 0.7 and 1.2, which is precise
enough for an optimizer. Cubic steps, c = 0, need no square of A: two products in place of three,
but a small singular value grows by 1.5 a step only, in place of 3.4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lather.device import is_cpu, is_gpu
from lather.files import read_text
from lather.kernels.symmetric_product import add_symmetric_product
from lather.optim.linalg.kronecker import average_, gram, is_formed_whole
from lather.optim.linalg.scale import factors_between, norms, with_unit_norms
from lather.shapes import Float

QUINTIC = ((3.4445, -4.7750, 2.0315),)

POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Coefficients of the published sequence, for singular values from 1e-3 on; the last is
repeated."""

SAFETY = 1.01
"""Divisor of x in bf16, as published: a singular value that is rounded to above 1 would grow
without bound under these polynomials."""

CUBIC = ((1.5, -0.5, 0.0),)

HYBRID_END = ((2.0, -1.5, 0.5),) * 2
"""Last two steps of the hybrid sequence, which move singular values near 1 to 1 (DeepSeek-V4: after
eight quintic steps)."""

Coefficients = Literal["quintic", "polar_express", "cubic", "hybrid"]

IterationDtype = Literal["auto", "fastest", "float32", "bfloat16"]

COEFFICIENTS = {"quintic": QUINTIC, "polar_express": POLAR_EXPRESS, "cubic": CUBIC}


def orthogonalize(
    x: Float[Tensor, "b m n"],
    steps: int = 5,
    coefficients: Coefficients = "quintic",
    dtype: IterationDtype = "auto",
    scale: float = 1.0,
    *,
    narrow: bool = False,
) -> Float[Tensor, "b m n"]:
    """Return approximately U V^T, times `scale`, for each x = U S V^T, in the dtype of x; a matrix
    of zeros stays zero.

    The result does not depend on the scale of x.

    Args:
        x: matrices, which are not changed.
        steps: number of steps of the iteration.
        coefficients: sequence of coefficients (`coefficients_of`).
        dtype: dtype of the iteration. auto: that of x, but bfloat16 for fp32 on CUDA; fastest:
            bfloat16 also for fp32 on a CPU that is faster in it.
        scale: factor of the result; on a GPU it is a factor of the last step's coefficients.
        narrow: on a GPU, return the result in the dtype of the iteration, without a wide copy.
    """
    y = with_unit_norms(x, iteration_dtype(x, dtype))
    y = iterate_unit(y, steps, coefficients, scale)
    if is_gpu(x):
        return y if narrow else y.to(x.dtype)
    y = y.to(x.dtype)
    return y if scale == 1.0 else y.mul_(scale)


def iterate_unit(
    y: Float[Tensor, "b m n"], steps: int, coefficients: Coefficients, scale: float
) -> Float[Tensor, "b m n"]:
    """Take steps of the iteration from matrices of unit norm, in their dtype. On a GPU `scale` is a
    factor of the last step's coefficients; on a CPU it is not used."""
    is_tall = y.shape[-2] > y.shape[-1]
    # on a GPU the result shall be contiguous, as the change of the weights by one kernel needs it
    from_right = is_tall and is_gpu(y)
    y = y.mT if is_tall and not from_right else y
    table = coefficients_of(coefficients, steps, y.dtype)
    if is_gpu(y):
        a, b, c = table[-1]
        table = (*table[:-1], (scale * a, scale * b, scale * c))
    for a, b, c in table:
        square = gram(y.mT if from_right else y)
        if not c:
            y = _plus_product(y, square, a, b, from_right)
            continue
        if is_formed_whole(square):
            polynomial = add_symmetric_product(square, square, beta=b, alpha=c)
        else:
            polynomial = average_(square.clone(), square, b, c)
        y = _plus_product(y, polynomial, a, 1.0, from_right)
    return y.mT if is_tall and not from_right else y


def _plus_product(x: Tensor, p: Tensor, beta: float, alpha: float, from_right: bool) -> Tensor:
    """Return beta X + alpha P X, or beta X + alpha X P."""
    return torch.baddbmm(x, *((x, p) if from_right else (p, x)), beta=beta, alpha=alpha)


def coefficients_of(
    name: Coefficients, steps: int, dtype: torch.dtype
) -> Sequence[tuple[float, float, float]]:
    """Return (a, b, c) of each step of an iteration in this dtype: the last of the sequence is
    repeated if there are more steps; hybrid is quintic up to its last two steps."""
    if name == "hybrid":
        return (*QUINTIC * max(steps - 2, 0), *HYBRID_END[:steps])
    table = COEFFICIENTS[name]
    if dtype == torch.bfloat16 and name == "polar_express":
        table = (*((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in table[:-1]), table[-1])
    return (*table[:steps], *table[-1:] * (steps - len(table)))


def iteration_dtype(x: Tensor, dtype: IterationDtype) -> torch.dtype:
    """Return the dtype in which `orthogonalize` multiplies."""
    if dtype in ("float32", "bfloat16"):
        return getattr(torch, dtype)
    in_bf16 = is_gpu(x) or (dtype == "fastest" and is_cpu(x) and cpu_is_fast_in_bf16())
    return torch.bfloat16 if in_bf16 and x.dtype == torch.float32 else x.dtype


@functools.cache
def cpu_is_fast_in_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices in a third to a fifth of the time of fp32. False
    on systems other than Linux."""
    try:
        return is_fast_in_bf16(read_text(Path("/proc/cpuinfo")))
    except OSError:
        return False


def is_fast_in_bf16(cpuinfo: str) -> bool:
    """Whether this is the cpuinfo of a CPU that is fast in bfloat16: Intel with AMX, or AMD with
    AVX512-BF16. Intel CPUs with AVX512-BF16 alone are slower in bfloat16 than in fp32, and all
    other CPUs much slower."""
    return "amx_bf16" in cpuinfo or ("AuthenticAMD" in cpuinfo and "avx512_bf16" in cpuinfo)


def update_scale(shape: Sequence[int], scale: str | float) -> float:
    """Return the factor by which an orthogonalized update (m, n) is multiplied.

    "match_rms_adamw": 0.2 sqrt(max(m, n)), the rms of AdamW's update (Liu et al.,
    arXiv:2502.16982); "spectral": sqrt(max(1, m / n)); or a number.
    """
    m, n = shape
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1.0, m / n)) if scale == "spectral" else float(scale)


def with_norm_of(x: Tensor, y: Tensor) -> Tensor:
    """Scale each matrix of y (B, m, n) to the Frobenius norm of the matrix in x; a matrix of zeros
    stays zero."""
    return y * factors_between(norms(x), norms(y))[:, None, None]
