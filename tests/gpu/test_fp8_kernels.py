"""Products in FP8 on a CUDA device: the bits of the definition, and its numbers."""

import pytest
import torch
from torch import Tensor

from lather.kernels.block_scaled import (
    BlockScaled,
    empty_rows,
    grouped_product,
    multiplies_in_fp8,
    scaled_rows,
    scaled_weights,
    unscaled_rows,
)
from lather.kernels.swiglu import (
    CLAMPED_SWIGLU,
    SWIGLU,
    Gate,
    gate_backward,
    gate_forward,
    scaled_gate_forward,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not multiplies_in_fp8(torch.device("cuda")),
    reason="needs a CUDA device that multiplies in FP8",
)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_cuda(scaled: BlockScaled) -> BlockScaled:
    return BlockScaled(*(part.cuda() for part in scaled))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_and_scales_have_the_bits_of_the_definition(dtype: torch.dtype) -> None:
    x, w = drawn(300, 500, dtype=dtype), drawn(3, 200, 500, dtype=dtype, seed=1)
    x[7, 130], x[8], x[9] = torch.nan, 0.0, 1e-30
    for scaled, matrix in ((scaled_rows, x), (scaled_weights, w)):
        expected, found = scaled(matrix), scaled(matrix.cuda())
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.cpu().float().nan_to_num(-1.0).equal(theirs.float().nan_to_num(-1.0))
    rows = scaled_rows(x)
    assert (
        unscaled_rows(on_cuda(rows), None, dtype)
        .cpu()
        .nan_to_num(-1.0)
        .equal(unscaled_rows(rows, None, dtype).nan_to_num(-1.0))
    )


@pytest.mark.parametrize("gate", [SWIGLU, CLAMPED_SWIGLU], ids=str)
@pytest.mark.parametrize("columns", [200, 1408])
def test_gates_write_the_bits_of_rounding_what_they_write_in_bf16(columns: int, gate: Gate) -> None:
    gate_up = drawn(300, 2 * columns, dtype=torch.bfloat16).cuda()
    gate_up[7, 130], gate_up[8] = torch.nan, 0.0
    grad_h, weight = torch.ones_like(gate_up[:, :columns]), torch.rand(300).cuda()
    in_fp8 = empty_rows(gate_up, 2 * columns)
    grad, _, _ = gate_backward(grad_h, gate_up, gate, weight, in_fp8)
    for found, x in (
        (scaled_gate_forward(gate_up, gate), gate_forward(gate_up, gate)),
        (in_fp8, grad),
    ):
        for ours, theirs in zip(found, scaled_rows(x.cpu()), strict=True):
            assert ours.cpu().float().nan_to_num(-1.0).equal(theirs.float().nan_to_num(-1.0))


@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_those_of_the_definition(transposed: bool) -> None:
    weights = scaled_weights(drawn(3, 200, 500, dtype=torch.bfloat16, seed=1))
    rows = scaled_rows(drawn(300, 200 if transposed else 500, dtype=torch.bfloat16))
    row_G = torch.arange(300).flip(0)
    end_E = torch.tensor([130, 130, 300], dtype=torch.int32)
    row_G[5] = -1
    options = {"dtype": torch.float32, "transposed": transposed}
    expected = grouped_product(rows, row_G, weights, end_E, **options)  # type: ignore[arg-type]
    found = grouped_product(
        on_cuda(rows),
        row_G.cuda(),
        on_cuda(weights),
        end_E.cuda(),
        **options,  # type: ignore[arg-type]
    )
    error = (found.cpu() - expected).norm() / expected.norm()
    assert error < 1e-3
