"""Computes the least time that a step can take: the fewest flops or bytes that the rule needs, at
rates measured in the same process.

Per matrix (m x n, k = min(m, n)) and step, a multiplication and an addition being two flops:

    SOAP    gradient in, Q_L^T G Q_R         2mn(m+n)
            update out, Q_L U Q_R^T          2mn(m+n)
            factors, G G^T and G^T G          mn(m+n)     symmetric: half of the products
            momentum to the new bases        per dim d, the cheapest per interval of f steps of
                by the turn S = Q_new^T Q_old        2d^3 + 2d mn
                out with the old, in with the new    4d mn
                kept in parameter coordinates        2d mn at each of the f steps, and nothing at a
                                                     refresh
            refresh, K Q                     2d^3 per dim and interval
            refresh, QR                      its measured time, per dim and interval
    Muon    per step of Newton-Schulz, A = X X^T (symmetric: mn k), A A (symmetric: k^3), times X (2
            mn k)
    AdamW   no products, but bytes: w, m, v are read and written, g is read, 28 mn

Other element-wise work is not counted. The rates are the best rate of `torch.bmm` over the set's
own products and a few batch sizes, in the dtype that our optimizer multiplies in; the best time per
matrix of `torch.linalg.qr`; and the best rate of adding one tensor of all the set's elements to
another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.contestants import MatrixSet, OptimizerCase, lather_options
from lather.device import is_gpu
from lather.optim.linalg.newton_schulz import iteration_dtype

REPEATS = 5
MAX_OPERAND_BYTES = 256 * 2**20
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class ShapeRates:
    """The rates of the machine at one matrix shape."""

    matmul: float
    """Flops per second of matrix products."""
    qr_seconds: dict[int, float]
    """Seconds of a QR by size of the matrix; empty for rules without a QR."""
    bytes: float
    """Bytes per second, counting bytes read and bytes written."""


def step_flops(m: int, n: int) -> int:
    """The flops of every SOAP step: projecting in and out, and statistics."""
    return 5 * m * n * (m + n)


def interval_flops(m: int, n: int, frequency: int) -> int:
    """The flops of one refresh and of moving the momentum, once in `frequency` steps, without the
    QR."""
    return sum(
        2 * d**3 + min(2 * d**3 + 2 * d * m * n, 4 * d * m * n, frequency * 2 * d * m * n)
        for d in (m, n)
    )


def flops_per_step(case: OptimizerCase) -> float:
    """The flops of a step on one matrix, as the mean over an interval, without SOAP's QR."""
    m, n = case.matrices.shape
    k = min(m, n)
    match case.rule:
        case "soap":
            return step_flops(m, n) + interval_flops(m, n, case.frequency) / case.frequency
        case "muon":
            return float(NEWTON_SCHULZ_STEPS * (3 * m * n * k + k**3))
        case _:
            return 0.0


def roofline_ms(case: OptimizerCase, rates: ShapeRates) -> float:
    """The least milliseconds of a step on the whole set, as the mean over an interval."""
    m, n = case.matrices.shape
    seconds = flops_per_step(case) / rates.matmul
    if case.rule == "soap":
        seconds += (rates.qr_seconds[m] + rates.qr_seconds[n]) / case.frequency
    elif case.rule == "adamw":
        seconds += 28 * m * n / rates.bytes
    return 1e3 * case.matrices.num_matrices * seconds


def measure_rates(rule: str, matrices: MatrixSet, device: torch.device) -> ShapeRates:
    m, n = matrices.shape
    sizes = [b for b in sorted({1, 4, 16, matrices.num_matrices}) if b <= matrices.num_matrices]
    products = [(m, m, n), (m, n, n), (m, n, m), (n, m, n), (n, n, n)]
    dtype = torch.float32
    if rule == "muon":
        dtype = iteration_dtype(
            torch.empty(0, device=device), lather_options(rule, 1)["newton_schulz_dtype"]
        )
    matmul = max(_matmul_rate(b, *product, device, dtype) for product in products for b in sizes)
    qr_seconds = (
        {d: min(_qr_seconds(b, d, device) for b in sizes[:2]) for d in {m, n}}
        if rule == "soap"
        else {}
    )
    return ShapeRates(matmul, qr_seconds, _bytes_rate(matrices.num_matrices * m * n, device))


def _matmul_rate(b: int, i: int, j: int, k: int, device: torch.device, dtype: torch.dtype) -> float:
    if 4 * b * max(i * j, j * k, i * k) > MAX_OPERAND_BYTES:
        return 0.0
    x, y, out = (
        torch.randn(b, *shape, device=device).to(dtype) for shape in ((i, j), (j, k), (i, k))
    )
    return 2.0 * b * i * j * k / _best_seconds(lambda: torch.bmm(x, y, out=out), device)


def _qr_seconds(b: int, d: int, device: torch.device) -> float:
    x = torch.randn(b, d, d, device=device)
    return _best_seconds(lambda: torch.linalg.qr(x), device) / b


def _bytes_rate(elements: int, device: torch.device) -> float:
    x, y = torch.randn(elements, device=device), torch.randn(elements, device=device)
    return 12 * elements / _best_seconds(lambda: x.add_(y), device)


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time REPEATS calls after one that does not count; returns the best."""
    seconds = []
    for _ in range(1 + REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if is_gpu(device):
        torch.cuda.synchronize()
