"""The kernels of stored state on a CUDA device: the bits of the references on the CPU."""

from __future__ import annotations

import pytest
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
from lather.kernels.triangle import (
    dequantize_triangle,
    pack_triangle,
    quantize_triangle,
    triangle_numel,
    unpack_triangle,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    return x * (-60 * torch.rand(shape, generator=generator)).exp2()


@pytest.mark.parametrize("code", [SIGNED, POSITIVE, BASIS], ids=["signed", "positive", "basis"])
@pytest.mark.parametrize("shape", [(63,), (7, 500), (3, 768, 2048), (2, 0)], ids=str)
def test_codes_have_the_bits_of_the_cpu(shape: tuple[int, ...], code: Code) -> None:
    x = drawn(*shape)
    results = []
    for device in ("cpu", "cuda"):
        codes = torch.empty(shape, dtype=torch.int8, device=device)
        scales = torch.empty(*shape[:-1], num_blocks(shape[-1]), device=device)
        for step, stochastic in ((7, True), (2**40, False)):
            quantize_(x.to(device), codes, scales, step, code=code, stochastic=stochastic)
            values = dequantize(codes, scales, code=code)
            results.append(tuple(x.cpu().clone() for x in (codes, scales, values)))
    for expected, actual in zip(results[:2], results[2:], strict=True):
        assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))


def test_stochastic_rounding_has_the_bits_of_the_cpu() -> None:
    x = torch.cat((drawn(100_003), torch.tensor([torch.inf, -torch.inf, -0.0, 1e-44])))
    for step in (1, 2**33):
        assert round_to_bf16(x.cuda(), step).cpu().equal(round_to_bf16(x, step))
    assert round_to_bf16(torch.tensor([torch.nan]).cuda(), 1).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 64, 65, 768])
def test_triangles_have_the_bits_of_the_cpu(n: int, dtype: torch.dtype) -> None:
    x = drawn(3, n, n).to(dtype)
    packed = pack_triangle(x.cuda())
    assert packed.cpu().equal(pack_triangle(x))
    assert unpack_triangle(packed, n).cpu().equal(unpack_triangle(pack_triangle(x), n))


@pytest.mark.parametrize("n", [1, 64, 65, 768])
def test_codes_of_16_bits_have_the_bits_of_the_cpu(n: int) -> None:
    g = drawn(3, n, 2 * n)
    x = g @ g.mT
    x[0, 0] = x[0, :, 0] = 0.0  # a row without gradients
    x[1, :, n - 1] *= 1e-20
    x[1, n - 1] *= 1e-20  # a denormal diagonal element
    results = []
    for device in ("cpu", "cuda"):
        codes = torch.empty(3, triangle_numel(n), dtype=torch.int16, device=device)
        diagonal = torch.empty(3, n, device=device)
        quantize_triangle(x.to(device), codes, diagonal, 2**40)
        whole = dequantize_triangle(codes, diagonal)
        results.append((codes.cpu(), diagonal.cpu(), whole.cpu()))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
