"""Measures what formats of the optimizer state do to the numbers for which it is kept: to Adam's
update, a basis, and the eigenbasis of a factor.

    python -m benchmarks.state_formats [--out benchmarks/results/state-formats.jsonl]

Gradients are Gaussian with a constant part of 0.3 of the noise. `decades`: by how many decades the
sizes of coordinates differ, in the eigenbasis.

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
    int16               the same in 16 bits (`lather.kernels.triangle.quantize_triangle`)

Factors are symmetric, so rounding is that of their lower triangles. What is measured:

    moments, squares    error of m / sqrt(v) in the smaller half of the coordinates, after 300 steps
    bases               spectral norm of the error of a random basis, and of Q^T Q - I
    factors             rms correlation of the gradient's coordinates in the eigenbasis of the
                        factor, after 200 steps (that of the exact factor is 0)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Row, RowFile, environment
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
from lather.kernels.triangle import (
    dequantize_triangle,
    pack_triangle,
    quantize_triangle,
    triangle_numel,
    unpack_triangle,
)

MOMENTS = ("bfloat16", "int8", "int8_nearest", "coarse", "coarse_nearest", "linear")
SQUARES = ("bfloat16", "int8", "int8_nearest", "coarse", "linear")
BASES = ("bfloat16_nearest", "int8_nearest", "int8", "linear_nearest", "orthonormal")
FACTORS = ("bfloat16", "bfloat16_nearest", "int8", "linear", "diagonal", "int16")
WIDTH = 256
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
    n = k.shape[-1]
    if form == "int16":
        codes = torch.empty(*k.shape[:-2], triangle_numel(n), dtype=torch.int16)
        diagonal = k.new_empty(k.shape[:-1])
        quantize_triangle(k, codes, diagonal, step)
        return dequantize_triangle(codes, diagonal)
    if form != "diagonal":
        return unpack_triangle(rounded(pack_triangle(k), form, SIGNED, step), n)
    scale = k.diagonal(dim1=-2, dim2=-1).clamp_min(1e-38).rsqrt()
    scale = scale.unsqueeze(-1) * scale.unsqueeze(-2)
    triangle = rounded(pack_triangle(k * scale), "linear", SIGNED, step)
    whole = unpack_triangle(triangle, n) / scale
    whole.diagonal(dim1=-2, dim2=-1).copy_(k.diagonal(dim1=-2, dim2=-1))
    return whole


def rows() -> Iterator[Row]:
    for decades in (1, 2, 3, 4):
        for form in MOMENTS:
            yield _row("moments", form, decades, error=update_error(form, "float32", decades))
        for form in SQUARES:
            yield _row("squares", form, decades, error=update_error("float32", form, decades))
        for form in FACTORS:
            yield _row("factors", form, decades, correlation=correlation(form, decades))
    for form in ("bfloat16_nearest", "int8", "int8_nearest"):
        error = update_error("float32", form, 2, beta2=0.999, num_steps=3000)
        yield _row("squares, beta2 0.999", form, 2, error=error)
    for form in BASES:
        yield _row("bases", form, 0, **basis_errors(form))


def _row(kind: str, form: str, decades: int, **numbers: float) -> Row:
    config = {"kind": kind, "format": form, "decades": decades}
    return {"benchmark": "state format", "config": config, **numbers}


def update_error(
    moments: str, squares: str, decades: int, *, beta2: float = 0.95, num_steps: int = 300
) -> float:
    """Return the error of Adam's update relative to that with fp32 state."""
    scale = 10.0 ** torch.linspace(0, -decades, WIDTH)

    def update(moments: str, squares: str) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        signal = 0.3 * torch.randn(64, WIDTH, generator=generator)
        m, v, u = (torch.zeros(64, WIDTH) for _ in range(3))
        for t in range(1, num_steps + 1):
            g = (signal + torch.randn(64, WIDTH, generator=generator)) * scale
            m, v = m.lerp(g, 0.05), v.lerp(g.square(), 1 - beta2)
            u = m / (v / (1 - beta2**t)).sqrt()
            m = m if moments == "float32" else rounded(m, moments, SIGNED, t)
            v = v if squares == "float32" else rounded(v, squares, POSITIVE, t)
        return u[:, WIDTH // 2 :]

    exact = update("float32", "float32")
    return float((update(moments, squares) - exact).norm() / exact.norm())


def basis_errors(form: str, n: int = 768) -> dict[str, float]:
    q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0))).Q
    stored = rounded(q, form, BASIS, 1)
    errors = {"error": stored - q, "orthonormality": stored.mT @ stored - torch.eye(n)}
    return {name: float(torch.linalg.matrix_norm(x, 2)) for name, x in errors.items()}


def correlation(form: str, decades: int) -> float:
    """Return how far the eigenbasis of a stored factor is from that of the exact one."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator)).Q
    root = basis * 10.0 ** torch.linspace(0, -decades, WIDTH)
    exact, stored = (torch.zeros(1, WIDTH, WIDTH) for _ in range(2))
    for t in range(1, 201):
        x = root @ torch.randn(WIDTH, 2 * WIDTH, generator=generator)
        for k in (exact, stored):
            k.lerp_(x @ x.mT, 0.05)
        stored = rounded_factor(stored, form, t)
    q = torch.linalg.eigh(stored[0].double()).eigenvectors
    turned = q.mT @ exact[0].double() @ q
    scale = turned.diagonal().rsqrt()
    off = turned * scale * scale[:, None] - torch.eye(WIDTH)
    return float(off.square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/state-formats.jsonl"))
    file = RowFile(parser.parse_args().out)
    common = environment(torch.device("cpu"), ())
    for row in rows():
        numbers = {k: v for k, v in row.items() if isinstance(v, float)}
        print(*row["config"].values(), *(f"{k} {v:.4f}" for k, v in numbers.items()))
        file.write([{**common, **row}])
    file.finish()


if __name__ == "__main__":
    main()
