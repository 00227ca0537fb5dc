"""The count of flops, by hand for one shape, and the times that follow from it."""

import pytest
import torch

from benchmarks.contestants import MatrixSet, OptimizerCase
from benchmarks.roofline import (
    ShapeRates,
    flops_per_step,
    interval_flops,
    measure_rates,
    roofline_ms,
    step_flops,
)


def test_flops_of_a_2_by_3_matrix() -> None:
    # in: Q_L^T G 2*2*2*3 = 24, times Q_R 2*2*3*3 = 36; out the same; half of G G^T (24) and of G^T
    # G (36)
    assert step_flops(2, 3) == 60 + 60 + 30
    # K Q: 16 and 54. Momentum, size 2: turn 16 + 24, out and in 48, in parameter coordinates 24 a
    # step; size 3: 54 + 36, 72, 36 a step
    assert interval_flops(2, 3, frequency=1) == 16 + 54 + 24 + 36
    assert interval_flops(2, 3, frequency=10) == 16 + 54 + 40 + 72
    assert flops_per_step(OptimizerCase("soap", MatrixSet("one", 1, (2, 3)), 10)) == pytest.approx(
        150 + 18.2
    )


def test_flops_of_newton_schulz() -> None:
    # five times X X^T (half of 24), A A (half of 16), times X (24)
    assert (
        flops_per_step(OptimizerCase("muon", MatrixSet("one", 1, (2, 3))))
        == flops_per_step(OptimizerCase("muon", MatrixSet("one", 1, (3, 2))))
        == 5 * 44
    )


def test_roofline_adds_products_and_qr() -> None:
    matrices = MatrixSet("two", 2, (2, 3))
    rates = ShapeRates(matmul=1e3, qr_seconds={2: 0.1, 3: 0.2}, bytes=28.0)
    assert roofline_ms(OptimizerCase("soap", matrices, 1), rates) == pytest.approx(
        1e3 * 2 * (0.28 + 0.3)
    )
    assert roofline_ms(OptimizerCase("soap", matrices, 10), rates) == pytest.approx(
        1e3 * 2 * (0.1682 + 0.03)
    )
    assert roofline_ms(OptimizerCase("muon", matrices), rates) == pytest.approx(1e3 * 2 * 0.22)
    assert roofline_ms(OptimizerCase("adamw", matrices), rates) == pytest.approx(1e3 * 2 * 6)


def test_rates_are_measured_for_both_sizes() -> None:
    rates = measure_rates("soap", MatrixSet("few", 2, (8, 16)), torch.device("cpu"))
    assert 1e5 < rates.matmul < 1e15
    assert 1e5 < rates.bytes < 1e15
    assert rates.qr_seconds.keys() == {8, 16}
    assert all(0 < seconds < 1 for seconds in rates.qr_seconds.values())
