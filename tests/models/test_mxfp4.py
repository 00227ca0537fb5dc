"""MXFP4 against its definition, element by element; test_huggingface.py compares it with
`transformers`."""

import math

import pytest
import torch

from lather.models.hf.mxfp4 import dequantize_mxfp4


def by_definition(code: int, scale: int) -> float:
    """Compute E2M1 with bias 1, times E8M0 with bias 127."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
    return (-1) ** sign * magnitude * 2.0 ** (scale - 127)


@pytest.mark.parametrize("scale", [0, 1, 13, 126, 127, 128, 200, 252])
def test_every_byte_at_scales_over_the_whole_range(scale: int) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    scales = torch.full((2, 8), scale, dtype=torch.uint8)
    actual = dequantize_mxfp4(blocks, scales)
    expected = [
        by_definition(code, scale) for byte in range(256) for code in (byte & 15, byte >> 4)
    ]
    assert actual.shape == (2, 256)
    assert actual.flatten().tolist() == expected
    assert actual.bfloat16().flatten().tolist() == expected


def test_each_block_has_its_own_scale_and_255_is_not_a_number() -> None:
    blocks = torch.full((1, 3, 16), 0x22, dtype=torch.uint8)
    values = dequantize_mxfp4(blocks, torch.tensor([[127, 130, 255]], dtype=torch.uint8))
    assert values[0, :32].eq(1).all()
    assert values[0, 32:64].eq(8).all()
    assert all(math.isnan(value) for value in values[0, 64:].tolist())


def test_no_rows() -> None:
    assert dequantize_mxfp4(
        torch.zeros(0, 2, 16, dtype=torch.uint8), torch.zeros(0, 2, dtype=torch.uint8)
    ).shape == (0, 64)
