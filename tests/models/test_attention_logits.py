"""The largest attention logits, against all products of queries and keys and a mask that is built
from the words of the documentation; the factors of QK-clip, against the logits that follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lather.models import attention, attention_logits, latent_attention
from lather.models.attention import GroupedQueryAttention, HeadSizes
from lather.models.attention_logits import largest_products, measured_layers
from lather.models.decoder import Decoder
from lather.models.latent_attention import MultiHeadLatentAttention
from lather.models.layers import RMSNorm
from lather.models.rotary import Rotary
from lather.models.token_positions import SequenceLayout
from models.tiny import FAMILY_TABLES, random_normal, random_tokens, tiny_family_model

LENGTH = 11
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILY_TABLES),
    ("deepseek_v2", {"q_lora_rank": 9}),
    ("gpt_oss", {"num_key_value_heads": 6}),
]


def largest_of_mask(logits_BHST: Tensor, seen_BST: Tensor) -> Tensor:
    return logits_BHST.masked_fill(~seen_BST.unsqueeze(1), -torch.inf).amax((0, 2, 3))


def seen_by(documents_BS: Tensor, padding_BS: Tensor, window: int | None) -> Tensor:
    """Return which tokens (dim 1) see which (dim 2), token by token."""
    batch, length = documents_BS.shape
    seen = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        for query in range(length):
            for key in range(query + 1):
                near = window is None or query - key < window
                same = documents_BS[b, query] == documents_BS[b, key]
                seen[b, query, key] = near and same and not padding_BS[b, query]
    return seen


@pytest.mark.parametrize("block", [1, 10**9])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_largest_logit_is_that_of_all_products(
    block: int, window: int | None, packed: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_logits, "BLOCK_LOGITS", block)
    q, k = random_normal(2, 6, LENGTH, 5), random_normal(2, 2, LENGTH, 5, seed=1)
    documents_BS = torch.zeros(2, LENGTH, dtype=torch.long)
    padding_BS = torch.zeros(2, LENGTH, dtype=torch.bool)
    if packed:
        documents_BS[0, 3:], documents_BS[1, 8:] = 1, 1
    if padded:
        padding_BS[1, 9:] = True
    bounds = torch.tensor([0, 3, LENGTH, LENGTH + 8, 2 * LENGTH]) if packed else None
    layout = SequenceLayout(2, LENGTH, q.device, bounds).with_padding(padding_BS)
    expected = largest_of_mask(
        q @ k.repeat_interleave(3, 1).mT, seen_by(documents_BS, padding_BS, window)
    )
    first_BS = layout.first_keys(window)
    assert (first_BS is None) == (not packed and not padded and window in (None, 50))
    actual = largest_products(q, k, first_BS, window)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=0)


def measure(model: Decoder, tokens_BS: Tensor) -> dict[str, Tensor]:
    layers = measured_layers(model)
    for layer in layers.values():
        layer.largest_H = torch.full((layer.num_heads,), -torch.inf, dtype=torch.float64)
    with torch.no_grad():
        model(tokens_BS)
    return {name: layer.largest_H for name, layer in layers.items() if layer.largest_H is not None}


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_model_measures_what_its_attention_gets(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_family_model(family, **changes).double()
    attend, expected = attention.attend, []

    def spy(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, **options: Any) -> Tensor:
        scale = options.get("scale") or q.shape[-1] ** -0.5
        logits = scale * torch.einsum(
            "bshn,bthn->bhst", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        )
        zeros = torch.zeros(2, LENGTH, dtype=torch.long)
        seen = seen_by(zeros, zeros.bool(), options.get("window"))
        expected.append(largest_of_mask(logits, seen))
        return attend(q, k, v, layout, **options)

    for module in (attention, latent_attention):
        monkeypatch.setattr(module, "attend", spy)
    measured = measure(model, random_tokens(2, LENGTH))
    for actual, logits in zip(measured.values(), expected, strict=True):
        torch.testing.assert_close(actual, logits, rtol=1e-13, atol=0)


def capture(model: Decoder, tokens_BS: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return queries, keys and values of the first layer."""
    attend, captured = attention.attend, []

    def spy(*heads: Any, **options: Any) -> Tensor:
        captured.extend(heads[:3])
        return attend(*heads, **options)

    with monkeypatch.context() as patched, torch.no_grad():
        for module in (attention, latent_attention):
            patched.setattr(module, "attend", spy)
        model(tokens_BS)
    return captured[:3]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_factors_scale_each_head_s_logits_by_its_gamma_and_no_value(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gammas differ; in one of the groups all are below 1. Of families that normalize queries
    and keys there are none."""
    model, tokens = tiny_family_model(family, **changes).double(), random_tokens(2, LENGTH)
    name, layer = next(iter(measured_layers(model).items()))
    gamma_H = torch.tensor([0.5, 0.9, 0.25, 1.0, 0.01, 1.0, 0.7, 0.6][: layer.num_heads]).double()
    factors = layer.clip_factors(gamma_H)
    normalizes = isinstance(layer, GroupedQueryAttention) and isinstance(layer.q_norm, RMSNorm)
    assert (not factors) == normalizes
    if not factors:
        return
    before, (_, k_BTGN, v_BTGU) = measure(model, tokens)[name], capture(model, tokens, monkeypatch)
    for projection, factor_X in factors.items():
        assert (factor_X <= 1).all()
        for p in layer.get_submodule(projection).parameters():
            p.detach().mul_(factor_X.view(-1, *[1] * (p.dim() - 1)))
    torch.testing.assert_close(measure(model, tokens)[name], gamma_H * before, rtol=1e-13, atol=0)
    _, clipped_BTGN, values_BTGU = capture(model, tokens, monkeypatch)
    assert torch.equal(values_BTGU, v_BTGU)
    if isinstance(layer, MultiHeadLatentAttention):
        ratio_H, width = gamma_H.sqrt(), layer.nope
        assert torch.equal(clipped_BTGN[..., width:], k_BTGN[..., width:])  # heads share it
    else:
        ratio_H = gamma_H.unflatten(0, (k_BTGN.shape[2], -1)).amax(1).sqrt()
        width = k_BTGN.shape[-1]
    expected = ratio_H[:, None] * k_BTGN[..., :width]
    torch.testing.assert_close(clipped_BTGN[..., :width], expected, rtol=1e-13, atol=1e-14)


def test_gates_are_not_scaled() -> None:
    sizes = HeadSizes(hidden_size=6, num_heads=4, num_kv_heads=2, head_dim=4)
    layer = GroupedQueryAttention(sizes, Rotary(2, 1e4), gate=True)
    gamma_H = torch.tensor([0.25, 0.16, 1.0, 0.5])
    query_Hx = layer.clip_factors(gamma_H)["q_proj"].unflatten(0, (4, 8))
    torch.testing.assert_close(
        query_Hx[:, :4], torch.tensor([0.5, 0.32, 1.0, 0.5])[:, None].expand(4, 4)
    )
    assert (query_Hx[:, 4:] == 1).all()


def test_infinite_logits_of_all_heads_of_a_key_give_factors_of_0() -> None:
    sizes = HeadSizes(hidden_size=6, num_heads=4, num_kv_heads=2, head_dim=4)
    factors = GroupedQueryAttention(sizes, Rotary(2, 1e4)).clip_factors(
        torch.tensor([0.0, 0.0, 1.0, 0.0])
    )
    assert factors["q_proj"].unflatten(0, (4, 4))[:, 0].tolist() == [0, 0, 1, 0]
    assert factors["k_proj"].unflatten(0, (2, 4))[:, 0].tolist() == [0, 1]
