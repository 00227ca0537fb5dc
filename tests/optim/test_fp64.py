"""fp64 parameters are computed in fp64; gradients are checked in the dtype of the arithmetic."""

from typing import Any

import pytest
import torch
from optim_helpers import (
    KINDS,
    all_same,
    clones,
    every_kind,
    give_gradients,
    make,
    parameters,
    run_both,
    run_of,
    through_a_file,
)
from torch import nn

from in_turn import in_turn
from lather import optim
from lather.optim import SOAP, MatrixOptimizer, Muon, state_bytes

FP64 = torch.float64
SHAPES = ((6, 6), (3, 5, 5), (5,), ())
REFUSED = "is not finite, or its square"


def dtypes(optimizer: MatrixOptimizer, *params: nn.Parameter) -> list[set[torch.dtype]]:
    states = [optimizer.state[p].items() for p in params]
    return [{x.dtype for name, x in state if name != "step"} for state in states]


@every_kind
def test_they_have_the_bits_of_an_fp64_state_and_others_in_their_group_stay_fp32(kind: str) -> None:
    wide, narrow = parameters(SHAPES, FP64), parameters(SHAPES)
    both = make(kind, wide + narrow)
    asked, alone = (
        run_of(kind, SHAPES, dtype, state_dtype=dtype) for dtype in (FP64, torch.float32)
    )
    for step in range(5):
        for params in (wide, narrow):
            give_gradients(params, step)
        both.step()
        asked.steps([step])
        alone.steps([step])
    assert all_same(wide, asked.params)
    assert all_same(narrow, alone.params)
    assert dtypes(both, *wide, *narrow) == [{FP64}] * 4 + [{torch.float32}] * 4
    assert both.param_groups[0]["state_dtype"] is None


@every_kind
def test_a_gradient_whose_square_only_fp64_has_is_taken(kind: str) -> None:
    a = run_of(kind, SHAPES, FP64)
    a.steps(range(1))
    for scale in (1e20, 1e40, 1e150):
        for p in a.params:
            p.grad = torch.full_like(p, scale)
        a.optimizer.step()
        a.steps(range(1, 3))
        assert all(bool(p.isfinite().all()) for p in a.params)
    for p in a.params:
        p.grad = torch.full_like(p, 1e155)
    with pytest.raises(ValueError, match=REFUSED):
        a.optimizer.step()


@pytest.mark.parametrize(
    ("kind", "state_dtype"),
    in_turn(KINDS, [torch.float32, torch.bfloat16, {"moments": torch.bfloat16}]),
    ids=str,
)
def test_gradients_are_checked_for_a_state_that_is_asked_for(kind: str, state_dtype: Any) -> None:
    narrow = {"betas": (0.9, 0.95)} if kind in ("lion", "lion_per_expert") else {}
    a = run_of(kind, SHAPES, FP64, state_dtype=state_dtype, **narrow)
    a.steps(range(2))
    assert not any(FP64 in found for found in dtypes(a.optimizer, *a.params))
    before = clones(a.params)
    for value in (1e20, 1e40, -1e200):
        give_gradients(a.params, 2)
        a.params[1].grad = torch.full_like(a.params[1], value)
        with pytest.raises(ValueError, match=REFUSED):
            a.optimizer.step()
    assert all_same(a.params, before)
    for group in a.groups:
        group["nonfinite"] = "skip"
    a.optimizer.step()
    unmoved = [torch.equal(p, w) for p, w in zip(a.params, before, strict=True)]
    assert unmoved == [False, True, False, False]
    assert a.optimizer.counters["nonfinite_skipped"] == 1


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, FP64)],
    ids=str,
)
def test_the_arithmetic_decides_for_narrow_parameters(dtype: torch.dtype, state_dtype: Any) -> None:
    a = run_of(SOAP, [(4, 4)], dtype, state_dtype=state_dtype)
    a.params[0].grad = torch.full_like(a.params[0], 1e20)
    if state_dtype is None:
        with pytest.raises(ValueError, match=REFUSED):
            a.optimizer.step()
    else:
        a.optimizer.step()
        assert a.params[0].isfinite().all()


def test_fp16_gradients_are_checked_in_fp32() -> None:
    """Squares of large numbers overflow in fp16, and those of small ones vanish."""
    a = run_of(SOAP, [(2, 4, 4)], torch.float16, matrix_layout="per_expert")
    a.params[0].grad = torch.full_like(a.params[0], 6e4)
    a.params[0].grad[1] = 6e-8
    a.optimizer.step()
    assert a.state(0)["factor_0"].flatten(1).any(1).tolist() == [True, True]
    assert a.params[0].isfinite().all()


@pytest.mark.parametrize("state_dtype", [None, FP64, torch.float32], ids=str)
def test_an_expert_is_idle_if_the_arithmetic_has_none_of_its_squares(state_dtype: Any) -> None:
    a = run_of(SOAP, [(2, 4, 4)], FP64, matrix_layout="per_expert", state_dtype=state_dtype)
    a.steps(range(1))
    before = a.state(0)["factor_0"].clone()
    a.params[0].grad[1] *= 1e-30
    a.optimizer.step()
    is_idle = torch.equal(a.state(0)["factor_0"][1], before[1])
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
    norms = soap.measure_gradients().of_parameter[experts].tolist()
    assert norms == [pytest.approx(4 + 4e-12, rel=1e-15), float("inf")]


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP", "KLSOAP", "SOAPMuon", "StackedSOAP"])
def test_state_bytes_know_the_dtype_of_the_parameter(name: str) -> None:
    cls = getattr(optim, name)
    for dtype in (torch.float32, torch.bfloat16, FP64):
        a = run_of(cls, [(6, 4)], dtype)
        a.optimizer.init_state()
        actual = sum(x.nbytes for x in a.state(0).values())
        assert state_bytes((6, 4), cls, dtype=dtype) == actual
        in_fp32 = state_bytes((6, 4), cls, dtype=dtype, state_dtype=torch.float32)
        assert in_fp32 == state_bytes((6, 4), cls)
        run_of(cls, [(6, 4)], dtype, max_state_bytes=actual)
        with pytest.raises(ValueError, match="more than max_state_bytes"):
            run_of(cls, [(6, 4)], dtype, max_state_bytes=actual - 1)


@pytest.mark.parametrize(("kind", "saved"), in_turn(KINDS, [torch.float32, None]), ids=str)
def test_saved_state_goes_on_as_it_was_saved(kind: str, saved: Any) -> None:
    """A state that says float32 stays fp32."""
    a, b = run_of(kind, SHAPES, FP64, state_dtype=saved), run_of(kind, SHAPES, FP64)
    a.steps(range(3))
    for p, q in zip(a.params, b.params, strict=True):
        q.data.copy_(p.data)
    b.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    assert dtypes(b.optimizer, *b.params) == [{saved or FP64}] * 4
    run_both(a, b, range(3, 6))
    assert all_same(a.params, b.params)


def test_a_model_and_options_that_change_later() -> None:
    a = run_of("soap", SHAPES)
    a.steps(range(3))
    for p in a.params:
        p.data, p.grad = p.data.double(), None
    a.steps(range(3, 5))
    assert dtypes(a.optimizer, *a.params) == [{FP64}] * 4
    for group in a.groups:
        group["state_dtype"] = torch.float32
    a.steps(range(5, 7))
    assert dtypes(a.optimizer, *a.params) == [{torch.float32}] * 4
    late = nn.Parameter(torch.ones(4, 4, dtype=FP64))
    a.optimizer.add_param_group({"params": [late], "state_dtype": None})
    late.grad = torch.full_like(late, 1e40)
    a.optimizer.step()
    assert dtypes(a.optimizer, late) == [{FP64}]
