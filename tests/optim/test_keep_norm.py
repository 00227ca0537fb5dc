"""`keep_norm` (hyperball) of every rule: W <- r V / |V| with V = W - lr r U / |U| and r the norm
that W had at its first step."""

from typing import Any

import pytest
import torch
from optim_helpers import (
    KINDS,
    all_same,
    clones,
    every_kind,
    largest_difference,
    make,
    parameters,
    run_both,
    run_of,
)
from torch import Tensor

from in_turn import in_turn

SHAPES = [(6, 4), (4, 6), (3, 4, 5), (6, 4)]
FP64: dict[str, Any] = {"dtype": torch.float64, "state_dtype": torch.float64}


def matrices_of(kind: str, x: Tensor) -> Tensor:
    """View the parameter-shaped x as (B, ...), a batch of the tensors that the rule takes for a
    matrix."""
    if x.dim() == 2 and kind == "soap_per_head":
        return x.unflatten(0, (-1, 2))
    if x.dim() == 2 and kind == "muon_per_head":
        return x.unflatten(1, (-1, 2)).movedim(1, 0)
    has_experts = x.dim() == 3 and ("per_expert" in kind or kind == "soap_one_sided")
    return x if has_experts else x.unsqueeze(0)


def as_parameter(kind: str, batch: Tensor, shape: torch.Size) -> Tensor:
    """Invert `matrices_of`."""
    if len(shape) == 2 and kind == "muon_per_head":
        batch = batch.movedim(0, 1)
    return batch.reshape(shape)


def norms(kind: str, x: Tensor) -> Tensor:
    """Return the norm of each matrix, to be broadcast over x."""
    batch = matrices_of(kind, x)
    return torch.linalg.vector_norm(batch.flatten(1), dim=1).view(-1, *[1] * (batch.dim() - 1))


def expected_after(kind: str, w: Tensor, u: Tensor, r: Tensor, lr: float) -> Tensor:
    v = matrices_of(kind, w) - lr * r * matrices_of(kind, u) / norms(kind, u)
    u = v * r / torch.linalg.vector_norm(v.flatten(1), dim=1).view(r.shape)
    return as_parameter(kind, u, w.shape)


@every_kind
def test_every_matrix_moves_on_the_sphere_that_it_started_on(kind: str) -> None:
    """U does not depend on W, so it is read off an optimizer of the same rule without `keep_norm`,
    as its movement at rate 1. Rates change. There is weight decay, too, which has no effect."""
    a = run_of(kind, SHAPES, **FP64, keep_norm=True)
    b = run_of(kind, SHAPES, **FP64, keep_norm=False, lr=1.0, weight_decay=0.0)
    expected = [p.detach().clone() for p in a.params]
    start = [norms(kind, w) for w in expected]
    for step in range(9):
        lr = 0.02 * (step + 1)
        for group in a.groups:
            group["lr"] = lr
        before = [q.detach().clone() for q in b.params]
        run_both(a, b, [step])
        updates = [p - q.detach() for p, q in zip(before, b.params, strict=True)]
        wrong, expected = (
            [
                expected_after(kind, w, u, r, rate)
                for w, u, r in zip(expected, updates, start, strict=True)
            ]
            for rate in (1.01 * lr, lr)
        )
        assert largest_difference(a.params, expected) <= 1e-12
        assert largest_difference(a.params, wrong) > 1e-5
    for i, (w, r) in enumerate(zip(parameters(SHAPES), start, strict=True)):
        torch.testing.assert_close(norms(kind, a.params[i].detach()), r, rtol=1e-12, atol=0)
        assert torch.equal(a.state(i)["norm"].flatten(), r.flatten())
        assert (a.params[i] - w).norm() > 0.1 * w.norm()


@every_kind
def test_vectors_and_matrices_that_start_at_zero_move_as_without(kind: str) -> None:
    zeros = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    params = [*parameters([(5,), ()], torch.float64), zeros]
    others = clones(params)
    options = {"lr": 0.1, "state_dtype": torch.float64}
    a = make(kind, params, keep_norm=True, **options)
    b = make(kind, others, keep_norm=False, weight_decay=0.0, **options)
    run_both((a, params), (b, others), range(5))
    assert largest_difference(params, others) <= 1e-14
    assert zeros.detach().any()


def test_one_expert_of_zeros_among_others() -> None:
    a = run_of("muon_per_expert", [(3, 4, 5)], **FP64, keep_norm=True)
    a.params[0].data[1] = 0
    start = torch.linalg.matrix_norm(a.params[0].detach())
    a.steps(range(4))
    now = torch.linalg.matrix_norm(a.params[0].detach())
    torch.testing.assert_close(now[[0, 2]], start[[0, 2]])
    assert now[1] > 0


@pytest.mark.parametrize(
    ("kind", "method"), in_turn(KINDS, ["decoupled", "independent", "palm", "l2"])
)
def test_weight_decay_has_no_effect(kind: str, method: str) -> None:
    options = {"keep_norm": True, "weight_decay_method": method}
    a, b = (run_of(kind, SHAPES, weight_decay=wd, **options) for wd in (0.5, 0.0))
    run_both(a, b, range(4))
    assert all_same(a.params, b.params)


def test_bf16_parameters_keep_the_norm_to_their_rounding() -> None:
    a = run_of("muon", [(32, 16)], torch.bfloat16, keep_norm=True)
    start = a.params[0].detach().float().norm()
    a.steps(range(50))
    assert abs(a.params[0].detach().float().norm() / start - 1) < 4e-3
