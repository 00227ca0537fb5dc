"""The MoE block in every memory mode against a loop over tokens and experts in fp64; experts spread
over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.gated_mlp import MEMORY_MODES, GatedMLP
from lather.models.layers import Linear
from lather.models.moe import MoE
from lather.models.routing import Router
from lather.models.saving.recomputed import Recomputation
from lather.models.token_positions import SequenceLayout
from models.tiny import error, gradients, largest_error, layout_of, random_normal

D, E, F_EXPERT, F_SHARED, EPS = 8, 5, 3, 6, 1e-3


@dataclass(frozen=True)
class Case:
    """A way of routing; `favor[e]` is the part of expert e's score that all tokens share."""

    favor: tuple[float, ...] = (0.0,) * E
    k: int = 2
    norm_topk_prob: bool = False
    shared: bool = True
    gates_shared: bool = False
    tokens: int = 13

    def block(self, memory: str = "saved") -> Block:
        normalize = self.norm_topk_prob and self.k > 1
        router = Router(D, E, self.k, normalize=normalize, scale=1.0 if normalize else 1.7)
        shared = GatedMLP(D, F_SHARED) if self.shared else None
        experts = Experts(E, D, F_EXPERT)
        moe = MoE(router, experts, shared, gates_shared_experts=self.gates_shared)
        block = Block(NoAttention(), moe, D, EPS).double()
        generator = torch.Generator().manual_seed(0)
        for p in block.parameters():
            nn.init.normal_(p, std=0.5, generator=generator)
        nn.init.uniform_(block.post_attention_layernorm.weight, 0.5, 1.5, generator=generator)
        with torch.no_grad():
            router.weight[:, 0] = torch.tensor(self.favor)
        for module in block.modules():
            if isinstance(module, Experts | GatedMLP | Linear):
                module.memory = memory
        return block

    def inputs(self) -> Tensor:
        x_BSD = random_normal(1, self.tokens, D, seed=1)
        x_BSD[..., 0] = 2
        return x_BSD.requires_grad_()


ALL_TO_ONE_NONE_TO_TWO = (9.0, 0.0, 0.0, -9.0, -9.0)
CASES = {
    "mixed": Case(),
    "all to one, none to two": Case(ALL_TO_ONE_NONE_TO_TWO),
    "all to one, none to two, normalized": Case(ALL_TO_ONE_NONE_TO_TWO, norm_topk_prob=True),
    "normalized": Case(norm_topk_prob=True),
    "K = 1": Case(k=1),
    "K = 1, not normalized even if asked": Case(k=1, norm_topk_prob=True),
    "K = 1, one expert has everything": Case(ALL_TO_ONE_NONE_TO_TWO, k=1),
    "K = E": Case(k=E),
    "K = E, normalized": Case(k=E, norm_topk_prob=True),
    "no shared experts": Case(shared=False),
    "gated shared experts": Case(gates_shared=True),
    "one token": Case(tokens=1),
}


class NoAttention(nn.Module):
    def forward(self, x: Tensor, layout: SequenceLayout, recomputation: Recomputation) -> Tensor:
        return torch.zeros_like(x)


def gated(x_D: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    return down_DF @ (F.silu(gate_FD @ x_D) * (up_FD @ x_D))


def naive_block(x_BSD: Tensor, block: Block, case: Case) -> Tensor:
    """Apply the block's formula, one token and one expert at a time."""
    p = dict(block.named_parameters())
    y = []
    for x in x_BSD.flatten(0, 1):
        h = x / (x.square().mean() + EPS).sqrt() * p["post_attention_layernorm.weight"]
        scores = (p["mlp.gate.weight"] @ h).softmax(0)
        chosen = sorted(range(E), key=lambda e, scores=scores: -scores[e].item())[: case.k]
        scale = 1 / sum(scores[e] for e in chosen) if case.norm_topk_prob and case.k > 1 else 1.7
        out = x
        for e in chosen:
            gate, up = p["mlp.experts.gate_up_proj"][e].split(F_EXPERT)
            out = out + scores[e] * scale * gated(h, gate, up, p["mlp.experts.down_proj"][e])
        if case.shared:
            names = (f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))
            factor = (
                1 / (1 + (-p["mlp.shared_expert_gate.weight"][0] @ h).exp())
                if case.gates_shared
                else 1
            )
            out = out + factor * gated(h, *(p[name] for name in names))
        y.append(out)
    return torch.stack(y).view_as(x_BSD)


def gradients_of(y: Tensor, x: Tensor, block: Block) -> dict[str, Tensor]:
    x.grad = None
    block.zero_grad()
    (y * random_normal(*y.shape, seed=2)).sum().backward()
    # not read, as there is no attention
    block.input_layernorm.weight.grad = torch.zeros_like(block.input_layernorm.weight)
    assert x.grad is not None
    return {"x": x.grad, **gradients(block)}


@pytest.mark.parametrize("memory", MEMORY_MODES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_block_is_the_loop_over_tokens_and_experts(case: Case, memory: str) -> None:
    block, x = case.block(memory), case.inputs()
    actual, _ = block(x, layout_of(x))
    expected = naive_block(x, block, case)
    assert error(actual, expected) < 1e-13
    gradients = gradients_of(actual, x, block), gradients_of(expected, x, block)
    assert largest_error(*gradients) < (1e-12, "")


def test_the_cases_route_as_they_say() -> None:
    counts = {
        name: case.block()(case.inputs(), layout_of(case.inputs()))[1].count_E.tolist()
        for name, case in CASES.items()
    }
    assert max(counts["mixed"]) > min(counts["mixed"]) > 0
    assert counts["all to one, none to two"][0] == 13
    assert counts["all to one, none to two"][3:] == [0, 0]
    assert counts["K = 1, one expert has everything"] == [13, 0, 0, 0, 0]
    assert counts["K = E"] == [13] * E
    assert all(sum(counts[name]) == case.tokens * case.k for name, case in CASES.items())


@pytest.mark.parametrize("memory", MEMORY_MODES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_an_empty_batch_works_forward_and_backward(shape: tuple[int, int], memory: str) -> None:
    block, x = Case().block(memory), torch.zeros(*shape, D, dtype=torch.float64, requires_grad=True)
    y, routing = block(x, layout_of(x))
    assert y.shape == x.shape
    assert routing.balance_loss == 0
    (y.sum() + routing.balance_loss).backward()
    assert not any(p.grad.any() for p in block.parameters() if p.grad is not None)


def test_descending_the_balance_loss_spreads_the_tokens() -> None:
    case = Case((0.8, 0, 0, 0, -0.8), tokens=200)
    block, x = case.block(), case.inputs()
    before = block(x, layout_of(x))[1].count_E
    for _ in range(20):
        block.zero_grad()
        block(x, layout_of(x))[1].balance_loss.backward()
        with torch.no_grad():
            block.mlp.gate.weight -= 0.3 * block.mlp.gate.weight.grad
    assert block(x, layout_of(x))[1].count_E.double().std() < before.double().std() / 2


@pytest.mark.parametrize("shape", [(7, D), (2, 3, D), (0, D)], ids=str)
def test_a_call_of_the_layer_alone_is_the_blocks_feed_forward(shape: tuple[int, ...]) -> None:
    """Fresh weights are finite and not all alike."""
    torch.manual_seed(0)
    moe = MoE(Router(D, E, 2), Experts(E, D, F_EXPERT, bias=True), GatedMLP(D, F_SHARED)).double()
    assert all(p.isfinite().all() for p in moe.parameters())
    x = random_normal(*shape)
    y, routing = moe(x)
    parts = moe.experts.reference_forward(
        x.view(-1, D), routing.experts_TK, routing.weights_TK
    ) + moe.shared_experts(x.view(-1, D))
    assert y.shape == shape
    assert error(y.view(-1, D), parts) < 1e-13
    assert not len(y) or y.std() > 1e-3


# --- experts spread over ranks --------------------------------------------------------------------


def part_of(experts: Experts, start: int, stop: int) -> Experts:
    """Make experts `start` to `stop` with views of the whole's weights, so that gradients arrive
    there."""
    part = Experts(stop - start, D, F_EXPERT)
    part.memory = experts.memory
    for name in ("gate_up_proj", "down_proj"):
        delattr(part, name)
        setattr(part, name, getattr(experts, name)[start:stop])
    return part


def on_two_ranks(
    experts: Experts, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, list[int]]:
    """Run both ranks of an exchange in a process: each gets every token that has an expert there
    once, and returns a partial sum. Return the sums, and the numbers of tokens of the ranks."""
    y_TD, received = torch.zeros_like(x_TD), []
    for start, stop in ((0, 2), (2, E)):
        is_local_TK = (experts_TK >= start) & (experts_TK < stop)
        token_R = is_local_TK.any(1).nonzero().flatten()
        local_RK = torch.where(is_local_TK, experts_TK - start, -1)[token_R]
        part = part_of(experts, start, stop)
        y_TD = y_TD.index_add(0, token_R, part(x_TD[token_R], local_RK, weights_TK[token_R]))
        received.append(len(token_R))
    return y_TD, received


@pytest.mark.parametrize("memory", MEMORY_MODES)
@pytest.mark.parametrize("name", ["mixed", "all to one, none to two", "K = E", "K = 1"])
def test_partial_sums_of_two_ranks_are_the_whole(name: str, memory: str) -> None:
    case = CASES[name]
    block = case.block(memory)
    assert isinstance(block.mlp, MoE)
    moe, x = block.mlp, random_normal(case.tokens, D, seed=7).requires_grad_()
    cotangent = random_normal(case.tokens, D, seed=8)
    parameters = [x, *moe.gate.parameters(), *moe.experts.parameters()]
    routing = moe.gate(x)
    whole = moe.experts(x, routing.experts_TK, routing.weights_TK)
    expected = torch.autograd.grad((whole * cotangent).sum(), parameters)
    routing = moe.gate(x)
    parts, received = on_two_ranks(moe.experts, x, routing.experts_TK, routing.weights_TK)
    # each token arrives once, however many of its experts are there
    assert max(received) <= case.tokens
    assert error(parts, whole) < 1e-14
    actual = torch.autograd.grad((parts * cotangent).sum(), parameters)
    for of_parts, of_whole in zip(actual, expected, strict=True):
        assert error(of_parts, of_whole) < 1e-13
