"""RMSNorm against its formula in fp64."""

from __future__ import annotations

import math

import torch

from lather.models.layers import RMSNorm
from models.tiny import error, random_normal


def test_rms_norm_is_its_formula() -> None:
    norm = RMSNorm(5, eps=0.3).double()
    torch.nn.init.uniform_(norm.weight, -2, 2, generator=torch.Generator().manual_seed(0))
    x = random_normal(2, 3, 5)
    expected = torch.stack([row / math.sqrt((row @ row).item() / 5 + 0.3) for row in x.view(6, 5)]).view(2, 3, 5) * norm.weight
    assert error(norm(x), expected) < 1e-14


def test_rms_norm_squares_in_fp32() -> None:
    """1000^2 is beyond fp16."""
    normed = RMSNorm(4, eps=1e-6).half()(torch.tensor([[1000.0, -1000.0, 1000.0, 1000.0]], dtype=torch.float16))
    assert normed.dtype == torch.float16
    assert normed.tolist() == [[1, -1, 1, 1]]
