"""Every option of grouped-query attention against a softmax of plain products, in fp64; the
published layers of transformers; what is kept for backward; the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lather.models.attention import GroupedQueryAttention, HeadSizes, QueryKeyNorm
from lather.models.key_value_cache import KeyValueCache
from lather.models.rotary import Llama3RopeConfig, Rotary
from lather.models.saving.recomputed import Recomputation
from lather.models.token_positions import SequenceLayout
from models.tiny import error, random_normal

CPU = torch.device("cpu")
B, S, D, H, G, N = 2, 7, 12, 6, 2, 10
SIZES = HeadSizes(hidden_size=D, num_heads=H, num_kv_heads=G, head_dim=N)
EPS = 1e-3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary of a part": {"size": 4},
    "rotary of neighbors": {"interleaved": True},
    "rotary of neighbors in a part": {"interleaved": True, "size": 6},
    "biases": {"bias": True},
    "all biases": {"bias": True, "output_bias": True},
    "norm by head": {"qk_norm": QueryKeyNorm(EPS)},
    "zero-centered norm": {"qk_norm": QueryKeyNorm(EPS, zero_centered=True)},
    "norm over heads": {"qk_norm": QueryKeyNorm(EPS, over_all_heads=True), "size": 4},
    "gate": {"gate": True, "bias": True},
    "gate, norm, window": {
        "gate": True,
        "qk_norm": QueryKeyNorm(EPS, zero_centered=True),
        "window": 3,
        "size": 6,
    },
    "gate, sinks": {"gate": True, "sinks": True},
}


def attention_with(options: dict[str, Any]) -> GroupedQueryAttention:
    options = dict(options)
    rotary = Rotary(options.pop("size", N), 50.0, interleaved=options.pop("interleaved", False))
    attention = GroupedQueryAttention(SIZES, rotary, **options).double()
    for number, p in enumerate(attention.parameters()):
        nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(number))
    return attention


def plain_norm(x: Tensor, norm: nn.Module) -> Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return normed * (norm.weight + 1 if norm.zero_centered else norm.weight)


def plain_rotation(x_BSHN: Tensor, rotary: Rotary) -> Tensor:
    """Multiply pairs, as complex numbers, by powers of e^i."""
    pairs = torch.arange(rotary.size // 2)
    left, right = (
        (2 * pairs, 2 * pairs + 1) if rotary.interleaved else (pairs, pairs + rotary.size // 2)
    )
    angles_SP = torch.outer(torch.arange(S), 50.0 ** (-2 * pairs.double() / rotary.size))
    turned = (
        torch.complex(x_BSHN[..., left], x_BSHN[..., right]) * torch.exp(1j * angles_SP)[:, None]
    )
    y_BSHN = x_BSHN.clone()
    y_BSHN[..., left], y_BSHN[..., right] = turned.real, turned.imag
    return y_BSHN


def plain_attention(attention: GroupedQueryAttention, x_BSD: Tensor, norm_of: str = "") -> Tensor:
    q, k, v = (getattr(attention, f"{name}_proj") for name in "qkv")
    q_BSx, k_BSGN = nn.functional.linear(x_BSD, q.weight, q.bias), x_BSD @ k.weight.T
    v_BSGN = x_BSD @ v.weight.T
    if k.bias is not None:
        k_BSGN, v_BSGN = k_BSGN + k.bias, v_BSGN + v.bias
    gate_BSHN = None
    if attention.gate:
        q_BSx, gate_BSHN = q_BSx.view(B, S, H, 2, N).unbind(3)
        q_BSx = q_BSx.flatten(2)
    heads = []
    for x_BSx, norm in ((q_BSx, attention.q_norm), (k_BSGN, attention.k_norm)):
        normed_BSx = plain_norm(x_BSx, norm) if norm_of == "all" else x_BSx
        x_BSHN = normed_BSx.unflatten(-1, (-1, N))
        if norm_of == "head":
            x_BSHN = plain_norm(x_BSHN, norm)
        heads.append(plain_rotation(x_BSHN, attention.rotary))
    q_BSHN, k_BSGN = heads
    k_BSHN = k_BSGN.repeat_interleave(H // G, 2)
    v_BSHN = v_BSGN.unflatten(-1, (-1, N)).repeat_interleave(H // G, 2)
    scores_BHST = torch.einsum("bshn,bthn->bhst", q_BSHN, k_BSHN) / N**0.5
    distance = torch.arange(S)[:, None] - torch.arange(S)
    hidden = (distance < 0) | (distance >= (attention.window or S))
    scores_BHST = scores_BHST.masked_fill(hidden, -torch.inf)
    if attention.sinks is not None:
        sinks = attention.sinks[:, None, None].expand(B, -1, S, 1)
        scores_BHST = torch.cat((scores_BHST, sinks), -1)
    weights_BHST = scores_BHST.softmax(-1)[..., :S]
    y_BSHN = torch.einsum("bhst,bthn->bshn", weights_BHST, v_BSHN)
    if gate_BSHN is not None:
        y_BSHN = y_BSHN / (1 + torch.exp(-gate_BSHN))
    return nn.functional.linear(y_BSHN.flatten(2), attention.o_proj.weight, attention.o_proj.bias)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_its_formula_with_its_gradients(name: str) -> None:
    """Also with what backward makes again; the bits are those of a layer that keeps all."""
    attention = attention_with(OPTIONS[name])
    qk_norm = OPTIONS[name].get("qk_norm")
    norm_of = "" if qk_norm is None else "all" if qk_norm.over_all_heads else "head"
    x_BSD, weights = random_normal(B, S, D).requires_grad_(), random_normal(B, S, D, seed=8)
    leaves = [x_BSD, *attention.parameters()]
    layout = SequenceLayout(B, S, CPU)
    results = []
    for recomputation in (Recomputation(), Recomputation(enabled=False)):
        with recomputation.watch():
            y_BSD = attention(x_BSD, layout, recomputation)
        results.append((y_BSD, *torch.autograd.grad((y_BSD * weights).sum(), leaves)))
    expected = plain_attention(attention, x_BSD, norm_of)
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    for ours, kept, plain in zip(*results, (expected, *gradients), strict=True):
        assert torch.equal(ours, kept)
        assert error(ours, plain) < 1e-11


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
def test_a_cache_gives_the_same(name: str) -> None:
    attention, x_BSD = attention_with(OPTIONS[name]), random_normal(B, S, D)
    whole = attention(x_BSD, SequenceLayout(B, S, CPU))
    cache, start, parts = KeyValueCache(), 0, []
    for length in (4, 1, 2):
        layout = SequenceLayout(B, length, CPU, None, cache)
        parts.append(attention(x_BSD[:, start : start + length], layout))
        start += length
    assert error(torch.cat(parts, 1), whole) < 1e-12


def kept_bytes(options: dict[str, Any], *, enabled: bool) -> int:
    """Bytes that a layer keeps for backward."""
    from benchmarks.live_bytes import PeakBytes

    attention, x_BSD = attention_with(options), random_normal(B, S, D).requires_grad_()
    layout, recomputation = SequenceLayout(B, S, CPU), Recomputation(enabled=enabled)
    attention(x_BSD, layout)  # this makes the rotary tables
    with PeakBytes() as alive:
        with recomputation.watch():
            y_BSD = attention(x_BSD, layout, recomputation)
        kept: int = alive.now
    assert y_BSD.requires_grad
    return kept


def test_backward_makes_heads_and_gate_again() -> None:
    """Per token it keeps no rotated queries and keys; a gate adds only its own input."""
    for over_all_heads in (True, False):
        options = {"qk_norm": QueryKeyNorm(EPS, over_all_heads)}
        least, everything = (kept_bytes(options, enabled=enabled) for enabled in (True, False))
        assert everything - least >= B * S * 8 * (H + G) * N
    assert kept_bytes({**options, "gate": True}, enabled=True) - least == B * S * 8 * H * N


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    "config",
    [
        Llama3RopeConfig(),
        Llama3RopeConfig(32.0, 8192, 1.0, 4.0),
        Llama3RopeConfig(2.0, 64, 0.5, 16.0),
        Llama3RopeConfig(1.0, 300),
    ],
    ids=str,
)
def test_llama3_frequencies_are_those_of_transformers(size: int, config: Llama3RopeConfig) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    theirs = LlamaConfig(
        head_dim=size,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **fields},
        max_position_embeddings=10**6,
    )
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](theirs, CPU)
    assert factor == config.magnitude()
    assert error(Rotary(size, 5e5, config).frequencies(CPU), expected.double()) < 1e-6
