"""Padding goes to no expert, and counts in no balance loss, z-loss and load: the results are those
of the tokens alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.kernels.route import plan_route
from lather.models.balance import BALANCE_LEVELS, LoadBalance
from lather.models.gated_mlp import MEMORY_MODES
from lather.models.moe import LOCAL_EXCHANGE
from lather.models.routing import Router, counting_step
from lather.models.token_positions import Padding, SequenceLayout
from models.tiny import FAMILY_SIZES, KINDS, random_normal, random_tokens, tiny_family_model

D, E, K = 8, 6, 2


def router(level: str = "micro_batch", *, seed: int = 0, **options: object) -> Router:
    made = Router(D, E, K, **options).double()  # type: ignore[arg-type]
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(seed))
    made.balance, made.takes_z_loss = LoadBalance(level), True
    made.enable_loss_free_balancing()
    return made


def padding_of(*tokens_of_row: int, length: int) -> Padding:
    """Padding after so many tokens of each row."""
    mask_BS = torch.arange(length) >= torch.tensor(tokens_of_row)[:, None]
    return Padding.at(mask_BS, mask_BS.device)


@pytest.mark.parametrize("num_padding", [0, 16, 32, 96])
def test_the_balance_loss_is_that_of_transformers_with_its_mask(num_padding: int) -> None:
    """Transformers' loss for one block is K times ours, whose minimum is 1."""
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    model = tiny_family_model("qwen3_moe", num_hidden_layers=1).double()
    tokens = torch.cat((random_tokens(2, 32), torch.zeros(2, num_padding, dtype=torch.long)), 1)
    mask_BS = torch.arange(32 + num_padding).expand(2, -1) < 32
    logits: list[Tensor] = []
    gate = model.routers()[0]
    gate.register_forward_hook(lambda gate, args, out: logits.append(gate.logits(args[0]).detach()))
    routing = model(tokens, padding_BS=~mask_BS).routings[0]
    k = gate.num_experts_per_tok
    expected = modeling.load_balancing_loss_func(tuple(logits), len(gate.weight), k, mask_BS.long())
    assert routing.balance_loss.item() == pytest.approx(expected.item() / k, rel=1e-6)
    alone = model(tokens[:, :32]).routings[0]
    assert routing.balance_loss.item() == pytest.approx(alone.balance_loss.item(), rel=1e-13)
    assert torch.equal(routing.count_E, alone.count_E)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("level", BALANCE_LEVELS)
def test_routing_and_gradients_are_those_of_the_tokens_alone(level: str, score: str) -> None:
    """The rows of a micro-batch have 5 of 5, 3 of 5 and no tokens."""
    made, x = router(level, score=score), random_normal(15, D)
    padding = padding_of(5, 3, 0, length=5)
    is_token_T = ~padding.mask_T
    with counting_step([made]):
        padded = made(x, 3, padding)
    if level == "sequence":
        parts = [made(x[:5], 1), made(x[5:8], 1)]
        balance = (5 * parts[0].balance_loss + 3 * parts[1].balance_loss) / 8
    else:
        balance = made(x[is_token_T]).balance_loss
    alone = made(x[is_token_T])
    assert torch.equal(padded.experts_TK[is_token_T], alone.experts_TK)
    assert torch.equal(padded.weights_TK[is_token_T], alone.weights_TK)
    assert padded.experts_TK[padding.mask_T].unique().tolist() == [-1]
    assert not padded.weights_TK[padding.mask_T].any()
    assert torch.equal(padded.count_E, alone.count_E)
    assert padded.num_pairs == 8 * K
    losses = [(padded.balance_loss, balance), (padded.z_loss, alone.z_loss)]
    for actual, expected in losses:
        assert actual.item() == pytest.approx(expected.item(), rel=1e-13)
        (actual_ED,) = torch.autograd.grad(actual, made.weight, retain_graph=True)
        (expected_ED,) = torch.autograd.grad(expected, made.weight, retain_graph=True)
        torch.testing.assert_close(actual_ED, expected_ED, rtol=1e-12, atol=1e-14)
    made.update_correction_bias(padded.count_E, 0.1)
    load_E = alone.count_E.double()
    assert made.e_score_correction_bias is not None
    moved_E = made.e_score_correction_bias.double()
    torch.testing.assert_close(moved_E, 0.1 * (load_E.mean() - load_E).sign(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", BALANCE_LEVELS)
def test_a_micro_batch_of_padding_has_neither_loss_nor_load(level: str) -> None:
    made, x = router(level), random_normal(10, D).requires_grad_()
    with counting_step([made]):
        routing = made(x, 2, padding_of(0, 0, length=5))
    assert routing.balance_loss == routing.z_loss == 0
    assert not routing.count_E.any()
    (routing.balance_loss + routing.z_loss + routing.weights_TK.sum()).backward()
    assert not x.grad.any()
    assert not made.weight.grad.any()


@pytest.mark.parametrize("level", BALANCE_LEVELS)
def test_a_repeated_routing_has_the_same_bits(level: str) -> None:
    made, x, padding = router(level), random_normal(15, D), padding_of(5, 3, 0, length=5)
    first = made(x, 3, padding)
    with made.recompute(first):
        again = made(x, 3, padding)
    for name in ("experts_TK", "weights_TK", "count_E", "balance_loss", "z_loss"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert again.num_pairs == first.num_pairs


def test_experts_have_no_room_for_padding() -> None:
    routing = router()(random_normal(15, D), 3, padding_of(5, 3, 0, length=5))
    dispatched = LOCAL_EXCHANGE.dispatch(random_normal(15, D), routing)
    route = plan_route(dispatched.experts_RK, E, num_pairs=dispatched.num_pairs)
    assert len(route.token_G) == 8 * K


@pytest.mark.parametrize(
    ("family", "memory"),
    [
        (family, memory)
        for family in FAMILY_SIZES
        for memory in (MEMORY_MODES if family in KINDS else ("saved",))
    ],
)
def test_a_decoder_gives_what_its_sequences_give_alone(family: str, memory: str) -> None:
    tokens, lengths, length = random_tokens(3, 9), (9, 4, 7), 9
    mask_BS = torch.arange(length) < torch.tensor(lengths)[:, None]
    model = tiny_family_model(family).double()
    model.set_memory(memory)
    model.balance_load("sequence")
    labels = random_tokens(3, length, seed=1).masked_fill(~mask_BS, -100)
    output = model(tokens.masked_fill(~mask_BS, 0), labels, padding_BS=~mask_BS)
    (output.loss + 0.1 * output.balance_loss()).backward()
    padded = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for row, num_tokens in enumerate(lengths):  # the balance loss counts by the tokens
        alone = model(tokens[row : row + 1, :num_tokens], labels[row : row + 1, :num_tokens])
        (alone.loss + 0.1 * alone.balance_loss() * num_tokens / sum(lengths)).backward()
    for name, p in model.named_parameters():
        scale = float(p.grad.abs().max())
        torch.testing.assert_close(padded[name], p.grad, rtol=1e-12, atol=1e-12 * scale, msg=name)


def test_a_layout_without_padding_is_the_same_object() -> None:
    layout = SequenceLayout(2, 3, torch.device("cpu"))
    assert layout.with_padding(None) is layout
    assert layout.with_padding(torch.zeros(2, 3, dtype=torch.bool)) is layout
    padded = layout.with_padding(F.pad(torch.zeros(2, 2, dtype=torch.bool), (0, 1), value=True))
    assert padded.padding is not None
    assert layout.padding is None
    assert padded.padding.num_tokens == 4
    assert padded.mask(2) is layout.mask(2)
    with pytest.raises(
        ValueError,
        match=r"padding_BS has shape \(3, 2\): it must be \(2, 3\), like the tokens'",
    ):
        layout.with_padding(torch.zeros(3, 2, dtype=torch.bool))
