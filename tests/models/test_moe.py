"""The MoE block against a loop over tokens and experts in fp64; dispatch and combine; the balance loss."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.models.decoder import Block
from lather.models.layers import GatedMLP
from lather.models.moe import Experts, MoE, Router, Routing, balance_loss, combine_rows, dispatch_rows, plan_dispatch
from models.tiny import error, gradients, largest_error, random_normal

D, E, F_EXPERT, F_SHARED, EPS = 8, 5, 3, 6, 1e-3


@dataclass(frozen=True)
class Case:
    """One way of routing; `favour[e]` is the part of expert e's score that all tokens share."""

    favour: tuple[float, ...] = (0.0,) * E
    k: int = 2
    norm_topk_prob: bool = False
    shared: bool = True
    tokens: int = 13

    def block(self) -> Block:
        router = Router(D, E, self.k, norm_topk_prob=self.norm_topk_prob, routed_scaling_factor=1.7)
        moe = MoE(router, Experts(E, D, F_EXPERT), GatedMLP(D, F_SHARED) if self.shared else None)
        block = Block(NoAttention(), moe, D, EPS).double()
        generator = torch.Generator().manual_seed(0)
        for p in block.parameters():
            nn.init.normal_(p, std=0.5, generator=generator)
        nn.init.uniform_(block.post_attention_layernorm.weight, 0.5, 1.5, generator=generator)
        with torch.no_grad():
            router.weight[:, 0] = torch.tensor(self.favour)
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
    "one token": Case(tokens=1),
}


class NoAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def gated(x_D: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    return down_DF @ (F.silu(gate_FD @ x_D) * (up_FD @ x_D))


def naive_block(x_BSD: Tensor, block: Block, case: Case) -> Tensor:
    """The block's formula, one token and one expert at a time."""
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
            out = out + gated(h, *(p[f"mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")))
        y.append(out)
    return torch.stack(y).view_as(x_BSD)


def gradients_of(y: Tensor, x: Tensor, block: Block) -> dict[str, Tensor]:
    x.grad = None
    block.zero_grad()
    (y * random_normal(*y.shape, seed=2)).sum().backward()
    block.input_layernorm.weight.grad = torch.zeros_like(block.input_layernorm.weight)  # not read: there is no attention
    assert x.grad is not None
    return {"x": x.grad, **gradients(block)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_block_is_the_loop_over_tokens_and_experts(case: Case) -> None:
    block, x = case.block(), case.inputs()
    actual, _ = block(x)
    expected = naive_block(x, block, case)
    assert error(actual, expected) < 1e-13
    assert largest_error(gradients_of(actual, x, block), gradients_of(expected, x, block)) < (1e-12, "")


def test_the_cases_route_as_they_say() -> None:
    counts = {name: case.block()(case.inputs())[1].count_E.tolist() for name, case in CASES.items()}
    assert max(counts["mixed"]) > min(counts["mixed"]) > 0
    assert counts["all to one, none to two"][0] == 13
    assert counts["all to one, none to two"][3:] == [0, 0]
    assert counts["K = 1, one expert has everything"] == [13, 0, 0, 0, 0]
    assert counts["K = E"] == [13] * E
    assert all(sum(counts[name]) == case.tokens * case.k for name, case in CASES.items())


def test_an_idle_expert_has_a_gradient_of_zeros() -> None:
    case = CASES["all to one, none to two"]
    block, x = case.block(), case.inputs()
    grads = gradients_of(block(x)[0], x, block)
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        assert [bool(grad.any()) for grad in grads[name]] == [True, True, True, False, False]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_an_empty_batch_works_forward_and_backward(shape: tuple[int, int]) -> None:
    block, x = Case().block(), torch.zeros(*shape, D, dtype=torch.float64, requires_grad=True)
    y, routing = block(x)
    assert y.shape == x.shape
    assert routing.balance_loss == 0
    (y.sum() + routing.balance_loss).backward()
    assert not any(p.grad.any() for p in block.parameters() if p.grad is not None)


def uneven_routing(tokens: int, k: int) -> Routing:
    """Experts without a token, and tokens' experts in no order."""
    favour = torch.tensor([3.0, 0.0, -9.0, 1.0, 0.0])
    experts_TK = (random_normal(tokens, E, seed=3) + favour).topk(k).indices
    count_E = experts_TK.flatten().bincount(minlength=E)
    return Routing(experts_TK, random_normal(tokens, k, seed=4), count_E, torch.zeros(()))


@pytest.mark.parametrize("k", [1, 3, E])
def test_plan_groups_rows_by_expert_with_tokens_in_their_order(k: int) -> None:
    routing = uneven_routing(7, k)
    plan = plan_dispatch(routing)
    expected = [(e, t) for e in range(E) for t in range(7) if e in routing.experts_TK[t]]
    expert_of_row = torch.arange(E).repeat_interleave(plan.count_E).tolist()
    assert list(zip(expert_of_row, plan.token_G.tolist(), strict=True)) == expected
    for t in range(7):
        assert [expected[row] for row in plan.row_TK[t]] == [(e, t) for e in routing.experts_TK[t].tolist()]


@pytest.mark.parametrize("k", [1, 3])
def test_dispatch_and_combine_have_right_gradients(k: int) -> None:
    plan = plan_dispatch(uneven_routing(4, k))
    assert torch.autograd.gradcheck(lambda x: dispatch_rows(x, plan), random_normal(4, 3).requires_grad_())
    assert torch.autograd.gradcheck(lambda x: combine_rows(x, plan), random_normal(4 * k, 3).requires_grad_())


@pytest.mark.parametrize("k", [1, 3, E])
def test_dispatch_and_combine_are_adjoint(k: int) -> None:
    plan = plan_dispatch(uneven_routing(7, k))
    x_TD, y_GD = random_normal(7, D, seed=5), random_normal(7 * k, D, seed=6)
    assert torch.vdot(dispatch_rows(x_TD, plan).flatten(), y_GD.flatten()).item() == pytest.approx(
        torch.vdot(x_TD.flatten(), combine_rows(y_GD, plan).flatten()).item(), rel=1e-13
    )


def test_dispatch_and_combine_keep_no_rows_for_backward() -> None:
    kept: list[Tensor] = []
    plan = plan_dispatch(uneven_routing(7, 3))
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        combine_rows(dispatch_rows(random_normal(7, D).requires_grad_(), plan), plan)
    assert kept == []


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_router_decides_in_fp32_under_autocast(norm_topk_prob: bool) -> None:
    router = Router(D, E, 2, norm_topk_prob=norm_topk_prob, routed_scaling_factor=1.7)
    nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    x = random_normal(50, D).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x)
    expected = router(x.float())
    assert routing.weights_TK.dtype == torch.float32
    assert torch.equal(routing.experts_TK, expected.experts_TK)
    assert torch.equal(routing.weights_TK, expected.weights_TK)


def test_balance_loss_is_one_when_the_load_is_even() -> None:
    scores = random_normal(10, E).softmax(-1)
    assert balance_loss(scores, torch.full((E,), 4)).item() == pytest.approx(1, rel=1e-14)
    assert balance_loss(torch.full((10, E), 1 / E), torch.tensor([10, 10, 0, 0, 0])).item() == pytest.approx(1, rel=1e-6)


def test_balance_loss_and_its_gradient_by_hand() -> None:
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.1, 0.4]], dtype=torch.float64, requires_grad=True)
    loss = balance_loss(scores, torch.tensor([2, 1, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(3 * (0.5 * 0.6 + 0.25 * 0.15 + 0.25 * 0.25))
    assert scores.grad is not None
    assert scores.grad.tolist() == [pytest.approx([3 * 0.5 / 2, 3 * 0.25 / 2, 3 * 0.25 / 2])] * 2


def test_balance_loss_falls_as_routing_evens_out() -> None:
    losses = []
    for preference in (4, 1, 0.3, 0):
        scores = (random_normal(400, E) + preference * torch.arange(E)).softmax(-1)
        losses.append(balance_loss(scores, scores.topk(2).indices.flatten().bincount(minlength=E)).item())
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 2.4
    assert losses[-1] < 1.01


def test_descending_the_balance_loss_spreads_the_tokens() -> None:
    case = Case((0.8, 0, 0, 0, -0.8), tokens=200)
    block, x = case.block(), case.inputs()
    before = block(x)[1].count_E
    for _ in range(20):
        block.zero_grad()
        block(x)[1].balance_loss.backward()
        with torch.no_grad():
            block.mlp.gate.weight -= 0.3 * block.mlp.gate.weight.grad
    assert block(x)[1].count_E.double().std() < before.double().std() / 2
