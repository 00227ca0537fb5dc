"""What every user of SOAP relies on, whatever the options: special cases, and what a step leaves alone."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from soap_helpers import give_gradients, parameter, run, same
from torch import Tensor

from lather.optim import SOAP, eigenbasis


@pytest.mark.parametrize("identity_basis", [{"max_precond_dim": 0}, {"adam_warmup_steps": 100}], ids=str)
def test_identity_basis_equals_adamw(identity_basis: dict[str, Any]) -> None:
    settings = {"lr": 1e-2, "betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.1}
    ours = [parameter(6, 4, dtype=torch.float64), parameter(3, 4, 5, dtype=torch.float64), parameter(5, dtype=torch.float64)]
    theirs = copy.deepcopy(ours)
    run(SOAP(ours, **settings, **identity_basis, state_dtype=torch.float64), ours, range(12))
    run(torch.optim.AdamW(theirs, **settings), theirs, range(12))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("shape", "tolerance"), [((5, 16, 24), 0.0), ((3, 32, 32), 0.0), ((5, 7, 7), 1e-4)], ids=str)
def test_an_expert_alone_gives_the_same_as_in_a_stack(shape: tuple[int, ...], tolerance: float) -> None:
    """To the bit where every matrix of the stack starts on a cache line, as MKL's results depend on that; else to rounding."""
    options = {"precondition_frequency": 2, "second_moment": "rotate", "adam_warmup_steps": 3}
    stack = [parameter(*shape)]
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in stack[0].detach()]
    together, apart = SOAP(stack, matrix_layout="per_expert", **options), SOAP(alone, **options)
    for step in range(9):
        give_gradients(stack, step)
        for p, g in zip(alone, stack[0].grad, strict=True):
            p.grad = g.clone()
        together.step()
        apart.step()
    for p, expected in zip(alone, stack[0], strict=True):
        torch.testing.assert_close(p.detach(), expected.detach(), rtol=0, atol=tolerance)


def test_an_expert_without_tokens_keeps_factors_and_basis() -> None:
    p = parameter(3, 4, 4)
    optimizer = SOAP([p], matrix_layout="per_expert", precondition_frequency=1)
    run(optimizer, [p], range(3))
    before = {key: optimizer.state[p][key].clone() for key in ("factor_0", "factor_1", "basis_0", "basis_1")}
    give_gradients([p], 3)
    p.grad[1] = 0
    optimizer.step()
    for key, value in before.items():
        after = optimizer.state[p][key]
        assert same(after[1], value[1])
        assert not torch.equal(after[0], value[0])
    assert optimizer.counters["refreshes_skipped"] == 2


def test_an_expert_that_never_saw_a_token_is_left_alone() -> None:
    p = parameter(2, 4, 4)
    start = p.detach().clone()
    optimizer = SOAP([p], matrix_layout="per_expert", precondition_frequency=1, weight_decay=0.0)
    for step in range(5):
        give_gradients([p], step)
        p.grad[0] = 0
        optimizer.step()
    assert same(p.detach()[0], start[0])
    assert torch.equal(optimizer.state[p]["basis_0"][0], torch.eye(4))


@pytest.mark.parametrize("use_eigh", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (64, 16), (16, 64), (128, 32)], ids=str)
def test_first_steps_do_not_blow_up_when_the_second_moment_is_rotated(shape: tuple[int, int], use_eigh: bool) -> None:
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = SOAP([p], lr=1.0, weight_decay=0.0, precondition_frequency=1, second_moment="rotate", use_eigh=use_eigh)
    for step in range(20):
        before = p.detach().clone()
        run(optimizer, [p], range(step, step + 1))
        assert (p.detach() - before).square().mean().sqrt() <= 1.1


@pytest.mark.parametrize(
    "options", [{}, {"use_decoupled_weight_decay": False, "weight_decay": 0.3}, {"matrix_layout": "per_expert"}], ids=str
)
def test_gradients_are_never_modified(options: dict[str, Any]) -> None:
    p = parameter(3, 4, 4)
    optimizer = SOAP([p], precondition_frequency=1, **options)
    for step in range(3):
        give_gradients([p], step)
        before = p.grad.clone()
        optimizer.step()
        assert same(p.grad, before)


def test_a_parameter_without_gradient_is_left_alone_and_its_step_stands_still() -> None:
    p, q = parameter(4, 4), parameter(4, 4, seed=1)
    optimizer = SOAP([p, q])
    run(optimizer, [p], range(3))
    assert same(q.detach(), parameter(4, 4, seed=1).detach())
    assert q not in optimizer.state
    run(optimizer, [q], range(2))
    p.grad = None
    assert [int(optimizer.state[x]["step"]) for x in (p, q)] == [5, 2]


def test_non_contiguous_gradients_and_parameters() -> None:
    wide = parameter(6, 4)
    tall = torch.nn.Parameter(wide.detach().clone().T)
    assert not tall.is_contiguous()
    a, b = SOAP([wide], precondition_frequency=1), SOAP([tall], precondition_frequency=1)
    for step in range(4):
        give_gradients([wide], step)
        tall.grad = wide.grad.T
        a.step()
        b.step()
    torch.testing.assert_close(tall.detach().T, wide.detach(), rtol=1e-4, atol=1e-6)


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = parameter(3, 3)
    optimizer = SOAP([p])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[0] == pytest.approx(parameter(3, 3).square().sum().item())
    assert losses[-1] < losses[0]


PRECISION_PROBE = """
import torch
from lather.optim import SOAP, eigenbasis, soap

{setting}
seen = []
backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
now = lambda: [backend.fp32_precision for backend in backends]
update, refresh = soap.soap_update, soap.soap_refresh
soap.soap_update = lambda *a: (seen.append(now()), update(*a))[1]
soap.soap_refresh = lambda *a: (seen.append(now()), refresh(*a))[1]
before = now()
p = torch.nn.Parameter(torch.randn(4, 4))
p.grad = torch.randn(4, 4)
SOAP([p], precondition_frequency=1, fp32_matmul_prec="highest", qr_fp32_matmul_prec="medium").step()
assert seen == [["ieee", "ieee"], ["tf32", "bf16"]], seen
assert now() == before, (now(), before)
"""


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
    ],
)
def test_matmul_precision_is_as_asked_inside_and_the_callers_own_after(setting: str) -> None:
    """In a process of its own: torch refuses to go back from one way of setting it to another."""
    probe = PRECISION_PROBE.format(setting=setting)
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_autocast_does_not_reach_the_update() -> None:
    inside, outside = [parameter(4, 6)], [parameter(4, 6)]
    a, b = SOAP(inside, precondition_frequency=1), SOAP(outside, precondition_frequency=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(a, inside, range(4))
    run(b, outside, range(4))
    assert same(inside[0].detach(), outside[0].detach())


def test_shape_annotations_are_checked_here() -> None:
    with pytest.raises(TypeError):
        eigenbasis.precondition("abc", {}, "in")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        eigenbasis.update_eigenbasis_and_momentum({}, {}, torch.zeros(1, 2, 3), torch.zeros(1, 3, 2))


def test_learning_rate_schedulers_and_options_per_group() -> None:
    p, q = parameter(4, 4), parameter(4, 4)
    optimizer = SOAP([{"params": [p]}, {"params": [q], "lr": 0.0}], lr=0.1, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    run(optimizer, [p, q], range(1))
    moved = p.detach().clone()
    assert not torch.equal(moved, parameter(4, 4).detach())
    assert same(q.detach(), parameter(4, 4).detach())
    scheduler.step()
    run(optimizer, [p, q], range(1, 2))
    assert same(p.detach(), moved)


def test_a_group_may_carry_a_label_and_what_schedulers_keep() -> None:
    optimizer = SOAP([{"params": [parameter(3, 3)], "name": "matrices", "initial_lr": 0.1}])
    assert optimizer.param_groups[0]["name"] == "matrices"
    torch.optim.lr_scheduler.StepLR(optimizer, 1, last_epoch=3)
