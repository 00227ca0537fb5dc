"""The contract that users of every optimizer and layout rely on: special cases, and the things that
a step leaves alone."""

import pickle
from typing import Any

import pytest
import torch
from optim_helpers import (
    CODED_KINDS,
    COUPLED,
    FEW_KINDS,
    FEW_SOAP_KINDS,
    FULL_RANK,
    KINDS,
    MATRICES,
    SHAPES,
    all_same,
    clones,
    copy_gradients,
    give_gradients,
    largest_difference,
    make,
    parameter,
    parameters,
    run,
    run_both,
    run_of,
    same,
)
from torch import Tensor, nn

from in_turn import in_turn
from lather.optim import SOAP, AdamW, Muon
from lather.optim.batched import formats

few_kinds = pytest.mark.parametrize("kind", [*FEW_KINDS, "soap_per_expert_int8", "adamw_int8"])
every_kind = pytest.mark.parametrize("kind", [*KINDS, *CODED_KINDS])


@pytest.fixture(autouse=True)
def code_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in 8 bits is for matrices of any size here."""
    monkeypatch.setattr(formats, "MIN_CODED", 1)


@pytest.mark.parametrize(
    ("kind", "decay"), in_turn([*KINDS, *CODED_KINDS], ["decoupled", "coupled"])
)
def test_gradients_are_never_modified_and_graphs_from_before_the_step_raise(
    kind: str, decay: str
) -> None:
    """A step tells autograd that it has changed the weights, as torch's optimizers do: otherwise a
    backward pass would give gradients of other weights."""
    options = COUPLED if decay == "coupled" else {}
    shapes = [*SHAPES, (16,)]
    a = run_of(kind, shapes, weight_decay=0.3, precondition_frequency=1, **options)
    for step in range(4):
        give_gradients(a.params, step)
        before = [(p.grad, p.grad.clone(), p._version, (p * p).sum()) for p in a.params]
        a.optimizer.step()
        for p, (grad, value, version, loss) in zip(a.params, before, strict=True):
            assert p.grad is grad
            assert same(grad, value)
            assert p._version > version
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, p)


def test_graphs_of_parameters_that_took_no_step_and_of_new_weights_are_right() -> None:
    p, q = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
    optimizer = AdamW([p, q], lr=0.01, weight_decay=0.0)
    q.grad = torch.ones(16)
    loss = (p * p).sum()
    optimizer.step()
    (gradient,) = torch.autograd.grad(loss, p)
    torch.testing.assert_close(gradient, 2 * torch.ones(16))
    (gradient,) = torch.autograd.grad((q * q).sum(), q)
    torch.testing.assert_close(gradient, torch.full((16,), 2 * 0.99))


@few_kinds
def test_a_parameter_with_gradients_now_and_then_is_as_if_trained_alone(kind: str) -> None:
    a = run_of(kind, [(6, 4), (6, 4), (3, 4, 5), (3, 4, 5), (5,), ()], torch.float64, **FULL_RANK)
    alone = clones(a.params)
    single = [make(kind, [p], **FULL_RANK) for p in alone]
    for step in range(10):
        give_gradients(a.params, step)
        for index, p in enumerate(a.params):
            p.grad = None if (step + index) % 4 == 0 else p.grad
        copy_gradients(a.params, alone)
        a.optimizer.step()
        for optimizer, p in zip(single, alone, strict=True):
            if p.grad is not None:
                optimizer.step()
    steps = [int(one.state[p]["step"]) for one, p in zip(single, alone, strict=True)]
    assert [int(a.state(i)["step"]) for i in range(6)] == steps
    assert largest_difference(a.params, alone) <= 1e-10


def test_without_any_gradient_nothing_happens_and_no_state_is_made() -> None:
    a = run_of(SOAP, MATRICES)
    a.optimizer.step()
    assert not a.optimizer.state
    run(a.optimizer, a.params[:1], range(3))
    assert all_same(a.params[1:], parameters(MATRICES)[1:])
    assert a.optimizer.state.keys() == {a.params[0]}


@few_kinds
def test_maximize_is_descent_on_negated_gradients(kind: str) -> None:
    a, b = run_of(kind, maximize=True, **COUPLED), run_of(kind, **COUPLED)
    for step in range(6):
        give_gradients(a.params, step)
        for p, q in zip(a.params, b.params, strict=True):
            q.grad = -p.grad
        a.optimizer.step()
        b.optimizer.step()
    assert all_same(a.params, b.params)


@few_kinds
def test_closure_runs_with_gradients_and_its_loss_is_returned(kind: str) -> None:
    a = run_of(kind)

    def closure() -> Tensor:
        a.optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = sum(p.square().sum() for p in a.params)
        loss.backward()
        return loss

    start = sum(p.detach().square().sum().item() for p in a.params)
    with torch.no_grad():
        losses = [a.optimizer.step(closure).item() for _ in range(5)]
    assert losses[0] == pytest.approx(start, rel=1e-5)
    assert losses == sorted(losses, reverse=True)


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_parameter_of_any_dtype_is_the_fp32_one_rounded_once(
    kind: str, dtype: torch.dtype
) -> None:
    a = run_of(kind, SHAPES, dtype, weight_decay=0.1, state_dtype=torch.float32)
    b = run_of(kind, weight_decay=0.1)
    for step in range(3):
        before = [p.detach().clone() for p in a.params]
        for p, q in zip(a.params, b.params, strict=True):
            generator = torch.Generator().manual_seed(step)
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
            q.grad, q.data = p.grad.float(), p.detach().float()
        a.optimizer.step()
        b.optimizer.step()
        for p, q, start in zip(a.params, b.params, before, strict=True):
            if dtype is torch.float64:
                moved = (q - start.float()).double()
                torch.testing.assert_close(p - start, moved, rtol=0, atol=1e-6)
            else:
                assert same(p.detach(), q.detach().to(dtype))
    states = [a.optimizer.state[p] for p in a.params]
    assert {x.dtype for state in states for x in state.values()} == {torch.float32}


def test_an_fp64_parameter_is_not_rounded() -> None:
    a = run_of(SOAP, [(4, 6)], torch.float64, lr=0.0, weight_decay=0.0)
    a.params[0].data += 1e-10
    start = clones(a.params)
    a.steps(range(3))
    assert all_same(a.params, start)


@pytest.mark.parametrize("kind", [*FEW_KINDS, "adamw"])
def test_strides_of_gradients_do_not_matter(kind: str) -> None:
    shapes = [(6, 4), (3, 4, 5), (3, 4, 5)]
    a, b = run_of(kind, shapes), run_of(kind, shapes)
    for step in range(6):
        give_gradients(a.params, step)
        for p, q in zip(a.params, b.params, strict=True):
            q.grad = torch.empty(p.shape[::-1]).permute(*reversed(range(p.dim()))).copy_(p.grad)
            assert not q.grad.is_contiguous()
        ones = torch.ones(()).expand(3, 4, 5)
        a.params[2].grad, b.params[2].grad = ones.clone(), ones
        a.optimizer.step()
        b.optimizer.step()
    assert all_same(a.params, b.params)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in FEW_KINDS),
        *((kind, {"max_precond_dim": size}) for kind in FEW_SOAP_KINDS for size in (0, 4)),
    ],
    ids=str,
)
def test_strides_of_parameters_do_not_matter(kind: str, options: dict[str, Any]) -> None:
    shapes = [(6, 4), (3, 4, 5), *([] if "stacked" in kind else [(4, 3, 2, 2)])]
    a = run_of(kind, shapes, torch.float64, **FULL_RANK, **options)
    transposed = [
        nn.Parameter(p.detach().transpose(0, 1).contiguous().transpose(0, 1)) for p in a.params
    ]
    if len(shapes) == 3:
        transposed[2] = nn.Parameter(a.params[2].detach().to(memory_format=torch.channels_last))
    assert not any(p.is_contiguous() for p in transposed)
    strides = [p.stride() for p in transposed]
    run_both(a, (make(kind, transposed, **FULL_RANK, **options), transposed), range(6))
    assert largest_difference(a.params, transposed) <= 1e-10
    assert [p.stride() for p in transposed] == strides


@few_kinds
def test_empty_parameters_only_count_steps(kind: str) -> None:
    a = run_of(kind, [(0, 3), (3, 0), (0, 4, 4), (2, 0, 3), (0,)])
    a.steps(range(4))
    assert [int(a.state(i)["step"]) for i in range(5)] == [4] * 5
    assert not a.optimizer.counters["refreshes_done"]


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FEW_SOAP_KINDS)
def test_one_cycle_turns_rate_and_betas_as_for_adamw(kind: str) -> None:
    adam = {"betas": (0.9, 0.95), "weight_decay": 0.01}
    a = run_of(kind, SHAPES, torch.float64, **adam, max_precond_dim=0, state_dtype=torch.float64)
    b = run_of(torch.optim.AdamW, SHAPES, torch.float64, **adam)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(one.optimizer, max_lr=0.1, total_steps=10)
        for one in (a, b)
    ]
    momenta = set()
    for step in range(9):
        run_both(a, b, [step])
        momenta.add(a.groups[0]["betas"][0])
        for scheduler in schedulers:
            scheduler.step()
    assert len(momenta) == 9
    assert largest_difference(a.params, b.params) <= 1e-14


@pytest.mark.parametrize("factor", [1 / 3, 0.1])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_schedule_may_end_a_rounding_error_below_zero(factor: float, as_tensor: bool) -> None:
    a = run_of(Muon, SHAPES, lr=torch.tensor(0.01) if as_tensor else 0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        a.optimizer, start_factor=factor, end_factor=0.0, total_iters=10
    )
    for step in range(10):
        a.steps([step])
        scheduler.step()
    a.groups[0]["lr"] = a.groups[0]["lr"] * 0 - 3e-19
    loaded = run_of(Muon, SHAPES)
    loaded.optimizer.load_state_dict(a.optimizer.state_dict())
    before = [p.detach().clone() for p in a.params]
    a.steps(range(10, 12))
    loaded.steps(range(10, 11))
    assert all_same(a.params, before)
    a.groups[0]["lr"] = -1e-9
    with pytest.raises(ValueError, match="lr=-1e-09 is not valid: give a number >= 0"):
        a.steps([12])


def test_one_cycle_turns_rate_and_momentum_as_for_torchs_muon() -> None:
    ours, theirs = parameters([(6, 4)]), parameters([(6, 4)])
    # this group's rule has no momentum
    groups: Any = [{"params": ours}, {"params": [parameter(3)], "rule": "adamw"}]
    optimizers = [Muon(groups, lr=1e-2), torch.optim.Muon(theirs, lr=1e-2)]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=10) for one in optimizers
    ]
    seen = set()
    for step in range(9):
        run_both((optimizers[0], ours), (optimizers[1], theirs), [step])
        rates, expected = (
            [one.param_groups[0][key] for key in ("lr", "momentum")] for one in optimizers
        )
        assert rates == expected
        seen.add(tuple(rates))
        for scheduler in schedulers:
            scheduler.step()
    assert len(seen) == 9


@pytest.mark.parametrize("kind", [*FEW_KINDS, "adamw"])
def test_the_rate_may_be_a_tensor_that_changes(kind: str) -> None:
    rate = torch.tensor(0.25)
    a = run_of(kind, SHAPES, torch.float64, lr=rate)
    b = run_of(kind, SHAPES, torch.float64, lr=0.25)
    run_both(a, b, range(3))
    rate.fill_(0.5)
    for group in b.groups:
        group["lr"] = 0.5
    run_both(a, b, range(3, 6))
    assert all_same(a.params, b.params)


@few_kinds
def test_groups_added_in_mid_training_start_at_their_own_step_one(kind: str) -> None:
    a = run_of(kind, MATRICES, torch.float64, **FULL_RANK)
    added = parameters(MATRICES[::-1], torch.float64)
    a.steps(range(3))
    a.optimizer.add_param_group({"params": added, "lr": 0.02})
    for step in range(3, 9):
        give_gradients(a.params, step)
        give_gradients(added, step)
        a.optimizer.step()
    first = run_of(kind, MATRICES, torch.float64, **FULL_RANK)
    second = run_of(kind, MATRICES[::-1], torch.float64, **FULL_RANK, lr=0.02)
    first.steps(range(9))
    second.steps(range(3, 9))
    assert largest_difference([*a.params, *added], [*first.params, *second.params]) <= 1e-10


def test_a_pickle_holds_each_stack_of_state_once() -> None:
    sizes = []
    for count in (2, 16):
        a = run_of(SOAP, [(16, 16)] * count)
        a.steps(range(2))
        sizes.append(len(pickle.dumps(a.optimizer)))
    assert sizes[1] < 10 * sizes[0]
