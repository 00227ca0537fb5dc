"""fp64 parameters are computed in fp64; gradients are checked in the dtype of the arithmetic."""

import copy
from typing import Any

import pytest
import torch
from optim_helpers import (
    KINDS,
    clones,
    give_gradients,
    largest_difference,
    make,
    parameters,
    run,
    run_both,
)
from torch import nn

from lather import optim
from lather.optim import SOAP, AdamW, MatrixOptimizer, Muon, state_bytes

FP64 = torch.float64
NARROW = [torch.float32, torch.bfloat16, {"moments": torch.bfloat16}]
SHAPES = ((6, 6), (3, 5, 5), (5,), ())


def dtypes(optimizer: MatrixOptimizer, p: nn.Parameter) -> set[torch.dtype]:
    return {x.dtype for name, x in optimizer.state[p].items() if name != "step"}


@pytest.mark.parametrize("kind", KINDS)
def test_they_have_the_bits_of_an_fp64_state_and_others_in_their_group_stay_fp32(kind: str) -> None:
    wide, narrow = parameters(SHAPES, FP64), parameters(SHAPES)
    asked, alone = clones(wide), clones(narrow)
    both, by_name = make(kind, wide + narrow), make(kind, asked, state_dtype=FP64)
    of_fp32 = make(kind, alone, state_dtype=torch.float32)
    for step in range(5):
        for params in (wide, narrow, asked, alone):
            give_gradients(params, step)
        for optimizer in (both, by_name, of_fp32):
            optimizer.step()
    assert largest_difference(wide, asked) == 0
    assert largest_difference(narrow, alone) == 0
    assert [dtypes(both, p) for p in wide + narrow] == [{FP64}] * 4 + [{torch.float32}] * 4
    assert both.param_groups[0]["state_dtype"] is None


def test_adamw_is_torchs_in_fp64() -> None:
    ours = parameters(SHAPES, FP64)
    theirs = clones(ours)
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
    a, b = AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    run_both((a, ours), (b, theirs), range(5))
    assert largest_difference(ours, theirs) < 1e-14


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e20, 1e40, 1e150])
def test_a_gradient_whose_square_only_fp64_has_is_taken(kind: str, scale: float) -> None:
    params = parameters(SHAPES, FP64)
    optimizer = make(kind, params)
    run(optimizer, params, range(1))
    for p in params:
        p.grad = torch.full_like(p, scale)
    optimizer.step()
    run(optimizer, params, range(1, 3))
    assert all(bool(p.isfinite().all()) for p in params)
    for p in params:
        p.grad = torch.full_like(p, 1e155)
    with pytest.raises(ValueError, match="is not finite, or its square"):
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state_dtype", NARROW, ids=str)
def test_gradients_are_checked_for_a_state_that_is_asked_for(kind: str, state_dtype: Any) -> None:
    narrow = {"betas": (0.9, 0.95)} if kind in ("lion", "lion_per_expert") else {}
    params = parameters(SHAPES, FP64)
    optimizer = make(kind, params, state_dtype=state_dtype, **narrow)
    run(optimizer, params, range(2))
    assert all(FP64 not in dtypes(optimizer, p) for p in params)
    before = [p.detach().clone() for p in params]
    for value in (1e20, 1e40, -1e200):
        give_gradients(params, 2)
        params[1].grad = torch.full_like(params[1], value)
        with pytest.raises(ValueError, match="is not finite, or its square"):
            optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(params, before, strict=True))
    for group in optimizer.param_groups:
        group["nonfinite"] = "skip"
    optimizer.step()
    assert [torch.equal(p, w) for p, w in zip(params, before, strict=True)] == [
        False,
        True,
        False,
        False,
    ]
    assert optimizer.counters["nonfinite_skipped"] == 1


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, FP64)],
    ids=str,
)
def test_the_arithmetic_decides_for_narrow_parameters(dtype: torch.dtype, state_dtype: Any) -> None:
    p = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = SOAP([p], lr=0.1, state_dtype=state_dtype)
    p.grad = torch.full_like(p, 1e20)
    if state_dtype is None:
        with pytest.raises(ValueError, match="is not finite, or its square"):
            optimizer.step()
    else:
        optimizer.step()
        assert p.isfinite().all()


def test_fp16_gradients_are_checked_in_fp32() -> None:
    """Squares of large numbers overflow in fp16, and those of small ones vanish."""
    p = nn.Parameter(torch.ones(2, 4, 4, dtype=torch.float16))
    optimizer = SOAP([p], lr=0.1, matrix_layout="per_expert")
    p.grad = torch.full_like(p, 6e4)
    p.grad[1] = 6e-8
    optimizer.step()
    assert optimizer.state[p]["factor_0"].flatten(1).any(1).tolist() == [True, True]
    assert p.isfinite().all()


@pytest.mark.parametrize("state_dtype", [None, FP64, torch.float32], ids=str)
def test_an_expert_is_idle_if_the_arithmetic_has_none_of_its_squares(state_dtype: Any) -> None:
    p = nn.Parameter(torch.ones(2, 4, 4, dtype=FP64))
    optimizer = SOAP([p], lr=0.1, matrix_layout="per_expert", state_dtype=state_dtype)
    p.grad = torch.randn(2, 4, 4, dtype=FP64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    before = optimizer.state[p]["factor_0"].clone()
    p.grad[1] *= 1e-30
    optimizer.step()
    is_idle = torch.equal(optimizer.state[p]["factor_0"][1], before[1])
    assert is_idle == (state_dtype is torch.float32)


def test_norms_that_a_caller_measures_are_those_of_the_arithmetic() -> None:
    p, q = (nn.Parameter(torch.ones(4, 4, dtype=FP64)) for _ in range(2))
    optimizer = SOAP([{"params": [p]}, {"params": [q], "state_dtype": torch.float32}], lr=0.1)
    for x in (p, q):
        x.grad = torch.full_like(x, 1e30)
    with pytest.raises(ValueError, match="parameter 0 of its group"):
        optimizer.step()
    q.grad = torch.ones_like(q)
    optimizer.step()
    experts = nn.Parameter(torch.ones(2, 4, 4, dtype=FP64))
    options: dict[str, Any] = {"matrix_layout": "per_expert", "nonfinite": "ignore"}
    muon, soap = (cls([experts], **options, state_dtype=torch.float32) for cls in (Muon, SOAP))
    experts.grad = torch.full_like(experts, 1.0 + 1e-12)
    experts.grad[1] = 1e25
    muon.measure_gradients()
    assert soap.measure_gradients().of_parameter[experts].tolist() == [
        pytest.approx(4 + 4e-12, rel=1e-15),
        float("inf"),
    ]


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP", "KLSOAP", "SOAPMuon", "StackedSOAP"])
def test_state_bytes_know_the_dtype_of_the_parameter(name: str) -> None:
    cls = getattr(optim, name)
    for dtype in (torch.float32, torch.bfloat16, FP64):
        p = nn.Parameter(torch.ones(6, 4, dtype=dtype))
        optimizer = cls([p], lr=0.1)
        optimizer.init_state()
        actual = sum(x.nbytes for x in optimizer.state[p].values())
        assert state_bytes((6, 4), cls, dtype=dtype) == actual
        in_fp32 = state_bytes((6, 4), cls, dtype=dtype, state_dtype=torch.float32)
        assert in_fp32 == state_bytes((6, 4), cls)
        cls([p], lr=0.1, max_state_bytes=actual)
        with pytest.raises(ValueError, match="more than max_state_bytes"):
            cls([p], lr=0.1, max_state_bytes=actual - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_state_goes_on_as_it_was_saved(kind: str, tmp_path: Any) -> None:
    """A state that says float32 stays fp32."""
    for saved_dtype, kept in ((torch.float32, torch.float32), (None, FP64)):
        params = parameters(SHAPES, FP64)
        optimizer = make(kind, params, state_dtype=saved_dtype)
        run(optimizer, params, range(3))
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        again = clones(params)
        loaded = make(kind, again)
        loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert all(dtypes(loaded, p) == {kept} for p in again)
        run_both((optimizer, params), (loaded, again), range(3, 6))
        assert largest_difference(params, again) == 0


def test_a_copy_and_a_model_that_becomes_fp64_later() -> None:
    params = parameters(SHAPES)
    optimizer = make("soap", params)
    run(optimizer, params, range(3))
    for p in params:
        p.data = p.data.double()
        p.grad = None
    run(optimizer, params, range(3, 5))
    assert all(dtypes(optimizer, p) == {FP64} for p in params)
    copied = copy.deepcopy(optimizer)
    assert [group["state_dtype"] for group in copied.param_groups] == [None, None]


def test_options_that_change_in_a_group() -> None:
    params = parameters(SHAPES, FP64)
    optimizer = make("soap_muon", params)
    run(optimizer, params, range(2))
    for group in optimizer.param_groups:
        group["state_dtype"] = torch.float32
    run(optimizer, params, range(2, 4))
    assert all(dtypes(optimizer, p) == {torch.float32} for p in params)
    late = nn.Parameter(torch.ones(4, 4, dtype=FP64))
    optimizer.add_param_group({"params": [late], "state_dtype": None})
    late.grad = torch.full_like(late, 1e40)
    optimizer.step()
    assert dtypes(optimizer, late) == {FP64}
