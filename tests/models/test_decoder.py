"""Causality, the five segments on their own, bf16, and the numbers that a forward pass reports."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from lather.models.block import Attended, Block
from lather.models.decoder import DecoderOutput
from lather.models.moe import LOCAL_EXCHANGE
from models.tiny import (
    error,
    gradients,
    largest_error,
    layout_of,
    next_token_loss,
    random_normal,
    random_tokens,
    tiny_model,
)

EVEN_EXPERTS = {"num_experts_per_tok": 5}
"""Options under which every expert has every token: routing then changes no product's number of
rows, and so no order of sums."""


@pytest.mark.parametrize("position", [1, 4, 8])
@pytest.mark.parametrize(
    "changes",
    [EVEN_EXPERTS, {"first_k_dense_replace": 3}, {**EVEN_EXPERTS, "q_lora_rank": 9}],
    ids=str,
)
def test_a_token_leaves_earlier_logits_bit_identical(
    changes: dict[str, int], position: int
) -> None:
    model, tokens = tiny_model(**changes), random_tokens(2, 9)
    changed = tokens.clone()
    changed[:, position] = (tokens[:, position] + 1) % 37
    before, after = model(tokens).logits_BSV, model(changed).logits_BSV
    assert torch.equal(after[:, :position], before[:, :position])
    assert ((after - before)[:, position:].abs().amax(dim=-1) > 1e-3).all()


def test_a_token_that_moves_rows_between_experts_leaves_earlier_logits_alone() -> None:
    model, tokens = tiny_model(dtype=torch.float64), random_tokens(2, 9)
    before, after = (
        model(tokens),
        model(torch.cat((tokens[:, :5], (tokens[:, 5:] + 1) % 37), dim=1)),
    )
    counts = [[r.count_E.tolist() for r in output.routings] for output in (before, after)]
    assert counts[0] != counts[1]
    assert error(after.logits_BSV[:, :5], before.logits_BSV[:, :5]) < 1e-14


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model, tokens = tiny_model(dtype=torch.float64), random_tokens(3, 7)
    alone = torch.cat([model(row[None]).logits_BSV for row in tokens])
    assert error(model(tokens).logits_BSV, alone) < 1e-14


@pytest.fixture(params=["moe", "moe without shared experts", "dense"])
def block(request: pytest.FixtureRequest) -> Block:
    model = tiny_model(dtype=torch.float64, n_shared_experts=2 if request.param == "moe" else 0)
    block = model.layers[0 if request.param == "dense" else 1]
    assert isinstance(block, Block)
    return block


class Cuts:
    """Cuts the graph between segments, and runs it backward segment by segment."""

    def __init__(self) -> None:
        self.tape: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        self.tape.append((x, leaf))
        return leaf

    def backward(self) -> None:
        for output, leaf in reversed(self.tape):
            assert leaf.grad is not None
            output.backward(leaf.grad, retain_graph=True)


def loss_with_cuts(block: Block, x: Tensor, cotangent: Tensor, cut: Cuts) -> Tensor:
    attended = block.attend_and_route(x, layout_of(x))
    routing = attended.routing
    if routing is not None:
        routing = dataclasses.replace(
            routing, weights_TK=cut(routing.weights_TK), balance_loss=cut(routing.balance_loss)
        )
    attended = Attended(cut(attended.residual_BSD), cut(attended.normed_TD), routing)
    dispatched = block.dispatch(attended, LOCAL_EXCHANGE)
    if dispatched is not None:
        dispatched = dataclasses.replace(dispatched, x_RD=cut(dispatched.x_RD))
    out = cut(block.run_experts(attended, dispatched))
    y = block.aggregate(attended, cut(block.combine(out, dispatched, LOCAL_EXCHANGE)))
    return (y * cotangent).sum() + (0 if routing is None else routing.balance_loss)


def test_backward_through_cut_segments_gives_the_gradients_of_the_reference(block: Block) -> None:
    x, cotangent = random_normal(2, 5, 24).requires_grad_(), random_normal(2, 5, 24, seed=1)
    y, routing = block(x, layout_of(x))
    ((y * cotangent).sum() + (0 if routing is None else routing.balance_loss)).backward()
    expected = {"x": x.grad, **gradients(block)}
    block.zero_grad()
    x.grad = None
    cut = Cuts()
    loss_with_cuts(block, x, cotangent, cut).backward()
    cut.backward()
    assert largest_error({"x": x.grad, **gradients(block)}, expected) < (1e-13, "")


def test_output_reports_rows_and_balance_of_the_moe_blocks_alone() -> None:
    output = tiny_model(first_k_dense_replace=1)(random_tokens(2, 9))
    assert [int(routing.count_E.sum()) for routing in output.routings] == [2 * 9 * 2] * 2
    balance = sum(r.balance_loss.item() for r in output.routings)
    assert output.balance_loss().item() == pytest.approx(balance)
    assert balance >= 1.5
    dense = tiny_model(first_k_dense_replace=3)(random_tokens(2, 9))
    assert dense.routings == []
    assert dense.balance_loss() == 0


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
def test_no_tokens_work_forward_and_backward(shape: tuple[int, int]) -> None:
    model = tiny_model()
    output = model(torch.zeros(shape, dtype=torch.int64))
    assert output.logits_BSV.shape == (*shape, 37)
    (output.logits_BSV.sum() + output.balance_loss()).backward()
    assert not any(grad.any() for grad in gradients(model).values())


def run_in(precision: torch.dtype, **changes: int) -> tuple[DecoderOutput, dict[str, Tensor]]:
    model, tokens = tiny_model(**changes), random_tokens(4, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        output = model(tokens)
    (next_token_loss(output.logits_BSV, tokens) + 0.01 * output.balance_loss()).backward()
    return output, gradients(model)


def distance(actual: Tensor, expected: Tensor) -> float:
    """The relative difference in the Frobenius norm: roundings are independent, and the largest of
    thousands would say little."""
    return ((actual - expected).norm() / expected.norm()).item()


BF16_ROUNDING = 2**-9


def test_bf16_autocast_stays_within_rounding_of_fp32() -> None:
    """About 20 products lie on the way to a logit, with input, weight and output rounded by 2^-9:
    60 roundings, 120 for a gradient. Independent roundings add up like a random walk, to sqrt(60)
    and sqrt(120); twice that is allowed, as some sums cancel. Every expert has every token, as
    near-ties between experts could turn."""
    narrow, narrow_grads = run_in(torch.bfloat16, **EVEN_EXPERTS)
    wide, wide_grads = run_in(torch.float32, **EVEN_EXPERTS)
    assert narrow.logits_BSV.dtype == torch.bfloat16
    assert distance(narrow.logits_BSV, wide.logits_BSV) < 2 * math.sqrt(60) * BF16_ROUNDING
    for name, grad in narrow_grads.items():
        assert grad.dtype == torch.float32
        assert distance(grad, wide_grads[name]) < 2 * math.sqrt(120) * BF16_ROUNDING, name


def test_bf16_autocast_works_with_uneven_experts() -> None:
    output, grads = run_in(torch.bfloat16)
    assert output.balance_loss().dtype == torch.float32
    assert all(grad.isfinite().all() and grad.any() for grad in grads.values())


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=str)
def test_labels_give_the_loss_of_the_logits_and_its_gradients(changes: dict[str, bool]) -> None:
    model, tokens = tiny_model(dtype=torch.float64, **changes), random_tokens(3, 12)
    labels = tokens[:, 1:].clone()
    labels[0, 3] = -100
    logits_TV = model(tokens[:, :-1]).logits_BSV.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits_TV, labels.flatten(), reduction="sum") / 7
    expected.backward()
    expected_grads = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    output = model(tokens[:, :-1], labels, normalizer=7.0)
    assert output.logits_BSV is None
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-13)
    assert largest_error(gradients(model), expected_grads) < (1e-12, "")
