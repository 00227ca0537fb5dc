"""The exchange of expert parallelism against loops over tokens. (test_engine.py has models whose
experts are on several ranks.)

Ranks are started once for several cases; a rank makes every rank's inputs from seeds, and so knows
what it has to receive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchange_cases import (
    FOUR,
    PAIRS,
    TWO,
    Case,
    expected_dispatch,
    expected_sum,
    expected_weights_gradient,
    from_tables,
    random_case,
)
from exchange_modes import (
    MISTAKES,
    GivesBackTooEarly,
    all_to_alls,
    buffers,
    is_found_out,
)
from ranks import run_ranks
from torch import Tensor

from lather.models.moe import Exchange
from lather.parallel.expert_exchange import ExpertExchange

WIDTHS = ("mixed", "fp32", "bf16")
# --- phase by phase, against loops ----------------------------------------------------------------


def phases(case: Case, me: int, exchange: ExpertExchange) -> dict[str, bool]:
    """Compare every phase to the bit, and check that buffers are gone afterwards."""
    ranks = range(len(case.tokens))
    x, routing = transposed(case.x(me)), case.routing(me)
    with all_to_alls() as travels:
        dispatched = exchange.start_dispatch(x, routing).wait()
    sent = [sent for _, sent in travels[1:]]  # the first are numbers of rows
    handle, came = (
        dispatched.handle,
        [dispatched.x_RD, dispatched.experts_RK, dispatched.weights_RK],
    )
    partial, grad_y = (
        transposed(from_tables(case, me, case.d, case.dtype, seed=seed)) for seed in (3, 4)
    )
    grad_weights = transposed(from_tables(case, me, case.k, case.weights, seed=5))
    with all_to_alls() as travels:
        y = exchange.start_combine(partial, handle).wait()
    back = [received for received, _ in travels]
    rows = exchange.start_combine_backward(x, handle).wait()
    grad_x, grad_w = exchange.start_dispatch_backward(grad_y, grad_weights, handle).wait()
    x_RD, experts_RK, weights_RK = expected_dispatch(case, me)
    return {
        "x": same(dispatched.x_RD, x_RD),
        "experts": same(dispatched.experts_RK, experts_RK),
        "weights": same(dispatched.weights_RK, weights_RK),
        "each token once to a rank": handle.sent_P
        == tuple(len(case.rows(me, target)) for target in ranks),
        "numbers received": handle.received_P
        == tuple(len(case.rows(source, me)) for source in ranks),
        "send buffers are gone": all(
            tensor.untyped_storage().nbytes() == 0 for tensor in sent + back
        ),
        "the caller's are not": x.untyped_storage().nbytes() == x.nbytes
        and partial.untyped_storage().nbytes() == partial.nbytes,
        "what came shares no storage": len(
            {tensor.untyped_storage().data_ptr() for tensor in came if len(tensor)}
        )
        == 3 * bool(len(x_RD)),
        "the way back is indices": all(
            not value.is_floating_point()
            for value in vars(handle).values()
            if isinstance(value, Tensor)
        ),
        "combine": rounded(y, expected_sum(case, me, seed=3), case.dtype),
        "combine's backward": same(rows, x_RD),
        "dispatch's backward": rounded(grad_x, expected_sum(case, me, seed=4), case.dtype),
        "weights' backward": same(grad_w, expected_weights_gradient(case, me)),
    }


def transposed(x: Tensor) -> Tensor:
    """Return the same numbers in another order of memory."""
    return x.T.contiguous().T


def same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


def rounded(actual: Tensor, wide: Tensor, dtype: torch.dtype) -> bool:
    """Whether a sum was rounded once, to the nearest. The sum of two bf16 numbers is often
    half-way, where a kernel may go either way."""
    nearest = (wide.to(dtype).to(wide.dtype) - wide).abs()
    return (
        actual.dtype == dtype
        and actual.shape == wide.shape
        and bool(((actual.to(wide.dtype) - wide).abs() <= nearest).all())
    )


# --- differentiable -------------------------------------------------------------------------------


def differentiable(case: Case, me: int, exchange: ExpertExchange) -> dict[str, Any]:
    """Compare the autograd forms with the phases, and return both sides of <A x, y> = <x, A^T y>,
    which have to be summed over ranks."""
    x, routing, saved = case.x(me).requires_grad_(), case.routing(me), []
    weights = routing.weights_TK.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        dispatched = exchange.dispatch(x, routing)
        partial = from_tables(case, me, case.d, case.dtype, seed=3).requires_grad_()
        y = exchange.combine(partial, dispatched)
    cotangents = [
        from_tables(case, me, columns, dtype, seed=6)
        for columns, dtype in ((case.d, case.dtype), (case.k, case.weights))
    ]
    outputs = [dispatched.x_RD, dispatched.weights_RK]
    grads = gradients_of(outputs, cotangents, [x, weights])
    (grad_partial,) = gradients_of([y], [x.detach()], [partial])
    launched = exchange.start_dispatch(x, routing).wait()
    phase_grads = exchange.start_dispatch_backward(*cotangents, launched.handle).wait()
    return {
        "dispatch": [dot(outputs, cotangents), dot([x, weights], grads)],
        "combine": [dot([y], [x]), dot([partial], [grad_partial])],
        "saved are indices": bool(saved)
        and not any(tensor.is_floating_point() for tensor in saved),
        "phases": all(same(a, b) for a, b in zip(grads, phase_grads, strict=True))
        and same(dispatched.x_RD.detach(), launched.x_RD)
        and same(dispatched.weights_RK.detach(), launched.weights_RK)
        and same(y.detach(), exchange.start_combine(partial, launched.handle).wait())
        and same(grad_partial, exchange.start_combine_backward(x, launched.handle).wait()),
        "nothing launched has a graph": not any(
            tensor.requires_grad
            for tensor in (
                launched.x_RD,
                launched.weights_RK,
                exchange.start_combine(partial, launched.handle).wait(),
            )
        ),
    }


def gradients_of(
    outputs: list[Tensor], cotangents: list[Tensor], inputs: list[Tensor]
) -> tuple[Tensor, ...]:
    # grad_outputs= would import sympy
    products = [(y * cotangent).sum() for y, cotangent in zip(outputs, cotangents, strict=True)]
    return torch.autograd.grad(
        torch.stack([product.double() for product in products]).sum(), inputs
    )


def dot(left: Any, right: Any) -> float:
    return sum((a.double() * b.double()).sum().item() for a, b in zip(left, right, strict=True))


# --- what runs in the ranks -----------------------------------------------------------------------


def plans_first(
    me: int, group: dist.ProcessGroup, sizes_group: dist.ProcessGroup
) -> dict[str, bool]:
    """Keep two plans under way at a time, whose numbers of rows travel in a group of their own."""
    cases, groups, original = [TWO["mixed"], replace(TWO["K = 1"], d=3)], [], dist.all_to_all_single

    def note(*args: Any, group: dist.ProcessGroup, **options: Any) -> Any:
        groups.append(group)
        return original(*args, group=group, **options)

    exchange = ExpertExchange(group, 8, sizes_group=sizes_group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", note)
        plans = [exchange.start_plan(case.routing(me)) for case in cases]
        handles = [plan.wait() for plan in reversed(plans)][::-1]
        pending = [
            exchange.start_dispatch(case.x(me), case.routing(me), handle)
            for case, handle in zip(cases, handles, strict=True)
        ]
        rows = [item.wait().x_RD for item in pending]
    return {
        "rows": all(
            same(x_RD, expected_dispatch(case, me)[0])
            for x_RD, case in zip(rows, cases, strict=True)
        ),
        "groups": groups == [sizes_group] * 2 + [group] * 4,
    }


def refusals(me: int, exchange: ExpertExchange) -> dict[str, str]:
    """Make each mistake on every rank; none sends anything, or what runs afterwards would not
    fit."""
    case = TWO["mixed"]
    x, routing = case.x(me), case.routing(me)
    dispatched = exchange.start_dispatch(x, routing).wait()
    rows = dispatched.x_RD
    wrong_expert = replace(routing, experts_TK=torch.full_like(routing.experts_TK, case.e))
    mistakes = {
        "tokens": lambda: exchange.start_dispatch(x[1:], routing),
        "differentiable tokens": lambda: exchange.dispatch(x[1:], routing),
        "range": lambda: exchange.start_dispatch(x, wrong_expert),
        "combine": lambda: exchange.start_combine(rows[1:], dispatched.handle),
        "combine backward": lambda: exchange.start_combine_backward(x[1:], dispatched.handle),
        "dispatch backward": lambda: exchange.start_dispatch_backward(
            rows[1:], dispatched.weights_RK[1:], dispatched.handle
        ),
    }
    messages = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            messages[name] = "nothing was raised"
        except ValueError as raised:
            messages[name] = str(raised)
    return messages


def alone(me: int, group: dist.ProcessGroup) -> bool:
    """With one rank in the group everything equals `LOCAL_EXCHANGE`, whether rows are copied or
    stay where they are."""
    case = replace(TWO["mixed"], tokens=(7,))
    x, routing = case.x(0), case.routing(0)
    exchange = ExpertExchange(group, case.e)
    dispatched = exchange.start_dispatch(x, routing).wait()
    grads = exchange.start_dispatch_backward(x, dispatched.weights_RK, dispatched.handle).wait()
    expected = (routing.experts_TK, routing.weights_TK)
    return (
        all(
            map(
                same,
                (dispatched.x_RD, dispatched.experts_RK, dispatched.weights_RK),
                (x, *expected),
            )
        )
        and all(
            map(
                same,
                (exchange.start_combine(x, dispatched.handle).wait(), *grads),
                (x, x, routing.weights_TK),
            )
        )
        and same(exchange.start_combine_backward(x, dispatched.handle).wait(), x)
    )


def two_ranks(me: int, world_size: int) -> dict[str, Any]:
    world, groups = dist.group.WORLD, [dist.new_group([rank]) for rank in range(world_size)]
    sizes_group = dist.new_group([0, 1])
    assert world is not None
    assert sizes_group is not None
    exchanges = {e: ExpertExchange(world, e) for e in range(2, 40, 2)}
    return {
        "phases": {name: phases(case, me, exchanges[case.e]) for name, case in TWO.items()},
        "random": [
            phases(random_case(seed), me, exchanges[random_case(seed).e]) for seed in range(8)
        ],
        "differentiable": {
            name: differentiable(case, me, exchanges[case.e]) for name, case in TWO.items()
        },
        "mistakes": [
            [
                is_found_out(TWO[name], me, GivesBackTooEarly(mistake, world, 8))
                for mistake in ("", *MISTAKES)
            ]
            for name in WIDTHS
        ],
        "buffers": [buffers(TWO[name], me, world) for name in WIDTHS],
        "refusals": refusals(me, exchanges[8]),
        "plans": plans_first(me, world, sizes_group),
        "alone": alone(me, groups[me]),
    }


def four_ranks(me: int, world_size: int) -> dict[str, Any]:
    world, pairs = dist.group.WORLD, [dist.new_group([0, 1]), dist.new_group([2, 3])]
    assert world is not None
    exchange, pair_exchange = (
        (lambda e: ExpertExchange(world, e)),
        ExpertExchange(pairs[me // 2], 8),
    )
    return {
        "phases": {name: phases(case, me, exchange(case.e)) for name, case in FOUR.items()},
        "pairs": {name: phases(case, me % 2, pair_exchange) for name, case in PAIRS.items()},
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2)


def failures(results: list[dict[str, Any]], kind: str, name: str) -> list[str]:
    return [
        f"rank {rank}: {check}"
        for rank, result in enumerate(results)
        for check, holds in result[kind][name].items()
        if not holds
    ]


@pytest.mark.parametrize("name", TWO)
def test_every_phase_is_the_loop_over_tokens(two: list[dict[str, Any]], name: str) -> None:
    assert failures(two, "phases", name) == []


def test_random_routings_are_the_loop_over_tokens(two: list[dict[str, Any]]) -> None:
    assert [failures(two, "random", seed) for seed in range(8)] == [[]] * 8  # type: ignore[arg-type]


def test_the_cases_are_what_they_say() -> None:
    sent = {
        name: [[len(case.rows(source, target)) for target in range(2)] for source in range(2)]
        for name, case in TWO.items()
    }
    assert sent["mixed"] == [[9, 7], [5, 5]]
    assert sent["everything to rank 0"] == [[5, 0], [8, 0]]
    assert sent["everything to rank 1"] == [[0, 5], [0, 8]]
    assert sent["K = E"] == [[4, 4], [3, 3]]
    assert sent["no tokens at all"] == [[0, 0], [0, 0]]
    assert len({(case.tokens, case.e, case.k) for case in map(random_case, range(8))}) == 8


@pytest.mark.parametrize("name", TWO)
def test_the_differentiable_forms_are_the_phases_and_adjoint(
    two: list[dict[str, Any]], name: str
) -> None:
    results = [result["differentiable"][name] for result in two]
    for check in ("saved are indices", "phases", "nothing launched has a graph"):
        assert all(result[check] for result in results), check
    for direction in ("dispatch", "combine"):
        forward, backward = (sum(result[direction][side] for result in results) for side in (0, 1))
        tolerance = (
            1e-12
            if TWO[name].dtype == torch.float64
            else 1e-5
            if TWO[name].dtype == torch.float32
            else 5e-2
        )
        assert forward == pytest.approx(backward, rel=tolerance, abs=tolerance)
        assert name == "no tokens at all" or abs(forward) > 0.1


def test_poison_finds_a_buffer_that_is_given_back_too_early(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["mistakes"] == [[False] + [True] * len(MISTAKES)] * len(WIDTHS)


def test_buffers_are_poisoned_or_held_as_the_engine_is_told(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["buffers"] == [{"poisoned": True, "held": True}] * len(WIDTHS)


def test_several_may_be_under_way(two: list[dict[str, Any]]) -> None:
    assert all(all(result["plans"].values()) for result in two)


def test_a_group_of_one_is_the_local_exchange(two: list[dict[str, Any]]) -> None:
    assert all(result["alone"] for result in two)


def test_mistakes_are_refused_before_anything_is_sent(two: list[dict[str, Any]]) -> None:
    for result in two:
        messages = result["refusals"]
        assert "give the routing of these tokens" in messages["tokens"]
        assert messages["tokens"] == messages["differentiable tokens"]
        assert messages["range"] == "experts_TK holds 8: every entry has to be in [0, 8)"
        assert all(
            "give one row for each" in messages[name]
            for name in ("combine", "combine backward", "dispatch backward")
        )


def test_four_ranks_and_groups_inside_the_world() -> None:
    results = run_ranks(four_ranks, 4)
    for kind, cases in (("phases", FOUR), ("pairs", PAIRS)):
        assert [failures(results, kind, name) for name in cases] == [[]] * len(cases)


def test_an_exchange_between_ranks_has_every_method_of_its_own() -> None:
    """One that it inherited would send nothing."""
    assert {name for name, value in vars(Exchange).items() if callable(value)} <= set(
        vars(ExpertExchange)
    )
