"""The change of weights by one kernel on a GPU is that by operations one after the other, and so is
Newton-Schulz whose products come from the right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lather.optim import Muon
from lather.optim.batched import plan
from lather.optim.batched.plan import change_weights
from lather.optim.batched.roster import Change
from lather.optim.linalg import newton_schulz
from lather.optim.linalg.newton_schulz import orthogonalize
from lather.optim.rules import muon

SHAPES = [(5, 7), (3,), (2, 4, 6)]


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setattr(module, "is_gpu", lambda on: True)


@pytest.mark.parametrize(
    "change", [Change(0.3, 0.01), Change(0.3), Change(0.0, 0.01), Change(replaces=True)], ids=str
)
@pytest.mark.parametrize("transposed", [False, True])
def test_fp32_weights(change: Change, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, updates = drawn(0), drawn(1)
    if transposed:
        updates = [u.mT.contiguous().mT if u.dim() > 1 else u for u in updates]
    expected = [w.clone() for w in weights]
    change_weights(expected, updates, change)
    calls: list[Any] = []
    fused = plan.fused_sgd_
    monkeypatch.setattr(
        plan, "fused_sgd_", lambda *args, **kw: calls.append(args) or fused(*args, **kw)
    )
    as_on_a_gpu(monkeypatch, plan)
    change_weights(weights, updates, change)
    assert len(calls) == (change.lr > 0 and not transposed)
    for w, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(w, wanted, rtol=0, atol=5e-7)
        assert not torch.allclose(1.01 * w, wanted, rtol=0, atol=5e-7)


@pytest.mark.parametrize("least", [1, 10**9])
def test_updates_of_newton_schulz_in_bf16(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix takes them as they are, others by torch's kernel; the numbers are those of
    widened updates."""
    results, taken = [], list[torch.dtype]()
    change = plan.change_by_
    for narrow in (False, True):
        params = [torch.nn.Parameter(w) for w in drawn(0)]
        optimizer = Muon(params, lr=0.1, newton_schulz_dtype="bfloat16")
        if narrow:
            monkeypatch.setattr(plan, "LEAST_NARROW", least)
            for module in (plan, newton_schulz, muon):
                as_on_a_gpu(monkeypatch, module)
            monkeypatch.setattr(
                plan, "change_by_", lambda w, u, *rest: taken.append(u.dtype) or change(w, u, *rest)
            )
        for p, g in zip(params, drawn(1), strict=True):
            p.grad = g
        optimizer.step()
        results.append(params)
    assert taken == ([torch.bfloat16] if least == 1 else [])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)
        assert not torch.allclose(1.01 * p, q, rtol=0, atol=2e-3)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "remainder"])
def test_bf16_weights(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, results = Change(0.3, 0.01, rounding=rounding), []
    for is_gpu in (False, True):
        weights = [w.bfloat16() for w in drawn(0)]
        remainders = [torch.full_like(w, 99, dtype=torch.int16) for w in weights]
        if is_gpu:
            as_on_a_gpu(monkeypatch, plan)
        rest = remainders if rounding == "remainder" else ()
        change_weights(weights, drawn(1), change, 7, rest)
        results.append([*weights, *remainders])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert actual.equal(expected)


@pytest.mark.parametrize("coefficients", ["quintic", "cubic", "polar_express"])
@pytest.mark.parametrize("shape", [(2, 12, 5), (2, 5, 12)], ids=str)
def test_newton_schulz_as_on_a_gpu(
    shape: tuple[int, int, int], coefficients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(x, 5, coefficients, "float32", 3.0)
    assert expected.equal(3.0 * orthogonalize(x, 5, coefficients, "float32"))
    as_on_a_gpu(monkeypatch, newton_schulz)
    u = orthogonalize(x, 5, coefficients, "float32", 3.0)
    assert u.is_contiguous()
    torch.testing.assert_close(u, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(1.01 * u, expected, rtol=0, atol=1e-5)
