"""The study of roundings runs from the quickstart to rows, and it rounds to the dtype that it
names."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/roundings.py"


@pytest.fixture(scope="module")
def roundings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roundings", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["roundings"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def test_tf32_keeps_ten_bits_of_mantissa(roundings: ModuleType) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    error = (roundings.rounded(x, "tf32") - x).abs() / x.abs()
    assert 2**-12 < error.max() <= 2**-11
    assert 2**-11 < ((roundings.rounded(x, "tf32_cut") - x).abs() / x.abs()).max() <= 2**-10
    exact = torch.tensor([1 + 2**-10, -3.0, 0.0])
    assert torch.equal(roundings.rounded(exact, "tf32"), exact)


def test_products_are_rounded_in_their_phase_alone(roundings: ModuleType) -> None:
    a = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    exact, precondition = a @ a, roundings.soap.precondition
    errors = {}
    for rounding in ("tf32", "bf16x3", "bf16"):
        with roundings.RoundedProducts(rounding):
            errors[rounding] = float((a @ a - exact).norm() / exact.norm())
    assert errors["bf16x3"] < 1e-4 < errors["tf32"] < 1e-3 < errors["bf16"]
    with roundings.products({"projections": "tf32"}):
        assert roundings.soap.precondition is not precondition
        assert torch.equal(a @ a, exact)
    assert roundings.soap.precondition is precondition


@pytest.mark.grid
def test_rows_of_updates(roundings: ModuleType) -> None:
    rows = list(roundings.update_rows("soap", seed=0, steps=5, at=(3,)))
    found = {(row["products"], row["update"]): row["median"] for row in rows}
    assert len(found) == len(rows) == 2 * 14
    assert (
        found["projections bf16x3", "step after"]
        < found["projections tf32", "step after"]
        < found["projections bf16", "step after"]
    )
    assert 0 < found["projections tf32", "step after"] < 1e-2
    assert found["refresh tf32", "step"] == 0


def test_a_row_of_losses(roundings: ModuleType) -> None:
    row = roundings.loss_row("soap_muon", "all", seed=0, steps=2)
    assert 0 < row["training_loss"] < 20
    assert 0 < row["validation_loss"] < 20
