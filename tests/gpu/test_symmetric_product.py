"""The kernel of symmetric products on a CUDA device: the numbers of torch's products, symmetric to
the bit, and what Newton-Schulz makes of them."""

from __future__ import annotations

import pytest
import torch

from lather.optim.functional import orthogonalize

pytest.importorskip("triton")
from lather.kernels.symmetric_product import reference, triton

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOLERANCE = {torch.bfloat16: 6e-3, torch.float32: 2e-3}
"""The largest difference from fp64, relative in the Frobenius norm; fp32 operands are in TF32."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 63, 500), (3, 512, 520), (2, 1000, 333), (2, 1408, 2048)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products(shape: tuple[int, int, int], dtype: torch.dtype, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to("cuda", dtype)
    x = x.mT.contiguous().mT if transposed else x
    total = torch.zeros(*shape[:1], *shape[1:2] * 2, dtype=dtype, device="cuda")
    total += 3 * torch.eye(shape[1], dtype=dtype, device="cuda")
    wide = [y.double() for y in (total, x)]
    options = {"beta": 0.5, "alpha": 0.1, "out": None}
    for y, expected in (
        (triton.symmetric_product(x), reference.symmetric_product(wide[1])),
        (
            triton.add_symmetric_product(total, x, **options),
            reference.add_symmetric_product(*wide, **options),
        ),
        (
            triton.add_symmetric_product(total, x, **(options | {"out": total})),
            reference.add_symmetric_product(*wide, **options),
        ),
    ):
        assert y.dtype == dtype
        assert y.equal(y.mT)
        error = torch.dist(y.double(), expected) / expected.norm()
        assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(2, 512, 1024), (2, 1024, 512)], ids=str)
def test_newton_schulz_has_the_numbers_of_whole_products(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()
    u = orthogonalize(x)
    monkeypatch.setattr("lather.kernels.symmetric_product.LEAST_ROWS", 2**20)
    expected = orthogonalize(x)
    assert torch.dist(u, expected) <= 2e-2 * expected.norm()
    values = torch.linalg.svdvals(u.double())
    assert values.min() > 0.5
    assert values.max() < 1.35
