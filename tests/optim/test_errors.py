"""Bad gradients, bad options and failures in mid-step give one clear error, and nothing changes
that need not change."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import (
    CLASSES,
    FEW_KINDS,
    FEW_SOAP_KINDS,
    KINDS,
    all_same,
    give_gradients,
    make,
    parameter,
    parameters,
    run,
    same,
    snapshot,
)

from lather.optim import KLSOAP, SOAP, MatrixOptimizer, StackedSOAP
from lather.optim.batched import matrix_layout, optimizer, plan, state_store
from lather.optim.rules import bases, kl_soap, soap, soap_muon

every_kind = pytest.mark.parametrize("kind", KINDS)
few_kinds = pytest.mark.parametrize("kind", FEW_KINDS)

# --- gradients ------------------------------------------------------------------------------------


def with_a_bad_gradient(
    kind: str, value: float, **options: Any
) -> tuple[MatrixOptimizer, list[torch.nn.Parameter]]:
    """Take three steps of three equal parameters, and then put a number that is not finite into the
    second one's gradient."""
    params = parameters([(3, 4, 4)] * 3)
    optimizer = make(kind, params, precondition_frequency=1, **options)
    run(optimizer, params, range(3))
    give_gradients(params, 3)
    params[1].grad[0, 0, 0] = value
    return optimizer, params


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@few_kinds
def test_nonfinite_raise_changes_nothing(kind: str, value: float) -> None:
    optimizer, params = with_a_bad_gradient(kind, value)
    before = snapshot(optimizer, params)
    with pytest.raises(
        ValueError, match=r"parameter 1 of its group is not finite.*nonfinite='skip'"
    ):
        optimizer.step()
    assert all(map(same, before, snapshot(optimizer, params)))


def test_nonfinite_raise_names_the_parameter_and_makes_no_state() -> None:
    p, q = parameter(3, 3), parameter(3, 3)
    optimizer = SOAP([("first", p), ("second", q)])
    p.grad, q.grad = torch.ones(3, 3), torch.full((3, 3), torch.nan)
    with pytest.raises(ValueError, match="'second' is not finite"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@every_kind
def test_nonfinite_skip_passes_over_that_parameter_alone_and_counts(
    kind: str, value: float
) -> None:
    optimizer, params = with_a_bad_gradient(kind, value, nonfinite="skip")
    before = [p.detach().clone() for p in params]
    state = {key: x.clone() for key, x in optimizer.state[params[1]].items()}
    optimizer.step()
    assert [torch.equal(p, start) for p, start in zip(params, before, strict=True)] == [
        False,
        True,
        False,
    ]
    assert all(same(x, state[key]) for key, x in optimizer.state[params[1]].items())
    assert optimizer.counters["nonfinite_skipped"] == 1
    run(optimizer, params, range(4, 6))
    assert [int(optimizer.state[p]["step"]) for p in params] == [6, 5, 6]
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("kind", [*FEW_SOAP_KINDS, "muon_per_expert", "soap_muon", "adamw"])
def test_nonfinite_ignore_lets_it_through(kind: str) -> None:
    optimizer, params = with_a_bad_gradient(kind, torch.nan, nonfinite="ignore")
    optimizer.step()
    assert params[1].isnan().any()
    assert params[0].isfinite().all()
    assert optimizer.counters["nonfinite_skipped"] == 0


@every_kind
def test_a_gradient_whose_square_overflows_counts_as_not_finite(kind: str) -> None:
    """Otherwise second moments and factors would be infinite for ever; 1e18 is still accepted."""
    params = parameters([(4, 4), (2, 4, 4)])
    optimizer = make(kind, params, weight_decay=0.0)
    for p in params:
        p.grad = torch.full_like(p, 1e18)
    optimizer.step()
    before = snapshot(optimizer, params)
    params[1].grad[1, 0, 0] = 1e20
    with pytest.raises(ValueError, match=r"square is not; nothing was changed"):
        optimizer.step()
    assert all_same(snapshot(optimizer, params), before)


def test_factors_that_overflow_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    p = parameter(4, 6)
    optimizer = SOAP([p], precondition_frequency=1, nonfinite="ignore")
    run(optimizer, [p], range(2))
    basis = optimizer.state[p]["basis_0"].clone()
    p.grad = torch.full((4, 6), 1e25)
    optimizer.step()
    assert optimizer.counters["refreshes_failed"] == 2
    assert "4 x 4" in caplog.text
    assert "6 x 6" in caplog.text
    assert same(optimizer.state[p]["basis_0"], basis)


@pytest.mark.parametrize("lr", [float("nan"), -1.0])
def test_a_rate_that_a_scheduler_has_spoilt_is_refused_before_anything_changes(lr: float) -> None:
    params = parameters([(4, 4)])
    optimizer = SOAP(params)
    run(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    optimizer.param_groups[0]["lr"] = lr
    give_gradients(params, 2)
    with pytest.raises(ValueError, match="lr="):
        optimizer.step()
    assert all_same(snapshot(optimizer, params), before)


def test_kl_rules_divide_by_eps() -> None:
    with pytest.raises(ValueError, match="eps=0"):
        KLSOAP(parameters([(4, 4)]), 1e-3, eps=0.0)


def test_stacked_soap_refuses_experts_one_by_one() -> None:
    with pytest.raises(ValueError, match="expert_layout='stacked'"):
        StackedSOAP([{"params": parameters([(2, 4, 4)]), "matrix_layout": "per_expert"}], 1e-3)


def test_bf16_moments_refuse_rates_of_decay_that_they_cannot_carry_out() -> None:
    with pytest.raises(ValueError, match=r"betas=\(0\.9, 0\.999\) with bf16 moments"):
        SOAP(parameters([(4, 4)]), betas=(0.9, 0.999), state_dtype=torch.bfloat16)
    SOAP(parameters([(4, 4)]), betas=(0.9, 0.999), state_dtype={"bases": torch.bfloat16})


def sparse_coo(p: torch.nn.Parameter) -> None:
    p.grad = torch.eye(3).to_sparse()


def complex_valued(p: torch.nn.Parameter) -> None:
    p.grad_dtype = None
    p.grad = torch.eye(3, dtype=torch.complex64)


@pytest.mark.parametrize("give", [sparse_coo, complex_valued], ids=["sparse", "complex"])
@few_kinds
def test_sparse_and_complex_gradients_are_refused_before_anything_changes(
    kind: str, give: Callable[[Any], None]
) -> None:
    params = parameters([(3, 3), (3, 3)])
    optimizer = make(kind, params)
    give_gradients(params, 0)
    give(params[1])
    with pytest.raises(TypeError, match=r"parameter 1 of its group is (sparse|complex)"):
        optimizer.step()
    assert all_same(params, parameters([(3, 3), (3, 3)]))
    assert not optimizer.state


# --- options --------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[str, Any]] = [
    ("lr", -1e-3),
    ("lr", float("nan")),
    ("lr", "fast"),
    ("lr", torch.tensor([0.1, 0.1])),
    ("betas", (0.9, 1.0)),
    ("betas", (-0.1, 0.9)),
    ("betas", (0.9,)),
    ("shampoo_beta", 1.0),
    ("eps", -1e-8),
    ("weight_decay", -0.1),
    ("precondition_frequency", 0),
    ("precondition_frequency", 2.5),
    ("correct_bias", 1),
    ("precondition_frequency", True),
    ("max_precond_dim", -1),
    ("second_moment", "turn"),
    ("fp32_matmul_prec", "tf32"),
    ("qr_fp32_matmul_prec", "low"),
    ("refresh_method", "polar"),
    ("adaptive_update_tolerance", 0.0),
    ("adaptive_update_tolerance", 1.0),
    ("power_iter_steps", 0),
    ("max_update_rms", -1.0),
    ("matrix_layout", "per_head"),
    ("nonfinite", "warn"),
    ("state_dtype", torch.float16),
    ("state_dtype", {"factors": torch.bfloat16}),
    ("state_dtype", {"moments": torch.float64}),
    ("max_state_bytes", 0),
    ("bucket_bytes", 0),
    ("num_streams", 0),
]
BAD_OF_SOAP: list[tuple[str, Any]] = [("precondition_warmup_steps", -1)]
BAD_OF_KL: list[tuple[str, Any]] = [
    ("initial_eigenvalue", 0.0),
    ("weight_decay_method", "coupled"),
    ("adam_warmup_steps", -1),
    ("shampoo_beta", -1.0),
]
BAD_OF_MUON: list[tuple[str, Any]] = [
    ("lr", -1e-3),
    ("momentum", 1.0),
    ("momentum", "0.9"),
    ("nesterov", 1),
    ("steps", 0),
    ("steps", 2.0),
    ("coefficients", "cubic"),
    ("scale", "rms"),
    ("scale", 0),
    ("scale", -1.0),
    ("scale", float("inf")),
    ("scale", True),
    ("newton_schulz_dtype", "float16"),
    ("newton_schulz_dtype", torch.bfloat16),
    ("normalize", "column"),
    ("beta2", 1.0),
    ("weight_decay", -1),
    ("weight_decay_method", "coupled"),
    ("keep_norm", "yes"),
]
BAD_OF_SOAP_MUON: list[tuple[str, Any]] = [
    ("shampoo_beta", -1),
    ("eps", -1e-8),
    ("sides", "left"),
    ("statistics_of", "weights"),
    ("precondition_frequency", 0),
    ("precondition_warmup_steps", -1),
    ("muon_warmup_steps", 0),
]
BAD = [
    *(("SOAP", *bad) for bad in BAD_OPTIONS + BAD_OF_SOAP),
    *(
        (name, *bad)
        for name in ("KLSOAP", "REKLS", "StackedSOAP")
        for bad in BAD_OPTIONS[::4] + BAD_OF_KL
    ),
    *((name, *bad) for name in ("Muon", "SOAPMuon") for bad in BAD_OF_MUON),
    *(("SOAPMuon", *bad) for bad in BAD_OF_SOAP_MUON),
    *(
        ("AdamW", *bad)
        for bad in (("lr", -1.0), ("betas", (0.9, 1.0)), ("eps", -1.0), ("correct_bias", 0))
    ),
    *(
        ("SOAP", *bad)
        for bad in (
            ("sides", "left"),
            ("statistics_of", "weights"),
            ("orthogonalize", 1),
            ("keep_norm", 1),
            ("momentum_in", 1),
        )
    ),
    *(("KLSOAP", *bad) for bad in (("sides", "left"), ("eigenvalue_floor", -1e-3))),
]


@pytest.mark.parametrize(("name", "option", "value"), BAD, ids=str)
def test_bad_options_are_named_with_value_and_constraint(
    name: str, option: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"^{option}=.* is not valid: give ") as error:
        CLASSES[name]([{"params": [parameter(2, 2)], option: value}], lr=1e-3)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("name", ["SOAP", "KLSOAP"])
def test_decay_rates_that_bf16_moments_cannot_carry_out_are_refused(name: str) -> None:
    params = [parameter(2, 2)]
    CLASSES[name](params, lr=1e-3, betas=(0.9, 1 - 2**-8), state_dtype=torch.bfloat16)
    CLASSES[name](params, lr=1e-3, betas=(0.9, 0.999), state_dtype={"bases": torch.bfloat16})
    for dtype in (torch.bfloat16, {"moments": torch.bfloat16}):
        with pytest.raises(
            ValueError,
            match=(
                r"betas=\(0\.9, 0\.999\) with bf16 "
                r"moments.*state_dtype=\{'bases': torch\.bfloat16\}"
            ),
        ):
            CLASSES[name](params, lr=1e-3, betas=(0.9, 0.999), state_dtype=dtype)


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
@pytest.mark.parametrize("name", CLASSES)
def test_bad_options_are_refused_as_arguments_too(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}=-1.0 is not valid: give a number >= 0"):
        CLASSES[name]([parameter(2, 2)], **{"lr": 1e-3, option: -1.0})


@pytest.mark.parametrize("name", CLASSES)
def test_options_that_nobody_knows_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match="dampening"):
        CLASSES[name]([parameter(2, 2)], lr=1e-3, dampening=0.9)


@pytest.mark.parametrize("name", CLASSES)
def test_a_bad_group_leaves_the_optimizer_as_it_was(name: str) -> None:
    optimizer = CLASSES[name]([parameter(2, 2)], lr=1e-3)
    bad_groups: list[dict[str, Any]] = [
        {"lr": -1.0},
        {"learning_rate": 1.0},
        {"max_state_bytes": 10},
        {"matrix_layout": "stacked", "params": [parameter(2, 2, 2, 2)]},
    ]
    if name != "AdamW":  # AdamW treats all shapes alike
        bad_groups.append({"matrix_layout": "per_expert", "params": [parameter(3)]})
    for bad in bad_groups:
        with pytest.raises(
            ValueError, match=r"lr|learning_rate|max_state_bytes|stacked|per_expert"
        ):
            optimizer.add_param_group({"params": [parameter(3, 3)], **bad})
        assert len(optimizer.param_groups) == 1


def test_complex_parameters_and_vectors_among_experts_are_refused() -> None:
    with pytest.raises(TypeError, match="complex"):
        SOAP([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    for layout in ("per_expert", "stacked"):
        with pytest.raises(
            ValueError,
            match=rf"'norm' has shape \(3,\).*{layout}.*needs a matrix.*matrix_layout='tensor'",
        ):
            SOAP([("norm", parameter(3))], matrix_layout=layout)
    with pytest.raises(
        ValueError,
        match=(
            r"'kernel': matrix_layout='stacked' takes \(experts, "
            r"m, n\), not 4 dims: use 'per_expert'"
        ),
    ):
        KLSOAP([("kernel", parameter(2, 2, 2, 2))], 1e-3, matrix_layout="stacked")


def test_too_much_state_is_refused_with_size_parameter_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"'big'.*GiB.*max_precond_dim.*per_expert") as error:
        SOAP(
            [("big", torch.nn.Parameter(torch.empty(4096, 4096, device="meta")))],
            max_state_bytes=2**28,
        )
    assert "0.375 GiB" in str(error.value)
    stack = torch.nn.Parameter(torch.empty(128, 768, 2048, device="meta"))
    with pytest.raises(ValueError, match=r"73\.\d+ GiB"):
        SOAP([stack], matrix_layout="stacked", max_precond_dim=10**6, max_state_bytes=2**35)
    # the default of max_precond_dim makes this one-sided
    SOAP([stack], matrix_layout="stacked", max_state_bytes=2**35)


def test_published_arguments_of_soap_become_options() -> None:
    """They may be given to the constructor and in groups, and are in no group afterwards."""
    p, q, r = (parameter(2, 2) for _ in range(3))
    plain = {"params": [q], "use_eigh": False, "use_decoupled_weight_decay": True}
    own = {"params": [r], "weight_decay_method": "palm", "use_decoupled_weight_decay": np.True_}
    opt = SOAP([{"params": [p]}, plain, own], use_eigh=True, use_decoupled_weight_decay=False)
    options = [
        (group["refresh_method"], group["weight_decay_method"]) for group in opt.param_groups
    ]
    assert options == [("eigh", "l2"), ("auto", "decoupled"), ("eigh", "palm")]
    assert not {"use_eigh", "use_decoupled_weight_decay"} & set().union(*opt.param_groups)
    opt.param_groups[0]["use_eigh"] = True
    p.grad = torch.ones(2, 2)
    opt.step()
    opt.param_groups[1]["use_eigh"] = True
    with pytest.raises(ValueError, match=r'asks for another step .*"refresh_method": "eigh"'):
        opt.step()
    with pytest.raises(ValueError, match="use_eigh=True contradicts refresh_method='qr'"):
        SOAP([p], use_eigh=True, refresh_method="qr")
    with pytest.raises(ValueError, match="use_decoupled_weight_decay=False contradicts weight_dec"):
        SOAP([p], use_decoupled_weight_decay=False, weight_decay_method="palm")
    with pytest.raises(ValueError, match="use_eigh='no' is not valid: give True or False"):
        SOAP([p], use_eigh="no")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="KLSOAP has no argument 'use_eigh'"):
        KLSOAP([p], use_eigh=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("adam", "precondition", "expected"),
    [(0, 0, 1), (-3, 0, 1), (5, 0, 5), (5, 5, 4), (9, 3, 2), (4, 1, 1), (2, 6, 2)],
)
def test_warm_ups_are_brought_into_order_and_logged(
    adam: int, precondition: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lather"):
        optimizer = SOAP(
            [parameter(2, 2)], adam_warmup_steps=adam, precondition_warmup_steps=precondition
        )
    assert optimizer.param_groups[0]["adam_warmup_steps"] == expected
    assert ("adam_warmup_steps" in caplog.text) == (adam != expected)


@pytest.mark.parametrize("value", [0, 2.5, None])
@pytest.mark.parametrize("kind", ["soap", "rekls"])
def test_a_frequency_that_gives_nonsense_raises_before_anything_changes(
    kind: str, value: Any
) -> None:
    p = parameter(3, 3)
    optimizer = make(kind, [p], precondition_frequency=lambda t: value if t == 3 else 1)
    run(optimizer, [p], range(2))
    before = snapshot(optimizer, [p])
    with pytest.raises(ValueError, match=r"precondition_frequency.*step 3"):
        run(optimizer, [p], range(2, 3))
    assert all(map(same, before, snapshot(optimizer, [p])))


# --- failures in mid-step -------------------------------------------------------------------------

FAULTS: dict[str, list[tuple[Any, str]]] = {
    "inspect": [(optimizer, "inspect_gradients")],
    "buckets": [(state_store, "make_buckets")],
    "allocation": [(matrix_layout.StateEntry, "allocate")],
    "statistics": [
        (soap, "update_kronecker_factors"),
        (kl_soap, "update_kronecker_factors_kl"),
        (soap_muon, "update_kronecker_factors"),
    ],
    "adam": [
        (soap, "adam_in_basis"),
        (kl_soap, "adam_in_basis"),
        (soap_muon.MuonRule, "numerator"),
    ],
    "precondition": [
        (soap, "precondition"),
        (kl_soap, "precondition"),
        (soap_muon, "precondition"),
    ],
    "refresh": [(bases, "update_eigenbasis_and_momentum")],
    "gather": [(plan.Chunk, "gradients")],
    "change": [(plan, "change_weights")],
    "store": [(plan.Chunk, "store")],
}


class InjectedError(Exception):
    pass


@pytest.mark.parametrize("call", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("phase", FAULTS)
@pytest.mark.parametrize("kind", ["soap_stacked", "kl_soap_per_expert", "soap_muon_per_expert"])
def test_an_exception_in_any_phase_leaves_parameters_and_gradients_in_shape(
    kind: str, phase: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters([(3, 4, 5), (3, 5, 4), (5,)], torch.bfloat16 if call else torch.float32)
    params.append(torch.nn.Parameter(parameter(4, 7).detach().T))
    optimizer = make(kind, params, precondition_frequency=1, maximize=bool(call))
    steps = 0 if phase in ("buckets", "allocation") else 2
    run(optimizer, params, range(steps))
    give_gradients(params, 3)
    seen = [
        (p.shape, p.data_ptr(), p.stride(), p.requires_grad, p.dtype, p.grad, p.grad.clone())
        for p in params
    ]
    calls = 0

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > call:
                raise InjectedError
            return original(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for owner, name in FAULTS[phase]:
            patch.setattr(owner, name, failing(getattr(owner, name)))
        if call and phase in ("inspect", "buckets"):
            optimizer.step()  # this is called once in a step
            assert calls == 1
            return
        with pytest.raises(InjectedError):
            optimizer.step()
    for p, (shape, pointer, strides, requires_grad, dtype, grad, value) in zip(
        params, seen, strict=True
    ):
        assert (p.shape, p.data_ptr(), p.stride(), p.requires_grad, p.dtype) == (
            shape,
            pointer,
            strides,
            requires_grad,
            dtype,
        )
        assert p.grad is grad
        assert same(grad, value)
        assert p.isfinite().all()
    run(optimizer, params, range(4, 5))
    assert all(p.isfinite().all() for p in params)
