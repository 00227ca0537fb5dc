"""The contract that users of every optimizer and layout rely on: special cases, and the things that
a step leaves alone."""

import copy
import pickle
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    FEW_SOAP_KINDS,
    FULL_RANK,
    KINDS,
    MATRICES,
    all_same,
    clones,
    copy_gradients,
    coupled_decay,
    give_gradients,
    largest_difference,
    make,
    parameter,
    parameters,
    run,
    run_both,
    same,
)
from torch import Tensor

from lather.optim import KLSOAP, SOAP, Muon

every_kind = pytest.mark.parametrize("kind", KINDS)
few_kinds = pytest.mark.parametrize("kind", FEW_KINDS)


@pytest.mark.parametrize("decay", ["decoupled", "coupled"])
@every_kind
def test_gradients_are_never_modified(kind: str, decay: str) -> None:
    params = parameters()
    options = coupled_decay(kind) if decay == "coupled" else {}
    optimizer = make(kind, params, weight_decay=0.3, precondition_frequency=1, **options)
    for step in range(4):
        give_gradients(params, step)
        before = [(p.grad, p.grad.clone()) for p in params]
        optimizer.step()
        for p, (grad, value) in zip(params, before, strict=True):
            assert p.grad is grad
            assert same(grad, value)


@few_kinds
def test_a_parameter_with_gradients_now_and_then_is_as_if_trained_alone(kind: str) -> None:
    shapes = [(6, 4), (6, 4), (3, 4, 5), (3, 4, 5), (5,), ()]
    together = parameters(shapes, torch.float64)
    alone = clones(together)
    joint, single = make(kind, together, **FULL_RANK), [make(kind, [p], **FULL_RANK) for p in alone]
    for step in range(10):
        give_gradients(together, step)
        for index, p in enumerate(together):
            p.grad = None if (step + index) % 4 == 0 else p.grad
        copy_gradients(together, alone)
        joint.step()
        for optimizer, p in zip(single, alone, strict=True):
            if p.grad is not None:
                optimizer.step()
    assert [int(joint.state[p]["step"]) for p in together] == [
        int(o.state[p]["step"]) for o, p in zip(single, alone, strict=True)
    ]
    assert largest_difference(together, alone) <= 1e-10


def test_without_any_gradient_nothing_happens_and_no_state_is_made() -> None:
    p, q = parameter(4, 4), parameter(4, 4, seed=1)
    optimizer = SOAP([p, q])
    optimizer.step()
    assert not optimizer.state
    run(optimizer, [p], range(3))
    assert same(q.detach(), parameter(4, 4, seed=1).detach())
    assert q not in optimizer.state


@few_kinds
def test_maximize_is_descent_on_negated_gradients(kind: str) -> None:
    up, down = parameters(), parameters()
    a, b = (
        make(kind, up, maximize=True, **coupled_decay(kind)),
        make(kind, down, **coupled_decay(kind)),
    )
    for step in range(6):
        give_gradients(up, step)
        for p, q in zip(up, down, strict=True):
            q.grad = -p.grad
        a.step()
        b.step()
    assert all_same(up, down)


@few_kinds
def test_closure_runs_with_gradients_and_its_loss_is_returned(kind: str) -> None:
    params = parameters()
    optimizer = make(kind, params)

    def closure() -> Tensor:
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    start = sum(p.detach().square().sum().item() for p in params)
    with torch.no_grad():
        losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[0] == pytest.approx(start, rel=1e-5)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    params = parameters()
    optimizer = make("soap", params)
    run(optimizer, params, range(2))
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in params)


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@few_kinds
def test_a_parameter_of_any_dtype_is_the_fp32_one_rounded_once(
    kind: str, dtype: torch.dtype
) -> None:
    params = parameters(dtype=dtype)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    a = make(kind, params, weight_decay=0.0, state_dtype=torch.float32)
    b = make(kind, wide, weight_decay=0.0)
    for step in range(3):
        before = [p.detach().clone() for p in params]
        for p, q in zip(params, wide, strict=True):
            p.grad = (
                torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                .bfloat16()
                .to(dtype)
            )
            q.grad, q.data = p.grad.float(), p.detach().float()
        a.step()
        b.step()
        for p, q, start in zip(params, wide, before, strict=True):
            if dtype is torch.float64:
                torch.testing.assert_close(
                    p - start, (q - start.float()).double(), rtol=0, atol=1e-6
                )
            else:
                assert same(p.detach(), q.detach().to(dtype))
    assert {value.dtype for p in params for value in a.state[p].values()} == {torch.float32}


def test_an_fp64_parameter_is_not_rounded() -> None:
    p = parameter(4, 6, dtype=torch.float64)
    p.data += 1e-10
    start = p.detach().clone()
    run(SOAP([p], lr=0.0, weight_decay=0.0), [p], range(3))
    assert same(p.detach(), start)


@pytest.mark.parametrize("kind", [*FEW_KINDS, "adamw"])
def test_strides_of_gradients_do_not_matter(kind: str) -> None:
    params = parameters([(6, 4), (3, 4, 5), (3, 4, 5)])
    others = clones(params)
    a, b = make(kind, params), make(kind, others)
    for step in range(6):
        give_gradients(params, step)
        for p, q in zip(params, others, strict=True):
            q.grad = torch.empty(p.shape[::-1]).permute(*reversed(range(p.dim()))).copy_(p.grad)
            assert not q.grad.is_contiguous()
        params[2].grad, others[2].grad = (
            torch.ones(()).expand(3, 4, 5).clone(),
            torch.ones(()).expand(3, 4, 5),
        )
        a.step()
        b.step()
    assert all_same(params, others)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in FEW_KINDS),
        *((kind, {"max_precond_dim": size}) for kind in FEW_SOAP_KINDS for size in (0, 4)),
    ],
    ids=str,
)
def test_strides_of_parameters_do_not_matter(kind: str, options: dict[str, Any]) -> None:
    shapes = [(6, 4), (3, 4, 5)] + ([] if "stacked" in kind else [(4, 3, 2, 2)])
    params = parameters(shapes, torch.float64)
    transposed = [
        torch.nn.Parameter(p.detach().transpose(0, 1).contiguous().transpose(0, 1)) for p in params
    ]
    if len(shapes) == 3:
        transposed[2] = torch.nn.Parameter(params[2].detach().to(memory_format=torch.channels_last))
    assert not any(p.is_contiguous() for p in transposed)
    strides = [p.stride() for p in transposed]
    a, b = (
        make(kind, params, **FULL_RANK, **options),
        make(kind, transposed, **FULL_RANK, **options),
    )
    run_both((a, params), (b, transposed), range(6))
    assert largest_difference(params, transposed) <= 1e-10
    assert [p.stride() for p in transposed] == strides


@few_kinds
def test_empty_parameters_only_count_steps(kind: str) -> None:
    params = parameters([(0, 3), (3, 0), (0, 4, 4), (2, 0, 3), (0,)])
    optimizer = make(kind, params)
    run(optimizer, params, range(4))
    assert [int(optimizer.state[p]["step"]) for p in params] == [4] * 5
    assert not optimizer.counters["refreshes_done"]


@pytest.mark.parametrize("named", [False, True], ids=["plain", "named"])
def test_a_tied_parameter_is_updated_once(named: bool) -> None:
    p, q, alone = parameter(4, 4), parameter(4, 4, seed=1), parameter(4, 4)
    params = [("a", p), ("b", q), ("tied", p)] if named else [p, q, p]
    optimizer, single = SOAP(params), SOAP([alone])
    assert len(optimizer.param_groups[0]["params"]) == 2
    for step in range(4):
        give_gradients([p], step)
        copy_gradients([p], [alone])
        optimizer.step()
        single.step()
    assert same(p.detach(), alone.detach())


def test_parameters_without_order_are_refused_as_by_torch() -> None:
    with pytest.raises(TypeError, match="order"):
        SOAP([{"params": {parameter(2, 2), parameter(3, 3)}}])


# --- options --------------------------------------------------------------------------------------


def test_each_group_has_its_own_options() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"lr": 3e-2},
        {"betas": (0.5, 0.6)},
        {"precondition_frequency": 1},
        {"refresh_method": "eigh"},
        {"max_precond_dim": 3},
        {"max_update_rms": 0.1},
        {"fp32_matmul_prec": "high"},
        {"batched": False, "maximize": True},
        {"weight_decay": 0.5},
    ]
    for cls in (SOAP, KLSOAP):
        together, alone = (
            parameters([(4, 4)] * len(options), torch.float64),
            parameters([(4, 4)] * len(options), torch.float64),
        )
        common = {"lr": 1e-2, "precondition_frequency": 3, "state_dtype": torch.float64}
        joint = cls(
            [{"params": [p], **own} for p, own in zip(together, options, strict=True)], **common
        )
        run(joint, together, range(7))
        for index, own in enumerate(options):
            p = alone[index]
            single = cls([p], **{**common, **own})
            for step in range(7):
                give_gradients(alone, step)
                single.step()
            assert largest_difference([p], [together[index]]) <= 1e-10, own
        assert len({float(p.detach().sum()) for p in together}) == len(options)


def test_learning_rate_schedulers_drive_the_rate_of_each_group() -> None:
    p, q = parameters([(4, 4), (4, 4)])
    optimizer = SOAP([{"params": [p]}, {"params": [q], "lr": 0.0}], lr=0.1, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda t: 0.0 if t else 1.0, lambda t: 1.0]
    )
    run(optimizer, [p, q], range(1))
    moved = p.detach().clone()
    assert not torch.equal(moved, parameter(4, 4, seed=0).detach())
    assert same(q.detach(), parameter(4, 4, seed=1).detach())
    scheduler.step()
    run(optimizer, [p, q], range(1, 2))
    assert same(p.detach(), moved)


@pytest.mark.parametrize("kind", FEW_SOAP_KINDS)
def test_one_cycle_turns_rate_and_betas_as_for_adamw(kind: str) -> None:
    ours = parameters(dtype=torch.float64)
    theirs = clones(ours)
    a = make(
        kind,
        ours,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        max_precond_dim=0,
        state_dtype=torch.float64,
    )
    b = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10) for o in (a, b)
    ]
    momenta = set()
    for step in range(9):
        run_both((a, ours), (b, theirs), range(step, step + 1))
        momenta.add(a.param_groups[0]["betas"][0])
        for scheduler in schedulers:
            scheduler.step()
    assert len(momenta) == 9
    assert largest_difference(ours, theirs) <= 1e-14


def test_one_cycle_turns_rate_and_momentum_as_for_torchs_muon() -> None:
    ours = parameters([(6, 4)])
    theirs = clones(ours)
    groups: list[Any] = [[{"params": params}] for params in (ours, theirs)]
    # this group's rule has no momentum
    groups[0].append({"params": [parameter(3)], "rule": "adamw"})
    optimizers = [Muon(groups[0], lr=1e-2), torch.optim.Muon(groups[1], lr=1e-2)]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=10) for one in optimizers
    ]
    seen = set()
    for step in range(9):
        run_both((optimizers[0], ours), (optimizers[1], theirs), range(step, step + 1))
        rates, theirs_now = (
            [one.param_groups[0][key] for key in ("lr", "momentum")] for one in optimizers
        )
        assert rates == theirs_now
        seen.add(tuple(rates))
        for scheduler in schedulers:
            scheduler.step()
    assert len(seen) == 9
    assert int(optimizers[0].state[ours[0]]["step"]) == 9


def test_the_rate_may_be_a_tensor_that_changes() -> None:
    for kind in ("soap", "kl_soap", "muon_per_expert", "soap_muon", "adamw", "shampoo", "lion"):
        params = parameters(dtype=torch.float64)
        others = clones(params)
        rate = torch.tensor(0.25)
        a, b = make(kind, params, lr=rate), make(kind, others, lr=0.25)
        run_both((a, params), (b, others), range(3))
        rate.fill_(0.5)
        for group in b.param_groups:
            group["lr"] = 0.5
        run_both((a, params), (b, others), range(3, 6))
        assert all_same(params, others)


@few_kinds
def test_groups_added_in_mid_training_start_at_their_own_step_one(kind: str) -> None:
    first, second = parameters(MATRICES, torch.float64), parameters(MATRICES[::-1], torch.float64)
    a_alone, b_alone = clones(first), clones(second)
    optimizer = make(kind, first, **FULL_RANK)
    run(optimizer, first, range(3))
    optimizer.add_param_group({"params": second, "lr": 0.02})
    for step in range(3, 9):
        give_gradients(first, step)
        give_gradients(second, step)
        optimizer.step()
    run(make(kind, a_alone, **FULL_RANK), a_alone, range(9))
    run(make(kind, b_alone, **FULL_RANK, lr=0.02), b_alone, range(3, 9))
    assert largest_difference(first, a_alone) <= 1e-10
    assert largest_difference(second, b_alone) <= 1e-10


def test_a_limit_on_the_update_may_be_set_in_mid_training() -> None:
    """The clip limits a whole parameter's rms, also where plain Adam without a limit was before."""
    p = parameter(6)
    optimizer = SOAP([p], lr=1.0, weight_decay=0.0)
    run(optimizer, [p], range(2))
    optimizer.param_groups[0]["max_update_rms"] = 0.1
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["max_update_rms"] = 0.0
    q = twin.param_groups[0]["params"][0]
    before = p.detach().clone()
    run(optimizer, [p], range(2, 3))
    run(twin, [q], range(2, 3))
    u = before - q.detach()
    torch.testing.assert_close(
        before - p.detach(), u * 0.1 / u.square().mean().sqrt(), rtol=1e-4, atol=1e-6
    )


# --- copies ---------------------------------------------------------------------------------------


def pickled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    copied: torch.optim.Optimizer = pickle.loads(pickle.dumps(optimizer))
    return copied


@pytest.mark.parametrize("how", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@every_kind
def test_copies_of_the_optimizer_go_on_by_themselves(kind: str, how: Any) -> None:
    optimizer = make(kind, parameters())
    params = [p for group in optimizer.param_groups for p in group["params"]]
    run(optimizer, params, range(3))
    other = how(optimizer)
    others = [p for group in other.param_groups for p in group["params"]]
    assert other.counters == optimizer.counters
    run(optimizer, params, range(3, 6))
    run(other, others, range(3, 6))
    assert all(p is not q for p, q in zip(params, others, strict=True))
    assert all_same(params, others)
    assert other.counters == optimizer.counters


def test_a_pickle_holds_each_stack_of_state_once() -> None:
    sizes = []
    for count in (2, 16):
        params = parameters([(16, 16)] * count)
        optimizer = SOAP(params)
        run(optimizer, params, range(2))
        sizes.append(len(pickle.dumps(optimizer)))
    assert sizes[1] < 10 * sizes[0]
