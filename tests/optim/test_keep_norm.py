"""`keep_norm` (hyperball) of every rule: W <- r V / |V| with V = W - lr r U / |U| and r the norm
that W had at its first step."""

from typing import Any

import pytest
import torch
from optim_helpers import (
    KINDS,
    all_same,
    clones,
    copy_gradients,
    give_gradients,
    largest_difference,
    make,
    parameter,
    parameters,
    run,
)
from torch import Tensor

every_kind = pytest.mark.parametrize("kind", KINDS)
SHAPES = [(6, 4), (4, 6), (3, 4, 5), (6, 4)]
FP64: dict[str, Any] = {"state_dtype": torch.float64}


def matrices_of(kind: str, x: Tensor) -> Tensor:
    """View the parameter-shaped x as (B, ...), a batch of the tensors that the rule takes for a
    matrix."""
    return (
        x
        if ("per_expert" in kind and x.dim() == 3) or (kind == "soap_one_sided" and x.dim() == 3)
        else x.unsqueeze(0)
    )


def norms(kind: str, x: Tensor) -> Tensor:
    """Return the norm of each matrix, to be broadcast over x."""
    batch = matrices_of(kind, x)
    return torch.linalg.vector_norm(batch.flatten(1), dim=1).view(-1, *[1] * (batch.dim() - 1))


def expected_after(kind: str, w: Tensor, u: Tensor, r: Tensor, lr: float) -> Tensor:
    v = matrices_of(kind, w) - lr * r * matrices_of(kind, u) / norms(kind, u)
    return (v * r / torch.linalg.vector_norm(v.flatten(1), dim=1).view(r.shape)).view(w.shape)


@every_kind
def test_every_matrix_moves_on_the_sphere_that_it_started_on(kind: str) -> None:
    """U does not depend on W, so it is read off an optimizer of the same rule without `keep_norm`,
    as its movement at rate 1. Rates change."""
    params = parameters(SHAPES, torch.float64)
    others, expected = clones(params), [p.detach().clone() for p in params]
    start = [norms(kind, w) for w in expected]
    # it also has the default weight decay, which it does not apply
    a = make(kind, params, keep_norm=True, lr=0.5, **FP64)
    b = make(kind, others, keep_norm=False, lr=1.0, weight_decay=0.0, **FP64)
    for step in range(9):
        for group in a.param_groups:
            group["lr"] = lr = 0.02 * (step + 1)
        give_gradients(params, step)
        copy_gradients(params, others)
        before = [q.detach().clone() for q in others]
        a.step()
        b.step()
        updates = [p - q.detach() for p, q in zip(before, others, strict=True)]
        wrong = [
            expected_after(kind, w, u, r, 1.01 * lr)
            for w, u, r in zip(expected, updates, start, strict=True)
        ]
        expected = [
            expected_after(kind, w, u, r, lr)
            for w, u, r in zip(expected, updates, start, strict=True)
        ]
        assert largest_difference(params, expected) <= 1e-12
        assert largest_difference(params, wrong) > 1e-5
    for p, w, r in zip(params, parameters(SHAPES), start, strict=True):
        torch.testing.assert_close(norms(kind, p.detach()), r, rtol=1e-12, atol=0)
        assert torch.equal(a.state[p]["norm"].flatten(), r.flatten())
        assert (p - w).norm() > 0.1 * w.norm()


@every_kind
def test_vectors_and_matrices_that_start_at_zero_move_as_without(kind: str) -> None:
    params = [
        parameter(5, dtype=torch.float64),
        parameter(dtype=torch.float64),
        torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64)),
    ]
    others = clones(params)
    a = make(kind, params, keep_norm=True, lr=0.1, **FP64)
    b = make(kind, others, keep_norm=False, lr=0.1, weight_decay=0.0, **FP64)
    for step in range(5):
        give_gradients(params, step)
        copy_gradients(params, others)
        a.step()
        b.step()
    assert largest_difference(params, others) <= 1e-14
    assert params[2].detach().any()


def test_one_expert_of_zeros_among_others() -> None:
    p = parameter(3, 4, 5, dtype=torch.float64)
    p.data[1] = 0
    start = torch.linalg.matrix_norm(p.detach())
    run(make("muon_per_expert", [p], keep_norm=True, **FP64), [p], range(4))
    now = torch.linalg.matrix_norm(p.detach())
    torch.testing.assert_close(now[[0, 2]], start[[0, 2]])
    assert now[1] > 0


@pytest.mark.parametrize("method", ["decoupled", "independent", "palm"])
def test_weight_decay_apart_from_the_gradient_has_no_effect(method: str) -> None:
    for kind in ("soap_one_sided", "kl_soap", "muon", "soap_muon", "adamw", "shampoo", "lion"):
        params = parameters(SHAPES)
        others = clones(params)
        a = make(kind, params, keep_norm=True, weight_decay=0.5, weight_decay_method=method)
        run(a, params, range(4))
        run(make(kind, others, keep_norm=True, weight_decay=0.0), others, range(4))
        assert all_same(params, others), kind


def test_bf16_parameters_keep_the_norm_to_their_rounding() -> None:
    p = parameter(32, 16, dtype=torch.bfloat16)
    start = p.detach().float().norm()
    run(make("muon", [p], keep_norm=True), [p], range(50))
    assert abs(p.detach().float().norm() / start - 1) < 4e-3


def test_it_may_begin_in_mid_training_with_the_norm_of_then() -> None:
    """As with every option that state depends on, the change is refused with the remedy, or carried
    out."""
    p = parameter(6, 4)
    optimizer = make("muon", [p])
    run(optimizer, [p], range(3))
    before = p.detach().clone()
    optimizer.param_groups[0]["keep_norm"] = True
    with pytest.raises(ValueError, match="norm missing"):
        run(optimizer, [p], range(3, 4))
    assert torch.equal(p.detach(), before)
