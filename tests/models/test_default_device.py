"""torch's default device decides nothing in a model on the CPU, nor when its weights are read."""

from pathlib import Path

import pytest
import torch

from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import load_hugging_face
from models.tiny import FAMILY_SIZES, random_tokens, tiny_family_config, tiny_family_model


@pytest.mark.parametrize("family", FAMILY_SIZES)
def test_passes_and_weights_are_the_same_on_any_default_device(family: str, tmp_path: Path) -> None:
    """On the meta device a tensor that is made without a device has no values."""
    model, other = tiny_family_model(family), tiny_family_model(family, seed=1)
    save_hugging_face(model, tiny_family_config(family), tmp_path)
    tokens, boundaries = random_tokens(2, 9), torch.tensor([0, 4, 9, 18])
    expected = model(tokens, cu_seqlens=boundaries).logits_BSV
    torch.set_default_device("meta")
    try:
        load_hugging_face(tmp_path, other)
        found = other(tokens, cu_seqlens=boundaries).logits_BSV
        found.square().mean().backward()
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, expected)
    assert all(p.grad is None or p.grad.isfinite().all() for p in other.parameters())
