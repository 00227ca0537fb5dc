"""Measures what formats of the optimizer state do to the numbers for which it is kept: to Adam's
update, a basis, and the eigenbasis of a factor.

    python -m benchmarks.state_formats [--out benchmarks/results/state-formats.jsonl]

Gradients are Gaussian with a constant part of 0.3 of the noise. `decades`: by how many decades the
sizes of coordinates differ, in the eigenbasis. The formats are those of
`benchmarks.studies.coded_state`.

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
from benchmarks.studies.coded_state import rounded, rounded_factor
from lather.kernels.quantized import BASIS, POSITIVE, SIGNED

MOMENTS = ("bfloat16", "int8", "int8_nearest", "coarse", "coarse_nearest", "linear")
SQUARES = ("bfloat16", "int8", "int8_nearest", "coarse", "linear")
BASES = ("bfloat16_nearest", "int8_nearest", "int8", "linear_nearest", "orthonormal")
FACTORS = ("bfloat16", "bfloat16_nearest", "int8", "linear", "diagonal", "int16")
WIDTH = 256


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
