"""Controls of the update (`lather.optim.controls`) of every rule, against the formulas in plain
NumPy, one matrix and one row at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import (
    CODED_KINDS,
    KINDS,
    Run,
    all_same,
    assert_same,
    clones,
    few_kinds,
    largest_difference,
    make,
    parameter,
    parameters,
    run,
    run_both,
    run_of,
    through_a_file,
)
from reference import stacked, unstacked

from in_turn import in_turn
from lather.optim import SOAP, AdamW, EmbeddingSOAP, Muon, parameter_groups
from lather.optim.batched import formats
from lather.optim.controls import CONTROLS

Array = np.ndarray[Any, np.dtype[np.float64]]
Options = dict[str, Any]

SHAPES = [(6, 4), (4, 6), (3, 4, 5), (3, 5, 4), (6, 4)]
STATE64: Options = {"state_dtype": torch.float64}
FP64: Options = {"dtype": torch.float64, **STATE64}
CAUTIOUS: Options = {"cautious_decay": True, "weight_decay": 0.5}
CASES: dict[str, Options] = {
    "brake": {"radial_brake": 0.4},
    "relative": {"relative_update": True},
    "cautious": CAUTIOUS,
    "floor": {"row_floor": 0.9},
    "radius": {"keep_norm": True, "weight_rms": 0.5},
    "floor on a sphere": {"keep_norm": True, "row_floor": 0.9},
    "all": {"relative_update": True, "radial_brake": 0.4, "row_floor": 0.9, **CAUTIOUS},
}


def matrices_of(kind: str, x: Array) -> Array:
    """Copy a parameter to the matrices (b, m, n) that the rule takes it for."""
    if x.ndim == 3 and ("per_expert" in kind or kind == "soap_one_sided"):
        return x.copy()
    if x.ndim == 3 and "stacked" in kind:
        return stacked(x)[None]
    if x.ndim == 2 and kind == "soap_per_head":
        return x.reshape(-1, 2, x.shape[1]).copy()
    if x.ndim == 2 and kind == "muon_per_head":
        return x.reshape(len(x), -1, 2).transpose(1, 0, 2).copy()
    return x.reshape(1, len(x), -1).copy()


def parameter_of(kind: str, matrices: Array, shape: tuple[int, ...]) -> Array:
    """Undo `matrices_of`."""
    if len(shape) == 3 and "stacked" in kind:
        return unstacked(matrices[0], shape)
    if len(shape) == 2 and kind == "muon_per_head":
        return matrices.transpose(1, 0, 2).reshape(shape)
    return matrices.reshape(shape)


def length(x: Array) -> float:
    return math.sqrt(sum(float(value) ** 2 for value in x.flat))


def expected_after(w: Array, u: Array, start: Array, lr: float, o: Options) -> Array:
    """Return a matrix after a step. `start`: the matrix before its first step."""
    r = o["weight_rms"] * math.sqrt(w.size) if "weight_rms" in o else length(start)
    if o.get("keep_norm"):
        u = u * (r / length(u))
    if o.get("relative_update"):
        u = u * (length(w) / length(u))
    step = -lr * u
    along = (step * w).sum() / (w * w).sum() * w
    if (along * w).sum() > 0:  # it lengthens W
        step = step - o.get("radial_brake", 0.0) * along
    new = np.empty_like(w)
    for at, value in np.ndenumerate(w):
        decays = not o.get("keep_norm") and (not o.get("cautious_decay") or step[at] * value <= 0)
        new[at] = value + step[at] - lr * o.get("weight_decay", 0.0) * value * decays
    floor = o.get("row_floor", 0.0) * math.sqrt(sum(length(row) ** 2 for row in new) / len(new))
    for i in range(len(new)):
        if length(new[i]) < floor:
            new[i] *= floor / length(new[i])
    return new * (r / length(new)) if o.get("keep_norm") else new


def follow(a: Run, kind: str, options: Options, exact: float, **without: Any) -> None:
    """Take steps at changing rates and compare each with the formulas. U does not depend on W, so
    it is read off an optimizer without controls, as its movement at rate 1."""
    copies = clones(a.params)
    b = Run(make(kind, copies, lr=1.0, weight_decay=0.0, keep_norm=False, **without), copies)
    start = [matrices_of(kind, p.detach().double().numpy()) for p in a.params]
    turned = 0.0
    for step, lr in enumerate((0.02, 0.3, 0.1, 0.2)):
        for group in a.groups:
            group["lr"] = lr
        before = [p.detach().double().numpy().copy() for p in a.params]
        for q in b.params:
            q.data.zero_()
        run_both(a, b, [step])
        for p, q, w, first in zip(a.params, b.params, before, start, strict=True):
            u = matrices_of(kind, -q.detach().double().numpy())
            matrices = list(zip(matrices_of(kind, w), u, first, strict=True))
            for factor in (1.01, 1.0):
                new = np.stack([expected_after(*x, factor * lr, options) for x in matrices])
                expected = torch.from_numpy(parameter_of(kind, new, tuple(p.shape)))
                difference = largest_difference([p], [expected])
                assert (difference <= exact) == (factor == 1.0), (step, p.shape, difference)
            plain = np.stack([expected_after(*x, lr, {}) for x in matrices])
            turned += float(np.abs(plain - new).max())
    assert turned > 0.01


@pytest.mark.parametrize(("kind", "case"), in_turn(KINDS, CASES, each=2))
def test_steps_are_those_of_the_formulas(kind: str, case: str) -> None:
    options = {"weight_decay": 0.0, "keep_norm": False, **CASES[case]}
    follow(run_of(kind, SHAPES, **FP64, **options), kind, CASES[case], 1e-12, **STATE64)


@pytest.mark.parametrize("case", ["cautious", "all"])
@pytest.mark.parametrize("kind", CODED_KINDS)
def test_steps_with_state_in_8_bits(kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MIN_CODED", 1)
    options = {"weight_decay": 0.0, "keep_norm": False, **CASES[case]}
    follow(run_of(kind, SHAPES, **options), kind, CASES[case], 1e-5)


@pytest.mark.parametrize(("kind", "case"), in_turn(KINDS, ["brake", "relative", "floor", "radius"]))
def test_vectors_and_matrices_that_start_at_zero_are_not_scaled(kind: str, case: str) -> None:
    """They take the ordinary step, but for rows of the matrix, which may have a floor, and its
    norm, which a brake limits, as soon as it is not zero."""
    zeros = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    params = [*parameters([(5,), ()], torch.float64), zeros]
    others, options = clones(params), {"lr": 0.1, "weight_decay": 0.0, **STATE64}
    a = make(kind, params, **options, **{"keep_norm": False, **CASES[case]})
    b = make(kind, others, **options, keep_norm=False)
    run_both((a, params), (b, others), range(5))
    compared = params if case in {"relative", "radius"} else params[:2]
    assert largest_difference(compared, others[: len(compared)]) <= 1e-14


def test_rows_of_zeros_and_the_decay_of_vectors() -> None:
    """A row without direction has no floor. Cautious decay leaves out elements of vectors, too."""
    for shape in ((4, 3), (4,)):
        p, q = (parameter(*shape, dtype=torch.float64) for _ in range(2))
        for x in (p, q):
            x.data[1] = 0
        a = AdamW([p], lr=0.1, row_floor=0.9, **CAUTIOUS)
        b = AdamW([q], lr=0.1, weight_decay=0.0)
        before = p.detach().clone()
        for x in (p, q):
            x.grad = torch.ones_like(x)
            x.grad[1] = 0
        a.step()
        b.step()
        expected = q.detach() - 0.05 * before.clamp_min(0)  # U is 1 where the gradient is
        if len(shape) == 2:
            lengths = expected.norm(dim=1)
            floor = 0.9 * lengths.square().mean().sqrt()
            assert 0 < int((lengths[[0, 2, 3]] < floor).sum()) < 3
            factors = (floor / lengths).clamp_min(1).nan_to_num(posinf=0)
            expected = expected * factors[:, None]
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
        assert not p[1].any()


@pytest.mark.parametrize("shape", [(200, 250), (50_000, 2), (1, 50_000)], ids=str)
def test_a_large_matrix_has_the_same_bits_alone_as_in_a_batch(shape: tuple[int, int]) -> None:
    """A sum over one matrix must not be divided among threads: on a mesh its owner may have it
    alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        options = {"lr": 0.1, "relative_update": True, "radial_brake": 0.9, "row_floor": 0.95}
        a = run_of(AdamW, [shape] * 3, **options)
        params = clones(a.params)
        alone = [AdamW([p], **options) for p in params]
        for step in range(2):
            a.steps([step])
            for optimizer, p, q in zip(alone, a.params, params, strict=True):
                q.grad = p.grad
                optimizer.step()
        assert all_same(a.params, params)
    finally:
        torch.set_num_threads(threads)


@few_kinds
@pytest.mark.parametrize("case", ["all", "radius"])
def test_batches_and_a_resumed_run(kind: str, case: str) -> None:
    """One matrix at a time has the same result up to rounding, and a resume the same bits."""
    options = {"keep_norm": False, **CASES[case]}
    a, b = (run_of(kind, SHAPES, batched=batched, **options) for batched in (True, False))
    for one in (a, b):
        one.steps(range(3))
    assert largest_difference(a.params, b.params) <= 1e-5
    c = Run(make(kind, params := clones(a.params), **options), params)
    c.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    run_both(a, c, range(3, 6))
    assert_same(a, c)


@pytest.mark.parametrize("kind", ["adamw", "muon", "soap_per_expert"])
def test_controls_without_state_begin_and_end_between_two_steps(kind: str) -> None:
    """A run to which they are given goes on like one that is resumed with them."""
    controls: Options = {"radial_brake": 0.5, "row_floor": 0.9, **CAUTIOUS}
    off: Options = {"radial_brake": 0.0, "row_floor": 0.0, "cautious_decay": False}
    a = run_of(kind, SHAPES, **off)
    for options in (off, controls, off):
        for group in a.groups:
            group.update(options)
        resumed = Run(make(kind, params := clones(a.params), **options), params)
        resumed.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
        for group in resumed.groups:
            group.update(options)
        run_both(a, resumed, range(3))
        assert_same(a, resumed)
        assert "norm" not in a.state(0)


# --- who inherits controls, and which are refused -------------------------------------------------

GIVEN: Options = {"keep_norm": True, "weight_rms": 0.5, "cautious_decay": True, "row_floor": 0.25}


def controls_of(group: Options) -> Options:
    return {name: group[name] for name in GIVEN}


NONE = {"keep_norm": False, "weight_rms": None, "cautious_decay": False, "row_floor": 0.0}


def test_groups_without_a_rule_inherit_controls_and_others_do_not() -> None:
    assert GIVEN.keys() < CONTROLS
    settings: list[Options] = [{}, {"keep_norm": False}]
    settings += [{"rule": name} for name in ("muon", "soap_muon", "adamw")]
    settings += [{"rule": "adamw", "row_floor": 0.5}, {"rule": AdamW.rule(row_floor=0.5)}]
    groups = [{"params": [parameter(4, 4)], **options} for options in settings]
    found = list(map(controls_of, Muon(groups, **GIVEN).param_groups))
    free = {**GIVEN, "keep_norm": False, "weight_rms": None}
    assert found == [GIVEN, free, *[NONE] * 3, *[{**NONE, "row_floor": 0.5}] * 2]


@pytest.mark.parametrize(
    ("cls", "rest"), [(AdamW, "adamw"), (EmbeddingSOAP, "embedding_soap"), (SOAP, "adamw")]
)
def test_the_rest_of_a_model_is_not_controlled(cls: Any, rest: str) -> None:
    """It names its rule, even if that is the rule of the matrices."""
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4))
    matrices, others = cls(parameter_groups(model, rest_rule=rest), **GIVEN).param_groups
    assert (controls_of(matrices), controls_of(others)) == (GIVEN, NONE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_rms": 0.1}, "weight_rms=0.1 without keep_norm: .* set keep_norm=True, or"),
        ({"keep_norm": True, "radial_brake": 0.5}, "keep_norm=True with radial_brake=0.5: .*leave"),
        ({"keep_norm": True, "relative_update": True}, "keep_norm=True with relative_update=True"),
        ({"cautious_decay": True, "weight_decay_method": "l2"}, "cautious_decay=True with weight_"),
        ({"radial_brake": 1.5}, r"radial_brake=1.5 is not valid: give a number in \[0, 1\]"),
        ({"row_floor": 1.0}, r"row_floor=1.0 is not valid: give a number in \[0, 1\)"),
        ({"keep_norm": True, "weight_rms": 0.0}, "weight_rms=0.0 is not valid: give a number > 0"),
    ],
)
def test_refusals(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([parameter(4, 4)], **options)
    optimizer = Muon([p := parameter(4, 4)])
    run(optimizer, [p], [0])
    before = p.detach().clone()
    optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=message):
        run(optimizer, [p], [1])
    assert torch.equal(p, before)
