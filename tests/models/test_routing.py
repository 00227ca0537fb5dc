"""The router: scores, choice, weights, losses, load balancing and replay, against hand-made numbers
and plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lather.models.balance import LoadBalance, balance_loss, z_loss
from lather.models.routing import Choice, Router, counting_step
from models.tiny import random_normal

D, E = 8, 6


def router(k: int = 2, *, seed: int = 0, **options: object) -> Router:
    made = Router(D, E, k, **options).double()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    for p in made.parameters():
        nn.init.normal_(p, generator=generator)
    return made


def scores_of(made: Router, x_TD: Tensor) -> Tensor:
    logits = x_TD @ made.weight.T + (0 if made.bias is None else made.bias)
    return logits.softmax(-1) if made.score == "softmax" else 1 / (1 + (-logits).exp())


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("normalize", "scale"), [(False, 1.0), (True, 1.0), (False, 2.5), (True, 2.5)]
)
@pytest.mark.parametrize("k", [1, 3, E])
def test_the_best_experts_with_their_weights(
    score: str, bias: bool, normalize: bool, scale: float, k: int
) -> None:
    made, x = (
        router(k, score=score, bias=bias, normalize=normalize, scale=scale),
        random_normal(17, D),
    )
    routing = made(x)
    for t, scores in enumerate(scores_of(made, x)):
        chosen = sorted(range(E), key=lambda e, scores=scores: -scores[e].item())[:k]
        total = sum(scores[e].item() for e in chosen) if normalize else 1.0
        assert routing.experts_TK[t].tolist() == chosen
        assert routing.weights_TK[t].tolist() == pytest.approx(
            [scale * scores[e].item() / total for e in chosen], rel=1e-13
        )
    assert routing.count_E.tolist() == [int((routing.experts_TK == e).sum()) for e in range(E)]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_only_the_best_groups_are_in_reach(score: str) -> None:
    made, x = router(2, score=score, choice=Choice(3, 2)), random_normal(40, D)
    routing = made(x)
    for t, scores in enumerate(scores_of(made, x).tolist()):
        best = [max(scores[2 * g : 2 * g + 2]) for g in range(3)]
        groups = sorted(range(3), key=lambda g, best=best: -best[g])[:2]
        reach = [e for g in groups for e in (2 * g, 2 * g + 1)]
        chosen = sorted(reach, key=lambda e, scores=scores: -scores[e])[:2]
        assert routing.experts_TK[t].tolist() == chosen
    # the two best experts are always within the two best groups; a single group does restrict
    assert torch.equal(routing.experts_TK, router(2, score=score)(x).experts_TK)
    single = router(2, score=score, choice=Choice(3, 1))(x).experts_TK
    assert (single // 2 == single[:, :1] // 2).all()
    assert (single != routing.experts_TK).any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_groups_are_compared_by_the_sum_of_their_best_experts_with_the_bias(score: str) -> None:
    choice = Choice(2, 1, best_of_group=2, correction_bias=True)
    made, x = router(2, score=score, choice=choice), random_normal(60, D)
    unbiased = made(x)
    bias_E = torch.tensor([0.3, -0.2, 0.1, -0.1, 0.2, 0.05])
    made.get_buffer("e_score_correction_bias").copy_(bias_E)
    routing, of_single = made(x), 0
    for t, (scores, weights) in enumerate(zip(scores_of(made, x), routing.weights_TK, strict=True)):
        biased = (scores + bias_E).tolist()
        sums = [sum(sorted(biased[g : g + 3])[1:]) for g in (0, 3)]
        first = 3 * (sums[1] > sums[0])
        of_single += (max(biased[3:]) > max(biased[:3])) != (first == 3)
        chosen = sorted(range(first, first + 3), key=lambda e, biased=biased: -biased[e])[:2]
        assert routing.experts_TK[t].tolist() == chosen
        assert torch.equal(weights, scores[chosen])
    assert of_single  # the best single experts are in another group
    assert not torch.equal(routing.experts_TK, unbiased.experts_TK)


def test_the_correction_bias_keeps_its_values_in_a_narrower_model() -> None:
    made = Router(D, E, 2, choice=Choice(correction_bias=True))
    made.get_buffer("e_score_correction_bias").fill_(1.001)
    narrow = made.bfloat16()
    assert narrow.weight.dtype == torch.bfloat16
    assert torch.equal(narrow.get_buffer("e_score_correction_bias"), torch.full((E,), 1.001))
    assert narrow.double().get_buffer("e_score_correction_bias").dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0 .* from 1 to the 6"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7 .* from 1 to the 6"),
        ({"num_experts_per_tok": 3, "choice": Choice(3, 1)}, "from 1 to the 2 experts in reach"),
        ({"num_experts_per_tok": 1, "choice": Choice(4, 1)}, r"groups = \(4, 1\) .* divide the 6"),
        (
            {"num_experts_per_tok": 1, "choice": Choice(3, 4)},
            r"groups = \(3, 4\) .* from 1 to 3 groups",
        ),
        ({"num_experts_per_tok": 1, "score": "tanh"}, "score = 'tanh' .* 'softmax', 'sigmoid'"),
    ],
    ids=str,
)
def test_a_router_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(D, E, **arguments)


def test_balance_levels_and_sequences_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="'batch' is not valid: use one of 'micro_batch', 'seq"):
        LoadBalance("batch")
    made = router()
    made.balance = LoadBalance("sequence")
    with pytest.raises(ValueError, match=r"num_sequences = 2 .* divide the 5 tokens"):
        made(random_normal(5, D), 2)


@pytest.mark.parametrize("normalize", [False, True])
def test_router_decides_in_fp32_under_autocast(normalize: bool) -> None:
    made = router(normalize=normalize, scale=1.7).float()
    x = random_normal(50, D).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = made(x)
    expected = made(x.float())
    assert routing.weights_TK.dtype == torch.float32
    assert torch.equal(routing.experts_TK, expected.experts_TK)
    assert torch.equal(routing.weights_TK, expected.weights_TK)


def test_balance_loss_is_one_for_an_even_load_and_its_gradient_is_right_by_hand() -> None:
    scores = random_normal(10, E).softmax(-1)
    assert balance_loss(scores, torch.full((E,), 4)).item() == pytest.approx(1, rel=1e-14)
    uneven = torch.tensor([10, 10, 0, 0, 0, 0])
    even_scores = torch.full((10, E), 1 / E)
    assert balance_loss(even_scores, uneven).item() == pytest.approx(1, rel=1e-6)
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.1, 0.4]], dtype=torch.float64)
    loss = balance_loss(scores.requires_grad_(), torch.tensor([2, 1, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(3 * (0.5 * 0.6 + 0.25 * 0.15 + 0.25 * 0.25))
    assert scores.grad is not None
    assert scores.grad.tolist() == [pytest.approx([3 * 0.5 / 2, 3 * 0.25 / 2, 3 * 0.25 / 2])] * 2


def test_logits_keep_no_wide_copy_of_a_bf16_input_and_have_right_gradients() -> None:
    wide = router(bias=True)
    assert torch.autograd.gradcheck(
        lambda x, *_: wide.logits(x), (random_normal(5, D).requires_grad_(), *wide.parameters())
    )
    saved: list[Tensor] = []
    x, made = random_normal(5, D).bfloat16().requires_grad_(), router().bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        logits = made.logits(x)
    assert logits.dtype == torch.float32
    assert {tensor.dtype for tensor in saved} == {torch.bfloat16}
    assert error_of(logits, x.float() @ made.weight.float().T) == 0


def error_of(actual: Tensor, expected: Tensor) -> float:
    return (actual - expected).abs().max().item()


def test_z_loss_and_its_gradient() -> None:
    logits = random_normal(7, E).requires_grad_()
    expected = sum(float(row.exp().sum().log()) ** 2 for row in logits.detach()) / 7
    assert z_loss(logits).item() == pytest.approx(expected, rel=1e-13)
    assert torch.autograd.gradcheck(z_loss, logits)
    assert z_loss(logits[:0]) == 0


def test_scores_that_all_underflow_give_finite_weights() -> None:
    made = router(score="sigmoid", normalize=True).float()
    nn.init.constant_(made.weight, -1e4)
    routing = made(torch.ones(3, D))
    assert routing.weights_TK.isfinite().all()
    assert routing.balance_loss.isfinite()


# --- over what the balance loss is taken ----------------------------------------------------------


def test_balance_over_sequences_is_the_mean_of_each_alone() -> None:
    made, x = router(), random_normal(3 * 5, D)
    made.balance = LoadBalance("sequence")
    alone = [made(x[5 * b : 5 * b + 5]).balance_loss.item() for b in range(3)]
    together = made(x, 3).balance_loss
    assert together.item() == pytest.approx(sum(alone) / 3, rel=1e-13)
    made.balance = LoadBalance("micro_batch")
    assert abs(made(x, 3).balance_loss.item() - together.item()) > 1e-3


def test_balance_over_the_global_batch_counts_all_micro_batches_of_the_step() -> None:
    made, x, y = router(), random_normal(30, D), random_normal(30, D, seed=9) + 1
    made.balance = LoadBalance("global_batch")
    with counting_step([made]):
        first, second = made(x), made(y)
    with counting_step([made]):
        third = made(y)
    for routing, x_TD, counted in (
        (first, x, [first]),
        (second, y, [first, second]),
        (third, y, [third]),
    ):
        count_E = torch.stack([each.count_E for each in counted]).sum(0)
        expected = balance_loss(scores_of(made, x_TD), count_E).item()
        assert routing.balance_loss.item() == pytest.approx(expected, rel=1e-13)
    assert abs(third.balance_loss - second.balance_loss) > 1e-3


def test_outside_a_step_nothing_counts_towards_the_global_batch() -> None:
    made, x = router(), random_normal(30, D)
    made.balance = LoadBalance("global_batch")
    with counting_step([made]):
        made(x + 1)
    alone = router()(x).balance_loss
    assert [made(x).balance_loss.item() for _ in range(2)] == [alone.item()] * 2
    with counting_step([made]):
        assert torch.equal(made(x).balance_loss, alone)


def test_a_step_that_failed_counts_no_longer() -> None:
    made, x = router(), random_normal(30, D)
    made.balance = LoadBalance("global_batch")

    def fail() -> None:
        with counting_step([made]), made.replay(torch.tensor([[0, 1]])):
            made(x)

    with counting_step([made]):
        made(x + 1)
    with pytest.raises(ValueError, match="given 1 tokens, but the batch has 30"):
        fail()
    alone = router()(x).balance_loss
    assert [made(x).balance_loss.item() for _ in range(2)] == [alone.item()] * 2


# --- the router again in backward -----------------------------------------------------------------


@pytest.mark.parametrize("level", ["micro_batch", "sequence", "global_batch"])
def test_a_recomputed_routing_has_the_same_bits_and_counts_nothing(level: str) -> None:
    """Under activation checkpointing a step of three micro-batches runs without autograd, and each
    is made again later with it."""
    plain, again = (router(normalize=True, score="sigmoid") for _ in range(2))
    batches = [random_normal(6, D, seed=seed) + seed for seed in range(3)]
    for made in (plain, again):
        made.balance, made.takes_z_loss = LoadBalance(level), True
        made.enable_loss_free_balancing()
    with counting_step([plain, again]):
        expected = [plain(x, 3) for x in batches]
        with torch.no_grad():
            first = [again(x, 3) for x in batches]
        again.update_correction_bias(torch.arange(E), rate=10.0)  # this would change the choice
        recomputed = []
        for x, routing in zip(batches, first, strict=True):
            with again.recompute(routing):
                recomputed.append(again(x, 3))
        assert not torch.equal(again(batches[0]).experts_TK, first[0].experts_TK)
    for left, right in ((expected, recomputed), (first, recomputed)):
        for a, b in zip(left, right, strict=True):
            for name in ("experts_TK", "weights_TK", "count_E", "balance_loss", "z_loss"):
                assert torch.equal(getattr(a, name), getattr(b, name)), name
    losses = [
        [r.weights_TK.square().sum() + r.balance_loss + r.z_loss for r in routings]
        for routings in (expected, recomputed)
    ]
    for mine, theirs in zip(*losses, strict=True):
        for a, b in zip(
            torch.autograd.grad(mine, plain.weight),
            torch.autograd.grad(theirs, again.weight),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_after_recomputing_the_steps_counts_are_as_before() -> None:
    made, x, y = router(), random_normal(30, D), random_normal(30, D, seed=9) + 1
    made.balance = LoadBalance("global_batch")
    with counting_step([made]):
        first = made(x)
        with made.recompute(first):
            assert torch.equal(made(x).balance_loss, first.balance_loss)
        second = made(y)
    assert torch.equal(second.balance_count_E, first.count_E + second.count_E)


# --- loss-free balancing --------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_bias_evens_the_load_without_touching_the_weights(score: str) -> None:
    made, x = router(score=score), random_normal(500, D) + 0.7
    before = made(x)
    made.enable_loss_free_balancing()
    assert torch.equal(made(x).experts_TK, before.experts_TK)
    for _ in range(400):
        made.update_correction_bias(made(x).count_E, rate=0.002)
    after = made(x)
    assert after.count_E.double().std() < before.count_E.double().std() / 5
    expected = scores_of(made, x).gather(1, after.experts_TK)
    assert error_of(after.weights_TK, expected) < 1e-13


def test_the_bias_moves_by_the_rate_towards_the_mean() -> None:
    made = router()
    made.enable_loss_free_balancing()
    made.update_correction_bias(torch.tensor([4, 0, 2, 2, 1, 3]), rate=0.25)
    assert made.e_score_correction_bias is not None
    assert made.e_score_correction_bias.tolist() == [-0.25, 0.25, 0, 0, 0.25, -0.25]
    assert "e_score_correction_bias" in made.state_dict()
    assert "e_score_correction_bias" not in router().state_dict()


# --- replay ---------------------------------------------------------------------------------------


def test_replay_forces_the_experts_and_takes_their_scores() -> None:
    made, x = router(normalize=True), random_normal(4, D)
    forced = torch.tensor([[5, 0], [1, 2], [0, 5], [3, 4]])
    with made.replay(forced):
        routing = made(x)
    scores = scores_of(made, x).gather(1, forced)
    assert torch.equal(routing.experts_TK, forced)
    assert error_of(routing.weights_TK, scores / scores.sum(1, keepdim=True)) < 1e-14
    assert routing.count_E.tolist() == [2, 1, 1, 1, 1, 2]
    assert not torch.equal(made(x).experts_TK, forced)
    with made.replay(forced):
        with made.replay(forced.flip(0)):
            assert torch.equal(made(x).experts_TK, forced.flip(0))
        assert torch.equal(made(x).experts_TK, forced)


def test_replaying_its_own_choice_changes_nothing_not_even_gradients() -> None:
    made, x = router(k=3), random_normal(9, D).requires_grad_()
    plain = made(x)
    with made.replay(plain.experts_TK):
        again = made(x)
    first, second = (
        torch.autograd.grad(r.weights_TK.square().sum() + r.balance_loss, (x, made.weight))
        for r in (plain, again)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([[0]], r"shape \(1, 1\): it must be \(T, 2\)"),
        ([[0, 6]], "experts 0 to 6: they must be 0 to 5"),
        ([[-1, 2]], "experts -1 to 2"),
        ([[3, 3]], "same expert twice"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(experts: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message), router().replay(torch.tensor(experts)):
        pass


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_repeated_choices_take_the_scores_and_give_the_router_gradients(score: str) -> None:
    made, x = router(normalize=True, score=score), random_normal(4, D)
    own = made(x)
    given = torch.tensor([[5, 0], [-1, -1], [0, 5], [3, 4]], dtype=torch.int16)
    routing = made(x, repeats_TK=given)
    expected = given.long()
    expected[1] = own.experts_TK[1]
    assert torch.equal(routing.experts_TK, expected)
    scores = scores_of(made, x).gather(1, expected)
    weights = scores / scores.sum(1, keepdim=True)
    assert error_of(routing.weights_TK, weights) < 1e-14
    assert routing.count_E.tolist() == [int((expected == e).sum()) for e in range(E)]
    factors = random_normal(*weights.shape, seed=1)
    actual, wanted = (
        torch.autograd.grad((each * factors).sum(), made.weight)[0]
        for each in (routing.weights_TK, weights)
    )
    assert error_of(actual, wanted) < 1e-12
