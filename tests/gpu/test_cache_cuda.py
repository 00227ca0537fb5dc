"""The key-value cache on a CUDA device against a pass over all tokens on the CPU, in fp64."""

from __future__ import annotations

import pytest
import torch

from lather.models.families import FAMILIES
from lather.models.key_value_cache import KeyValueCache
from models.tiny import error, random_tokens, tiny_family_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-10}


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_rows_of_different_lengths_in_pieces(model_type: str, dtype: torch.dtype) -> None:
    model, tokens_BS = tiny_family_model(model_type).double(), random_tokens(3, 40)
    padding = [0, 7, 20]
    alone = [
        model(tokens_BS[row : row + 1, more:]).logits_BSV[0] for row, more in enumerate(padding)
    ]
    model = model.to("cuda", dtype)
    cache = KeyValueCache(torch.tensor(padding, device="cuda"))
    pieces = tokens_BS.cuda().split([25, 13, 1, 1], dim=1)
    found = torch.cat([model(piece, cache=cache).logits_BSV for piece in pieces], dim=1)
    for row, more in enumerate(padding):
        assert error(found[row, more:].double().cpu(), alone[row]) < TOLERANCE[dtype]
