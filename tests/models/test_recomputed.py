"""Tensors that backward makes again have the same bits: the same gradients, less is kept, and hooks
outside see the rest."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from benchmarks.live_bytes import PeakBytes
from lather.models.block import Attended, Block
from lather.models.layers import Linear, RMSNorm, recomputed_norm
from lather.models.saving.recomputed import Recomputation
from models.tiny import layout_of, random_normal, tiny_family_model

FAMILIES = ["deepseek_v2", "qwen3_moe", "gpt_oss"]


def attention_of(family: str, **changes: Any) -> Block:
    block = tiny_family_model(family, **changes).double().layers[0]
    assert isinstance(block, Block)
    return block


def run(block: Block, x_BSD: Tensor, *, enabled: bool) -> Tensor:
    recomputation = Recomputation(enabled=enabled)
    with recomputation.watch():
        return block.self_attn(
            recomputed_norm(block.input_layernorm, x_BSD, recomputation)[1],
            layout_of(x_BSD),
            recomputation,
        )


def gradients(block: Block, y_BSD: Tensor, x_BSD: Tensor) -> list[Tensor]:
    used = [*block.self_attn.parameters(), *block.input_layernorm.parameters()]
    for p in (*used, x_BSD):
        p.grad = None
    (y_BSD.double() * random_normal(*y_BSD.shape, seed=3)).sum().backward()
    return [p.grad for p in (*used, x_BSD) if p.grad is not None]


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 9}], ids=["plain", "q latent"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp64", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_have_the_bits_of_kept_tensors(
    family: str, autocast: bool, changes: dict[str, Any]
) -> None:
    block = attention_of(family, **(changes if family == "deepseek_v2" else {}))
    if autocast:
        block.float()
    x_BSD = random_normal(2, 7, 24).to(next(block.parameters()).dtype).requires_grad_()
    results = []
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y_BSD = run(block, x_BSD, enabled=enabled)
        # backward runs outside autocast, as everybody does it
        results.append([y_BSD, *gradients(block, y_BSD, x_BSD)])
    assert len(results[0]) == len(results[1]) >= 6
    for recomputed, saved in zip(*results, strict=True):
        assert recomputed.equal(saved)
        assert saved.abs().max() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_less_is_kept(family: str) -> None:
    """Latent attention then does not keep keys, values and the norms' outputs; norms on heads not
    queries and keys; no family o_proj's input."""
    block = attention_of(family)
    x_BSD = random_normal(2, 70, 24).requires_grad_()
    num_bytes = []
    run(block, x_BSD, enabled=False)
    for enabled in (True, False):
        with PeakBytes() as alive:
            y_BSD = run(block, x_BSD, enabled=enabled)
            num_bytes.append(alive.now)
        del y_BSD
    token = 2 * 70 * 8
    heads = {"deepseek_v2": 2 * 3 * 16 + 3 * 7, "qwen3_moe": (6 + 2) * 10, "gpt_oss": 0}[family]
    assert num_bytes[1] - num_bytes[0] >= token * (heads + 24)


class Product(nn.Module):
    """A module with a norm whose output two products keep."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = RMSNorm(6, 1e-6), Linear(6, 5), Linear(6, 4)

    def forward(self, x_TI: Tensor, *, enabled: bool = True) -> Tensor:
        recomputation = Recomputation(enabled=enabled)
        with recomputation.watch():
            normed_TI = recomputed_norm(self.norm, x_TI, recomputation)[1]
            y: Tensor = self.first(normed_TI).sum() * self.second(normed_TI).sin().sum()
        return y


def test_hooks_outside_see_the_rest() -> None:
    """They see everything that is kept without recomputation, but for the norm's output; and what
    they unpack is used."""
    module, x_TI = Product(), torch.randn(3, 6, requires_grad=True)
    seen: dict[bool, list[Tensor]] = {True: [], False: []}
    for enabled, tensors in seen.items():

        def pack(x: Tensor, tensors: list[Tensor] = tensors) -> Tensor:
            tensors.append(x)
            return x.clone()

        with saved_tensors_hooks(pack, lambda x: x):
            loss = module(x_TI, enabled=enabled)
        loss.backward()
    normed_TI = module.norm(x_TI)
    assert any(x.equal(normed_TI) for x in seen[False] if x.shape == normed_TI.shape)
    assert not any(x.equal(normed_TI) for x in seen[True] if x.shape == normed_TI.shape)
    # less the two products' inputs, and plus the source of both
    assert len(seen[True]) == len(seen[False]) - 2 + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_no_normed_rows(family: str) -> None:
    """It has two norms, of which the router, the experts and the shared experts read the second.
    Its bits are those of a block that keeps all."""
    block = attention_of(family, **{"first_k_dense_replace": 0} if family == FAMILIES[0] else {})
    x_BSD = random_normal(2, 7, 24).requires_grad_()
    layout, results, kept = layout_of(x_BSD), [], []
    block(x_BSD, layout)  # this makes the rotary tables
    for recomputing in (True, False):
        with pytest.MonkeyPatch.context() as patch, PeakBytes() as alive:
            if not recomputing:
                patch.setattr(Attended, "recomputing", lambda _: nullcontext())
            y_BSD, routing = block(x_BSD, layout)
            loss = (y_BSD * random_normal(2, 7, 24, seed=3)).sum() + routing.balance_loss
            kept.append(alive.now)
        block.zero_grad()
        x_BSD.grad = None
        loss.backward()
        results.append([x_BSD.grad, *(p.grad for p in block.parameters())])
    assert kept[1] - kept[0] == 2 * 7 * 24 * 8
    for again, plain in zip(*results, strict=True):
        assert again.equal(plain)


def test_several_graphs_have_it_made_once() -> None:
    """The first graph that runs backward makes it, and it goes with the last."""
    norm, layers = RMSNorm(6, 1e-6), [Linear(6, size) for size in (5, 4, 3)]
    x_TI = torch.randn(3, 6, requires_grad=True)
    recomputation, calls = Recomputation(), []
    norm.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    with recomputation.watch():
        normed_TI = recomputed_norm(norm, x_TI, recomputation)[1]
        losses = [layers[0](normed_TI).sum()]
        again = recomputation.placeholder(normed_TI)
        assert recomputation.placeholder(x_TI) is None
    assert again is not None
    leaf_TI = normed_TI.detach().requires_grad_()
    for layer in layers[1:]:
        with again.instead_of(normed_TI):
            losses.append(layer(leaf_TI).sum())
    expected = torch.stack([normed_TI.sum(0)] * 5)
    normed_TI.untyped_storage().resize_(0)
    with PeakBytes() as alive:
        for number, loss in enumerate(losses):
            for layer in layers:
                layer.weight.grad = None
            loss.backward()
            assert layers[number].weight.grad.equal(expected[: len(layers[number].weight)])  # type: ignore[union-attr]
            assert calls == [True, False]
            for layer in layers:
                layer.weight.grad = layer.bias.grad = None
        leaf_TI.grad = x_TI.grad = norm.weight.grad = None
        assert alive.now == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_torchs_checkpointing(reentrant: bool) -> None:
    module, x_TI = Product().double(), random_normal(3, 6).requires_grad_()
    results = []
    for call in (lambda: module(x_TI), lambda: checkpoint(module, x_TI, use_reentrant=reentrant)):
        module.zero_grad()
        x_TI.grad = None
        call().backward()
        results.append([x_TI.grad, *(p.grad for p in module.parameters())])
    for plain, again in zip(*results, strict=True):
        assert plain.equal(again)


def test_backward_twice_makes_them_twice_and_without_autograd_nothing_is_registered() -> None:
    module, x_TI = Product(), torch.randn(3, 6, requires_grad=True)
    loss = module(x_TI)
    loss.backward(retain_graph=True)
    first = x_TI.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    assert x_TI.grad.equal(2 * first)  # type: ignore[union-attr]
    with torch.no_grad(), PeakBytes() as alive:
        module(torch.randn(3, 6))
        assert alive.now == 0


def test_a_first_recomputation_is_in_forward() -> None:
    """Each registration's is, once for each shape and dtype of products; it makes what backward
    makes, in the same circumstances."""
    warmed_up: set[Hashable] = set()
    calls: list[tuple[Any, ...]] = []

    def run(length: int, *, autocast: bool = False) -> None:
        x = torch.randn(length, 3, requires_grad=True)
        recomputation = Recomputation(warmed_up=warmed_up)

        def double(x: Tensor) -> tuple[Tensor]:
            enabled = torch.is_autocast_enabled("cpu")
            calls.append((tuple(x.shape), x.requires_grad, torch.is_grad_enabled(), enabled))
            return (x * 2,)

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), recomputation.watch():
            first, second = x * 2, x * 2
            for made in (first, second):
                recomputation.add((made,), double, x)
            loss = first.sin().sum() + second.sin().sum()
        in_forward = len(calls)
        loss.backward()
        assert len(calls) == in_forward + 2
        assert len(set(calls)) == 1

    for length, autocast, expected in [(4, False, 4), (4, False, 2), (5, False, 4), (4, True, 4)]:
        calls.clear()
        run(length, autocast=autocast)
        assert len(calls) == expected
