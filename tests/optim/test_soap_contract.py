"""What every user of SOAP relies on, whatever the options: special cases, state, safety, errors."""

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from lather.optim import SOAP, eigenbasis, state_bytes
from lather.optim.soap import check_soap_options


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def give_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def snapshot(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> list[Tensor]:
    state = [value.clone() for p in params for value in optimizer.state.get(p, {}).values()]
    return [p.detach().clone() for p in params] + state


# --- special cases ------------------------------------------------------------------------------------------------------------------


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


def test_rotating_keeps_the_mass_of_the_second_moment_and_its_sign() -> None:
    p = parameter(12, 7)
    optimizer = SOAP([p], precondition_frequency=1, second_moment="rotate", betas=(0.9, 0.999), state_dtype=torch.float64)
    permuted = copy.deepcopy(optimizer)
    run(optimizer, [p], range(6))
    give_gradients([p], 6)
    state = optimizer.state[p]
    v = state["exp_avg_sq"]
    mass_before = v.sum().item()
    eigenbasis.update_eigenbasis_and_momentum(
        {dim: state[f"factor_{dim}"].unsqueeze(0) for dim in (0, 1)},
        {dim: state[f"basis_{dim}"].unsqueeze(0) for dim in (0, 1)},
        state["exp_avg"].unsqueeze(0),
        v.unsqueeze(0),
        second_moment="rotate",
    )
    assert v.min() >= 0
    assert v.sum().item() == pytest.approx(mass_before, rel=1e-12)
    assert permuted.param_groups[0]["second_moment"] == "rotate"


def test_permuting_moves_the_second_moment_with_its_columns() -> None:
    """A diagonal factor whose order is wrong: columns, and what is kept in their coordinates, must be put in order together."""
    factors = {0: torch.diag(torch.tensor([1.0, 3.0, 2.0])).unsqueeze(0)}
    bases = {0: torch.eye(3).unsqueeze(0)}
    m, v = torch.tensor([[10.0, 30.0, 20.0]]), torch.tensor([[1.0, 3.0, 2.0]])
    eigenbasis.update_eigenbasis_and_momentum(factors, bases, m, v, second_moment="permute")
    assert v.tolist() == [[3.0, 2.0, 1.0]]
    assert m.abs().tolist() == [[30.0, 20.0, 10.0]]
    assert bases[0].abs()[0].argmax(0).tolist() == [1, 2, 0]


def test_when_all_factors_are_skipped_nothing_changes() -> None:
    p = parameter(5, 8)
    optimizer = SOAP([p], precondition_frequency=1, adam_warmup_steps=3)
    run(optimizer, [p], range(8))
    state = optimizer.state[p]
    names = ("basis_0", "basis_1", "exp_avg", "exp_avg_sq")
    before = {key: state[key].clone() for key in names}
    for second_moment in ("permute", "rotate"):
        counts = eigenbasis.update_eigenbasis_and_momentum(
            {dim: state[f"factor_{dim}"].unsqueeze(0) for dim in (0, 1)},
            {dim: state[f"basis_{dim}"].unsqueeze(0) for dim in (0, 1)},
            state["exp_avg"].unsqueeze(0),
            state["exp_avg_sq"].unsqueeze(0),
            second_moment=second_moment,
            tolerance=0.999,
        )
        assert int(counts.skipped) == 2
        assert all(same(state[key], value) for key, value in before.items())


def test_momentum_ends_in_the_current_basis_when_only_one_factor_is_skipped() -> None:
    torch.manual_seed(0)
    g = torch.randn(1, 6, 6, dtype=torch.float64)
    factors = {0: g @ g.mT, 1: torch.diag(torch.arange(6.0, 0, -1, dtype=torch.float64)).unsqueeze(0)}
    bases = {0: torch.linalg.qr(torch.randn_like(g)).Q, 1: torch.eye(6, dtype=torch.float64).unsqueeze(0)}
    m = torch.randn_like(g)
    outside = eigenbasis.precondition(m, bases, "out")
    counts = eigenbasis.update_eigenbasis_and_momentum(factors, bases, m, g.square(), tolerance=1e-7)
    assert (int(counts.skipped), int(counts.done)) == (1, 1)
    torch.testing.assert_close(eigenbasis.precondition(m, bases, "out"), outside, rtol=0, atol=1e-13)


# --- eigendecompositions that fail --------------------------------------------------------------------------------------------------


def test_eigh_that_fails_in_fp32_is_retried_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def fails_in_fp32(k: Tensor) -> Any:
        if k.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(k)

    x = torch.randn(3, 5, 5)
    expected, _ = eigenbasis.get_eigenbasis_eigh(x @ x.mT)
    monkeypatch.setattr(torch.linalg, "eigh", fails_in_fp32)
    found, failed = eigenbasis.get_eigenbasis_eigh(x @ x.mT)
    assert not failed.any()
    torch.testing.assert_close(found.abs(), expected.abs(), rtol=0, atol=1e-3)


def test_eigh_that_always_fails_keeps_the_old_basis_and_is_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p = parameter(4, 6)
    optimizer = SOAP([p], precondition_frequency=1, use_eigh=True)
    run(optimizer, [p], range(3))
    basis, momentum = optimizer.state[p]["basis_1"].clone(), optimizer.state[p]["exp_avg"].clone()

    def fails(k: Tensor) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    run(optimizer, [p], range(3, 4))
    assert same(optimizer.state[p]["basis_1"], basis)
    assert optimizer.counters["refreshes_failed"] == 2
    assert "6 x 6" in caplog.text
    assert p.isfinite().all()
    assert not torch.equal(optimizer.state[p]["exp_avg"], momentum)


def test_one_bad_matrix_does_not_cost_the_others_their_basis() -> None:
    x = torch.randn(3, 4, 4)
    k = x @ x.mT
    k[1] = torch.nan
    old = torch.linalg.qr(torch.randn(3, 4, 4)).Q
    q, failed = eigenbasis.get_eigenbasis_eigh(k, old)
    assert failed.tolist() == [False, True, False]
    assert torch.equal(q[1], old[1])
    for index in (0, 2):
        rotated = q[index].T @ k[index] @ q[index]
        assert (rotated - rotated.diagonal().diag()).abs().max() < 1e-4


# --- state --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_before", [0, 1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_dict_is_exact_and_the_next_steps_are_the_same(dtype: torch.dtype, steps_before: int) -> None:
    options = {"precondition_frequency": 3, "second_moment": "rotate"}
    params = [parameter(5, 6, dtype=dtype), parameter(2, 4, 3, dtype=dtype), parameter(6, dtype=dtype), parameter(dtype=dtype)]
    optimizer = SOAP(params, **options)
    run(optimizer, params, range(steps_before))

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed_params = copy.deepcopy(params)
    resumed = SOAP(resumed_params, **options)
    resumed.load_state_dict(torch.load(file))
    for p, q in zip(params, resumed_params, strict=True):
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        assert all(same(value, resumed.state[q][key]) for key, value in optimizer.state[p].items())

    run(optimizer, params, range(steps_before, steps_before + 5))
    run(resumed, resumed_params, range(steps_before, steps_before + 5))
    for p, q in zip(params, resumed_params, strict=True):
        assert same(p.detach(), q.detach())


def test_loaded_state_is_a_copy() -> None:
    p, q = parameter(4, 4), parameter(4, 4)
    first, second = SOAP([p]), SOAP([q])
    run(first, [p], range(2))
    second.load_state_dict(first.state_dict())
    before = first.state[p]["exp_avg"].clone()
    run(second, [q], range(2, 4))
    assert same(first.state[p]["exp_avg"], before)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_of_the_optimizer_go_on_by_themselves(how: Any) -> None:
    p = parameter(4, 6)
    optimizer = SOAP([p], precondition_frequency=2)
    run(optimizer, [p], range(3))
    other = how(optimizer)
    q = other.param_groups[0]["params"][0]
    assert other.counters == optimizer.counters
    run(optimizer, [p], range(3, 6))
    run(other, [q], range(3, 6))
    assert q is not p
    assert same(p.detach(), q.detach())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((5, 6), {}),
        ((3, 4, 5), {}),
        ((3, 4, 5), {"matrix_layout": "per_expert"}),
        ((7,), {}),
        ((7,), {"precondition_1d": True}),
        ((), {}),
        ((9, 4), {"max_precond_dim": 8}),
        ((4, 4), {"state_dtype": torch.float64}),
        ((0, 5), {}),
    ],
    ids=str,
)
def test_state_bytes_is_what_is_allocated(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = SOAP([p], **options)
    optimizer.init_state()
    assert state_bytes(shape, options) == sum(value.numel() * value.element_size() for value in optimizer.state[p].values())


def test_init_state_makes_the_keys_that_the_first_step_makes_and_changes_nothing() -> None:
    params = [parameter(4, 5), parameter(3, 4, 5), parameter(6)]
    prepared, plain = SOAP(params), SOAP(copy.deepcopy(params))
    plain_params = plain.param_groups[0]["params"]
    prepared.init_state()
    run(prepared, params, range(4))
    run(plain, plain_params, range(4))
    for p, q in zip(params, plain_params, strict=True):
        assert prepared.state[p].keys() == plain.state[q].keys()
        assert same(p.detach(), q.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_state_is_fp32_whatever_the_parameter_and_wide_parameters_are_not_rounded(dtype: torch.dtype) -> None:
    p = parameter(4, 6, dtype=dtype)
    p.data += 1e-10
    start = p.detach().clone()
    optimizer = SOAP([p], lr=0.0, weight_decay=0.0)
    run(optimizer, [p], range(3))
    assert {value.dtype for value in optimizer.state[p].values()} == {torch.float32}
    assert same(p.detach(), start)


# --- what a step leaves alone -------------------------------------------------------------------------------------------------------


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


def test_the_callers_matmul_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        p = parameter(4, 4)
        run(SOAP([p], precondition_frequency=1), [p], range(3))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


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


# --- bad gradients ------------------------------------------------------------------------------------------------------------------


def nan_setup(nonfinite: str) -> tuple[SOAP, list[torch.nn.Parameter]]:
    params = [parameter(4, 4), parameter(3, 4, seed=1)]
    optimizer = SOAP([("first", params[0]), ("second", params[1])], nonfinite=nonfinite, precondition_frequency=1)
    run(optimizer, params, range(3))
    give_gradients(params, 3)
    params[1].grad[0, 0] = torch.nan
    return optimizer, params


def test_nonfinite_raise_names_the_parameter_and_changes_nothing() -> None:
    optimizer, params = nan_setup("raise")
    before = snapshot(optimizer, params)
    with pytest.raises(ValueError, match=r"'second' is not finite.*nonfinite='skip'"):
        optimizer.step()
    assert all(map(same, before, snapshot(optimizer, params)))


def test_nonfinite_skip_passes_over_that_parameter_alone_and_counts() -> None:
    optimizer, params = nan_setup("skip")
    first, second = (p.detach().clone() for p in params)
    optimizer.step()
    assert not torch.equal(params[0].detach(), first)
    assert same(params[1].detach(), second)
    assert int(optimizer.state[params[1]]["step"]) == 3
    assert optimizer.counters["nonfinite_skipped"] == 1


def test_nonfinite_ignore_lets_it_through() -> None:
    optimizer, params = nan_setup("ignore")
    optimizer.step()
    assert params[1].isnan().any()


def test_sparse_gradient_is_refused_before_anything_changes() -> None:
    p, embedding = parameter(3, 3), torch.nn.Embedding(5, 3, sparse=True)
    optimizer = SOAP([p, embedding.weight])
    give_gradients([p], 0)
    embedding(torch.tensor([1])).sum().backward()
    before = p.detach().clone()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    assert same(p.detach(), before)
    assert not optimizer.state


# --- bad options --------------------------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    ("lr", -1e-3),
    ("lr", float("nan")),
    ("lr", "fast"),
    ("betas", (0.9, 1.0)),
    ("betas", (-0.1, 0.9)),
    ("betas", (0.9,)),
    ("shampoo_beta", 1.0),
    ("eps", -1e-8),
    ("weight_decay", -0.1),
    ("use_decoupled_weight_decay", 1),
    ("precondition_frequency", 0),
    ("precondition_frequency", 2.5),
    ("precondition_warmup_steps", -1),
    ("adam_warmup_steps", 1.5),
    ("max_precond_dim", -1),
    ("second_moment", "turn"),
    ("fp32_matmul_prec", "tf32"),
    ("qr_fp32_matmul_prec", "low"),
    ("adaptive_update_tolerance", 0.0),
    ("adaptive_update_tolerance", 1.0),
    ("power_iter_steps", 0),
    ("max_update_rms", -1.0),
    ("matrix_layout", "per_head"),
    ("nonfinite", "warn"),
    ("state_dtype", torch.bfloat16),
    ("max_state_bytes", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS, ids=str)
def test_bad_option_names_itself_its_value_and_the_constraint(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as error:
        check_soap_options({**SOAP([parameter(2, 2)]).defaults, name: value})
    assert repr(value) in str(error.value)
    assert "give " in str(error.value)


def test_bad_option_in_a_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = SOAP([parameter(2, 2)])
    for bad in ({"lr": -1.0}, {"learning_rate": 1.0}, {"max_state_bytes": 10}):
        with pytest.raises(ValueError, match=r"lr|learning_rate|max_state_bytes"):
            optimizer.add_param_group({"params": [parameter(3, 3)], **bad})
        assert len(optimizer.param_groups) == 1


def test_complex_parameters_and_vectors_among_experts_are_refused() -> None:
    with pytest.raises(TypeError, match="complex"):
        SOAP([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match=r"'norm' has shape \(3,\).*per_expert.*needs a matrix"):
        SOAP([("norm", parameter(3))], matrix_layout="per_expert")


def test_too_much_state_is_refused_with_size_parameter_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"'big'.*GiB.*max_precond_dim.*per_expert") as error:
        SOAP([("big", torch.nn.Parameter(torch.empty(4096, 4096, device="meta")))], max_state_bytes=2**28)
    assert "0.375 GiB" in str(error.value)


@pytest.mark.parametrize(
    ("adam", "precondition", "expected"), [(0, 0, 1), (-3, 0, 1), (5, 0, 5), (5, 5, 4), (9, 3, 2), (4, 1, 1), (2, 6, 2)]
)
def test_warm_ups_are_brought_into_order_and_logged(adam: int, precondition: int, expected: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lather"):
        optimizer = SOAP([parameter(2, 2)], adam_warmup_steps=adam, precondition_warmup_steps=precondition)
    assert optimizer.param_groups[0]["adam_warmup_steps"] == expected
    assert ("adam_warmup_steps" in caplog.text) == (adam != expected)
