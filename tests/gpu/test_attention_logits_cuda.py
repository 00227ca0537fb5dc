"""The largest attention logits on a CUDA device, against the CPU's in fp64."""

from __future__ import annotations

import pytest
import torch

from lather.models.attention_logits import largest_products
from lather.models.token_positions import SequenceLayout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BATCH, HEADS, GROUPS, LENGTH, WIDTH = 2, 6, 2, 700, 192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_the_largest_products_are_those_of_the_cpu(
    dtype: torch.dtype, window: int | None, packed: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=draw).to(dtype)
    k = torch.randn(BATCH, GROUPS, LENGTH, WIDTH, generator=draw).to(dtype)
    bounds = torch.tensor([0, 70, 300, LENGTH, LENGTH + 9, 2 * LENGTH]) if packed else None

    def on(device: str, wide: torch.dtype) -> torch.Tensor:
        layout = SequenceLayout(BATCH, LENGTH, torch.device(device), bounds)
        operands = q.to(device, wide), k.to(device, wide)
        return largest_products(*operands, layout.first_keys(window), window).double().cpu()

    tolerance = 2e-3 if dtype == torch.float32 else 8e-3  # TF32 or bf16 products
    expected = on("cpu", torch.float64)
    torch.testing.assert_close(on("cuda", dtype), expected, rtol=tolerance, atol=0)
