"""Matrices in FP8 with block scales: values, scales and products of the reference and of Triton's
kernels, against fp64 and each other; blocks that are zero, tiny, or not finite."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.implementations import INTERPRETER, assert_close, bits_of_fp8, is_close
from lather.device import gpu_module
from lather.kernels import block_scaled
from lather.kernels.block_scaled import (
    BLOCK,
    BlockScaled,
    grouped_product,
    multiplies_in_fp8,
    reference,
    scaled_rows,
    scaled_weights,
    unscaled_rows,
)

try:
    from lather.kernels.block_scaled import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]


SIZES = [(1, 1), (63, 200), (256, 300)]
"""Contracted size, and the other of a weight."""
COUNTS = {"uneven": [3, 0, 130, 1], "all in one": [0, 70, 0], "none": [0, 0]}


@pytest.fixture
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Have the public functions call this implementation."""

    def run(operation: Callable[..., None], *arguments: Any) -> None:
        getattr(request.param, operation.__name__)(*arguments)

    monkeypatch.setattr(block_scaled, "run", run)
    return request.param  # type: ignore[no-any-return]


EACH = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(reference, id="reference"),
        pytest.param(triton, id="triton", marks=INTERPRETER),
    ],
    indirect=True,
)
pytestmark = [
    EACH,
    pytest.mark.usefixtures("_exact_fp8"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Draw numbers whose sizes differ by decades from row to row and from block to block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    decades = [torch.randint(-3, 3, (size,), generator=generator) for size in shape[-2:]]
    return x * 10.0 ** decades[0][:, None] * 10.0 ** decades[1].div(BLOCK, rounding_mode="floor")


def outliers(x: Tensor) -> Tensor:
    """Multiply one element of each block of rows by 1,000 to 30,000, in turn."""
    x = x.clone()
    for block, start in enumerate(range(0, x.shape[-1], BLOCK)):
        x[..., start + 5 if start + 5 < x.shape[-1] else start] *= 1e3 * 30.0 ** (block % 2)
    return x


def dense(scaled: BlockScaled) -> Tensor:
    """Return the numbers that values and scales stand for, in fp64."""
    scales = scaled.scales.double()
    for dim in range(1, scales.dim()):
        size = scaled.values.shape[dim]
        scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return scaled.values.double() * scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (70, 63), (33, 128), (5, 300)], ids=str)
def test_rows_are_within_a_sixteenth_and_have_the_bits_of_the_definition(
    implementation: ModuleType, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = drawn(*shape).to(dtype)
    scaled = scaled_rows(x)
    for start in range(0, shape[1], BLOCK):
        inside = slice(start, start + BLOCK)
        block = x[:, inside].float()
        scale = block.abs().amax(1) / 448
        assert scaled.scales[:, start // BLOCK].equal(scale)
        expected = (block / scale[:, None]).to(reference.DTYPE).float()
        assert scaled.values[:, inside].float().equal(expected)
    error = (dense(scaled) - x.double()).abs()
    subnormal = 2.0**-10 * scaled.scales.repeat_interleave(BLOCK, 1)[:, : shape[1]].double()
    assert (error <= x.double().abs() / 16 + subnormal).all()


@pytest.mark.parametrize("shape", [(2, 1, 1), (3, 200, 63), (1, 128, 256), (2, 129, 300)], ids=str)
def test_weights_have_square_blocks(implementation: ModuleType, shape: tuple[int, ...]) -> None:
    weight = torch.stack([drawn(*shape[1:], seed=seed) for seed in range(shape[0])]).bfloat16()
    scaled = scaled_weights(weight)
    for o in range(scaled.scales.shape[1]):
        for i in range(scaled.scales.shape[2]):
            inside = (
                slice(None),
                slice(o * BLOCK, (o + 1) * BLOCK),
                slice(i * BLOCK, (i + 1) * BLOCK),
            )
            block = weight[inside].float()
            scale = block.abs().amax((1, 2)) / 448
            assert scaled.scales[:, o, i].equal(scale)
            expected = (block / scale[:, None, None]).to(reference.DTYPE)
            assert scaled.values[inside].float().equal(expected.float())


def test_the_blocks_of_a_weight_are_those_of_its_transpose(implementation: ModuleType) -> None:
    weight = drawn(200, 300)[None].bfloat16()
    scaled, other = scaled_weights(weight), scaled_weights(weight.mT)
    assert all(
        a.equal(b.mT) for a, b in zip(map(dense, [scaled]), map(dense, [other]), strict=True)
    )


def test_zero_tiny_and_infinite_blocks(implementation: ModuleType) -> None:
    x = torch.ones(6, 300)
    x[0], x[1, 130], x[2, 7], x[3, 299], x[4] = 0, torch.nan, torch.inf, -torch.inf, 1e-39
    x[5, :BLOCK] = torch.finfo(torch.float32).max
    scaled = scaled_rows(x)
    found = dense(scaled)
    assert scaled.scales[0].eq(2.0**-126).all()
    assert found[0].eq(0).all()
    nan = torch.zeros(6, 3, dtype=torch.bool)
    nan[1, 1] = nan[2, 0] = nan[3, 2] = True
    assert found.isnan().equal(nan.repeat_interleave(BLOCK, 1)[:, :300])
    assert (found[4] - 1e-39).abs().max() <= 2.0**-126 / 16
    assert found[5].isfinite().all()
    weight = torch.ones(2, 300, 200).bfloat16()
    weight[0, 140, 3], weight[1] = torch.inf, 0
    found = dense(scaled_weights(weight))
    assert found[0, BLOCK : 2 * BLOCK, :BLOCK].isnan().all()
    assert found.isnan().sum() == BLOCK**2
    assert found[1].eq(0).all()


@pytest.mark.parametrize("numbered", [False, True])
def test_rows_are_read_again(implementation: ModuleType, numbered: bool) -> None:
    rows = scaled_rows(drawn(50, 300))
    row_G = torch.tensor([3, -1, 49, 0, 3, 7]) if numbered else None
    expected = dense(rows)
    if row_G is not None:
        expected = torch.where((row_G >= 0)[:, None], expected[row_G], 0)
    assert_close(unscaled_rows(rows, row_G, torch.float32), expected, torch.float32)
    assert_close(unscaled_rows(rows, row_G, torch.bfloat16), expected, torch.bfloat16)


class Product:
    """A product of random rows of experts, of which those of no expert are NaN."""

    def __init__(self, counts: list[int], sizes: tuple[int, int], transposed: bool) -> None:
        contracted, columns = sizes
        shape = (contracted, columns) if transposed else (columns, contracted)
        self.counts, self.transposed = counts, transposed
        self.end_E = torch.tensor(counts).cumsum(0).to(torch.int32)
        used = sum(counts)
        x = outliers(drawn(used + 5, contracted))
        x[used:] = torch.nan
        self.weight = torch.stack([drawn(*shape, seed=seed) for seed in range(len(counts))])
        self.rows, self.weights = scaled_rows(x), scaled_weights(self.weight)

    def run(self, row_G: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        rows, weights = self.rows, self.weights
        return grouped_product(rows, row_G, weights, self.end_E, dtype, transposed=self.transposed)

    def expected(self, row_G: Tensor | None = None) -> Tensor:
        x = dense(self.rows)
        if row_G is not None:
            x = torch.where((row_G >= 0)[:, None], x[row_G], 0)
        weight = dense(self.weights)
        pieces = zip(x[: sum(self.counts)].split(self.counts), weight, strict=True)
        return torch.cat([x @ (w if self.transposed else w.mT) for x, w in pieces])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_products_are_those_of_the_numbers_that_they_read(
    implementation: ModuleType, counts: str, sizes: tuple[int, int], transposed: bool
) -> None:
    """An error of 1 % would be seen. Results of rows without an expert are not written, so they
    are the NaN with which fresh memory is filled."""
    case = Product(COUNTS[counts], sizes, transposed)
    found, used = case.run(), sum(case.counts)
    for rows, expected in zip(found[:used], case.expected(), strict=True):
        assert_close(rows, expected, torch.float32)
    assert found[used:].isnan().all()
    assert is_close(case.run(dtype=torch.bfloat16)[:used], case.expected(), torch.bfloat16)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_looked_up_by_number(implementation: ModuleType, transposed: bool) -> None:
    case = Product([3, 0, 140], (300, 200), transposed)
    row_G = torch.randint(0, 143, (150,), generator=torch.Generator().manual_seed(3))
    row_G[[1, 50]] = -1
    found = case.run(row_G)
    assert_close(found[:143], case.expected(row_G), torch.float32)
    assert found[[1, 50]].eq(0).all()
    assert found[143:].isnan().all()


def test_nan_reaches_the_rows_and_columns_of_its_blocks_and_no_others(
    implementation: ModuleType,
) -> None:
    case = Product([4, 9], (300, 200), False)
    finite = case.run()[:13]
    case.rows.values[2, 140], case.rows.scales[2, 1] = torch.nan, torch.nan
    case.weights.values[1, BLOCK:] = torch.nan
    found = case.run()[:13]
    is_nan = torch.zeros(13, 200, dtype=torch.bool)
    is_nan[2], is_nan[4:, BLOCK:] = True, True
    assert found.isnan().equal(is_nan)
    assert found[~is_nan].equal(finite[~is_nan])


def with_one_scale(x: Tensor) -> Tensor:
    """Round a tensor to e4m3 with one scale: what block scales are to be better than."""
    scale = x.abs().max() / 448
    return (x / scale).to(reference.DTYPE).double() * scale


def test_one_scale_for_a_tensor_loses_what_block_scales_keep(implementation: ModuleType) -> None:
    """Each block has an outlier, and one row is 1,000 times as large as the others. The error of
    the product of every row is within 5 % of its norm with block scales, and not with one."""
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    x[:, 5::BLOCK] *= 30
    x[7] *= 1e5
    weight = torch.randn(1, 256, 512, generator=torch.Generator().manual_seed(1))
    weight[:, :, BLOCK:] *= 100
    weight = weight.bfloat16().float()
    exact = x.double() @ weight[0].double().mT
    end_E = torch.tensor([40], dtype=torch.int32)
    found = grouped_product(
        scaled_rows(x), None, scaled_weights(weight), end_E, torch.float32
    ).double()
    control = with_one_scale(x) @ with_one_scale(weight[0]).mT

    def worst(product: Tensor) -> float:
        return float(((product - exact).norm(dim=1) / exact.norm(dim=1)).max())

    assert worst(found) < 0.05
    assert worst(control) > 0.5


@INTERPRETER
def test_both_implementations_have_the_same_bits_of_values_and_scales(
    implementation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = outliers(drawn(70, 300)).bfloat16()
    x[3], x[4, 5], x[5, 200] = 0, torch.nan, -torch.inf
    weight = torch.stack([outliers(drawn(200, 300, seed=seed)) for seed in (1, 2)]).bfloat16()
    found = [scaled_rows(x), scaled_weights(weight)]
    monkeypatch.undo()
    for ours, expected in zip(found, [scaled_rows(x), scaled_weights(weight)], strict=True):
        pairs = zip(bits_of_fp8(ours), bits_of_fp8(expected), strict=True)
        assert all(a.equal(b) for a, b in pairs)


def test_gpus_multiply_in_fp8_from_compute_capability_8_9_on(
    implementation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert multiplies_in_fp8(torch.device("cpu"))
    module: Any = gpu_module(torch.device("cuda"))
    for capability, holds in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(module, "get_device_capability", lambda _, c=capability: c)
        assert multiplies_in_fp8(torch.device("cuda")) == holds
    assert not multiplies_in_fp8(torch.device("xpu"))
    monkeypatch.setattr(block_scaled, "HAS_TRITON", False)
    assert not multiplies_in_fp8(torch.device("cuda"))
    monkeypatch.setattr(block_scaled, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not multiplies_in_fp8(torch.device("cuda"))
