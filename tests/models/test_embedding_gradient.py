"""The embedding's gradient in tiles of rows has the bits of `F.embedding`, and the memory of a
tile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.live_bytes import PeakBytes
from lather.models.saving import embedding_gradient
from lather.models.saving.embedding_gradient import look_up


@pytest.mark.parametrize("tile", [1, 7 * 64, 2**25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_have_the_bits_of_the_whole_gradient(
    tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_gradient, "TILE_ELEMENTS", tile)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(500, 64, generator=generator).to(dtype)
    batches = [torch.randint(0, 500, (3, 63), generator=generator) for _ in range(3)]
    batches[1][0, :40] = 499  # the last row, many times
    scale = torch.randn(3, 63, 64, generator=generator).to(dtype)

    def gradient_of(rows_of: object) -> tuple[Tensor, int]:
        weight = nn.Parameter(table.clone())
        for tokens in batches:
            x = look_up(weight, tokens) if rows_of is look_up else F.embedding(tokens, weight)
            with PeakBytes() as peak:
                (x * scale).sum().backward()
        assert weight.grad is not None
        return weight.grad, peak.bytes

    (actual, few), (expected, many) = gradient_of(look_up), gradient_of(F.embedding)
    assert torch.equal(actual, expected)
    assert not torch.allclose(actual.float(), 1.01 * expected.float(), rtol=1e-3)
    if tile == 7 * 64:
        assert many - few > 0.6 * actual.nbytes


def test_a_frozen_table_gets_no_gradient() -> None:
    weight = nn.Parameter(torch.randn(5, 3), requires_grad=False)
    assert not look_up(weight, torch.tensor([1, 4])).requires_grad
