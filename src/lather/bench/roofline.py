"""The least time that a SOAP step can take: the fewest flops of the rule at the rates measured for that size in the same process.

Per matrix (m x n) and step, a multiplication and an addition being two flops:

    gradient in, Q_L^T G Q_R         2mn(m+n)
    update out, Q_L U Q_R^T          2mn(m+n)
    factors, G G^T and G^T G          mn(m+n)     symmetric: half of the products
    momentum to the new bases        per dim d, the cheapest per interval of f steps of
        by the turn S = Q_new^T Q_old        2d^3 + 2d mn
        out with the old, in with the new    4d mn
        kept in parameter coordinates        2d mn at each of the f steps, and nothing at a refresh
    refresh, K Q                     2d^3 per dim and interval
    refresh, QR                      its measured time, per dim and interval

Element-wise work is not counted. Rates: the best of `torch.bmm` over the set's own products and a few batch sizes, and the best time per
matrix of `torch.linalg.qr`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lather.bench.contestants import MatrixSet

REPEATS = 5
MAX_OPERAND_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Rates:
    """What the machine does at one matrix shape."""

    matmul: float
    """Flops per second."""
    qr_seconds: dict[int, float]
    """Per matrix of that size."""


def step_flops(m: int, n: int) -> int:
    """Of every step: in, out, statistics."""
    return 5 * m * n * (m + n)


def interval_flops(m: int, n: int, frequency: int) -> int:
    """Of one refresh and of the momentum's transport, once per `frequency` steps; QR aside."""
    return sum(2 * d**3 + min(2 * d**3 + 2 * d * m * n, 4 * d * m * n, frequency * 2 * d * m * n) for d in (m, n))


def flops_per_step(m: int, n: int, frequency: int) -> float:
    return step_flops(m, n) + interval_flops(m, n, frequency) / frequency


def roofline_ms(matrices: MatrixSet, frequency: int, rates: Rates) -> float:
    """Of one step of the whole set, the mean over an interval."""
    m, n = matrices.shape
    qr = (rates.qr_seconds[m] + rates.qr_seconds[n]) / frequency
    return 1e3 * matrices.num_matrices * (flops_per_step(m, n, frequency) / rates.matmul + qr)


def measure_rates(matrices: MatrixSet, device: torch.device) -> Rates:
    m, n = matrices.shape
    sizes = [b for b in sorted({1, 4, 16, matrices.num_matrices}) if b <= matrices.num_matrices]
    products = [(m, m, n), (m, n, n), (m, n, m), (n, m, n), (n, n, n)]
    matmul = max(_matmul_rate(b, *product, device) for product in products for b in sizes)
    return Rates(matmul, {d: min(_qr_seconds(b, d, device) for b in sizes[:2]) for d in {m, n}})


def _matmul_rate(b: int, i: int, j: int, k: int, device: torch.device) -> float:
    if 4 * b * max(i * j, j * k, i * k) > MAX_OPERAND_BYTES:
        return 0.0
    x, y, out = (torch.randn(b, *shape, device=device) for shape in ((i, j), (j, k), (i, k)))
    return 2.0 * b * i * j * k / _best_seconds(lambda: torch.bmm(x, y, out=out), device)


def _qr_seconds(b: int, d: int, device: torch.device) -> float:
    x = torch.randn(b, d, d, device=device)
    return _best_seconds(lambda: torch.linalg.qr(x), device) / b


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The best of REPEATS, after one that does not count."""
    seconds = []
    for _ in range(1 + REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
