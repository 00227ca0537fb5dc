"""Muon and SOAP-Muon against an independent fp64 implementation of their specification, over every
option and layout; Muon against torch's Muon; and vectors, which both give to AdamW."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from comparison import (
    TOLERANCE,
    Difference,
    Group,
    compare,
    described,
    gradients,
    optimizer_of,
    starting_points,
    without_type_checks,
)
from optim_helpers import (
    clones,
    copy_gradients,
    give_gradients,
    largest_difference,
    parameters,
    run,
    run_both,
)

from lather.optim import Muon, SOAPMuon
from lather.optim.linalg import newton_schulz

STEPS = 14
FULL_RANK = {"muon_warmup_steps": 4, "precondition_frequency": 3}
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "tensor": [(6, 6), (5, 8), (5, 8), (8, 5), (1, 4)],
    "per_expert": [(4, 5, 5), (3, 4, 6), (3, 4, 6), (6, 7), (2, 6, 4)],
    "stacked": [(3, 5, 3), (3, 4, 6), (3, 4, 6), (6, 7)],
}
LAYOUTS = list(SHAPES)


def two_then_three(t: int) -> int:
    return 2 if t < 8 else 3


BOTH: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.0},
    {"nesterov": False},
    {"steps": 1},
    {"steps": 3},
    {"coefficients": "polar_express"},
    {"coefficients": "polar_express", "steps": 9},
    {"scale": "spectral"},
    {"scale": 0.3},
    {"scale": 2},
    {"normalize": "row"},
    {"normalize": "row", "beta2": 0.5, "scale": "spectral"},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3},
    {"weight_decay": 0.3, "weight_decay_method": "independent"},
    {"weight_decay": 0.3, "weight_decay_method": "palm"},
    {"weight_decay": 0.3, "weight_decay_method": "l2"},
    {"weight_decay": 0.3, "weight_decay_method": "l2", "maximize": True},
    {"maximize": True},
    {"keep_norm": True},
]
SOAP_MUON_OPTIONS: list[dict[str, Any]] = [
    *BOTH,
    {"sides": "both"},
    {"sides": "both", "statistics_of": "gradient"},
    {"sides": "larger"},
    {"sides": "auto"},
    {"max_precond_dim": 5},
    {"max_precond_dim": 5, "sides": "both"},
    {"max_precond_dim": 0},
    {"statistics_of": "gradient"},
    {"statistics_of": "gradient", "weight_decay": 0.3, "weight_decay_method": "l2"},
    {"beta2": 0.5},
    {"beta2": 0.99, "shampoo_beta": 0.5},
    {"shampoo_beta": 0.8},
    {"eps": 1e-2},
    {"precondition_frequency": 1},
    {"precondition_frequency": 5},
    {"precondition_frequency": two_then_three},
    {"precondition_warmup_steps": 8},
    {"precondition_warmup_steps": 8, "precondition_frequency": 100},
    {"muon_warmup_steps": 6},
    {"muon_warmup_steps": STEPS + 1},
    {"second_moment": "permute"},
    {"second_moment": "permute", "refresh_method": "eigh"},
    {"refresh_method": "qr"},
    {"refresh_method": "eigh", "sides": "both"},
    {"refresh_method": "cholesky_qr"},
    {"power_iter_steps": 3},
    {"use_adaptive_criteria": True},
    {"use_adaptive_criteria": True, "adaptive_update_tolerance": 0.05},
]
SINGLE_OPTIONS = {"Muon": BOTH, "SOAPMuon": SOAP_MUON_OPTIONS}
every_kind = pytest.mark.parametrize("kind", SINGLE_OPTIONS)


def preset(kind: str) -> dict[str, Any]:
    return FULL_RANK if kind == "SOAPMuon" else {}


def difference(
    kind: str, layout: str, options: dict[str, Any], ours: dict[str, Any] | None = None
) -> Difference:
    groups = [Group(SHAPES[layout], {"matrix_layout": layout})]
    plan = gradients(SHAPES[layout], STEPS, idle=layout == "per_expert")
    return compare(kind, groups, {**preset(kind), **options}, plan, ours=ours)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", BOTH, ids=described)
def test_muon(options: dict[str, Any], layout: str) -> None:
    assert difference("Muon", layout, options).is_rounding


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", SOAP_MUON_OPTIONS, ids=described)
def test_soap_muon(options: dict[str, Any], layout: str) -> None:
    assert difference("SOAPMuon", layout, options).is_rounding


@every_kind
@pytest.mark.parametrize("seed", range(9))
def test_options_combined(seed: int, kind: str) -> None:
    draw = random.Random(seed)
    options: dict[str, Any] = {}
    for single in draw.sample(SINGLE_OPTIONS[kind], 6):
        options.update(single)
    assert difference(kind, LAYOUTS[seed % 3], options).is_rounding


@pytest.mark.parametrize(
    "options", [{}, {"statistics_of": "gradient"}, {"precondition_frequency": 1}], ids=described
)
def test_soap_muon_with_the_shortest_warm_up(options: dict[str, Any]) -> None:
    """This is the default: one step of Muon, and bases of that step's momentum alone; the smaller
    side has full rank at once."""
    groups = [Group([(5, 8), (9, 4), (5, 5)]), Group([(3, 4, 5)], {"matrix_layout": "per_expert"})]
    assert compare("SOAPMuon", groups, options, steps=12).is_rounding


@every_kind
@pytest.mark.parametrize(
    "ours",
    [
        {},
        {"batched": False},
        {"bucket_bytes": 1},
        {"bucket_bytes": 6 * 8 * 25 * 2},
        {"num_streams": 2},
    ],
    ids=described,
)
def test_execution_does_not_matter(ours: dict[str, Any], kind: str) -> None:
    """Equal matrices share a bucket; in every step other ones have a gradient. They are worked on
    whole, in pieces of two, and one by one."""
    shapes = [(5, 5)] * 4 + [(4, 5, 5), (2, 5, 5), (3, 5, 5)]
    plan = gradients(shapes, 16, idle=True, missing=())
    for step, grads in enumerate(plan):
        grads[step % 7] = grads[(step // 3 + 4) % 7] = None
    options = {"muon_warmup_steps": 5, "precondition_frequency": 2} if kind == "SOAPMuon" else {}
    assert compare(
        kind, [Group(shapes)], {**options, "matrix_layout": "per_expert"}, plan, ours=ours
    ).is_rounding


@every_kind
def test_groups(kind: str) -> None:
    """Groups have equal and different options and layouts, over matrices that could share a
    bucket."""
    groups = [
        Group([(6, 6), (6, 6)]),
        Group([(6, 6), (2, 6, 6)], {"lr": 3e-3, "momentum": 0.8, "matrix_layout": "per_expert"}),
        Group([(6, 6)]),
        Group([(6, 6), (2, 6, 6)], {"weight_decay": 0.2, "steps": 3, "matrix_layout": "stacked"}),
        Group([(6, 6)], {"normalize": "row"}),
        Group([(6, 6)], {"keep_norm": True, "maximize": True}),
    ]
    assert compare(kind, groups, preset(kind)).is_rounding


@every_kind
def test_gradients_of_zeros(kind: str) -> None:
    """Gradients are zero from the first step on, over the first basis, and later: as a whole and
    for single experts."""
    shapes = [(3, 5, 5), (4, 4), (4, 4)]
    plan: list[Any] = gradients(shapes, 14, missing=())
    for step, grads in enumerate(plan):
        seen = [
            np.array([step > 6, step < 4, step % 3 == 1])[:, None, None],
            step > 7,
            step not in (0, 5, 6),
        ]
        grads[:] = [g * factor for g, factor in zip(grads, seen, strict=True)]
    options = (
        {"muon_warmup_steps": 3, "precondition_frequency": 2, "eps": 1e-3}
        if kind == "SOAPMuon"
        else {}
    )
    assert compare(
        kind, [Group(shapes, {"matrix_layout": "per_expert"})], options, plan
    ).is_rounding


def test_staggered_refreshes() -> None:
    """With four equal matrices and an interval of four, matrix i is refreshed i steps before the
    interval is full."""
    options = {"muon_warmup_steps": 3, "stagger_refresh": True, "precondition_frequency": 4}
    groups = [
        Group([(5, 6)], theirs={"precondition_frequency": partial(early, shift)})
        for shift in range(4)
    ]
    assert compare("SOAPMuon", groups, options).is_rounding


def early(shift: int, t: int) -> int:
    """A number that divides t just when an interval of four, begun `shift` steps early, is full."""
    return 1 if (t + shift) % 4 == 0 else t + 1


@every_kind
def test_annotations_hold(kind: str) -> None:
    """The other tests of this file do not check annotations, to save time."""
    options = {**preset(kind), "normalize": "row", "matrix_layout": "per_expert"}
    assert compare(
        kind, [Group([(3, 5, 5), (5, 5), (3, 5, 5)])], options, steps=7, checked=True
    ).is_rounding


@every_kind
def test_fp32_state_stays_close(kind: str) -> None:
    """This is the default state; an error of 1 % in the rate would exceed the tolerance ten
    times."""
    assert difference(kind, "tensor", {}, {"state_dtype": torch.float32}).params < 2e-3
    assert (
        difference(kind, "tensor", {}, {"state_dtype": torch.float32, "lr": 1.01e-2}).params > 2e-2
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@every_kind
def test_tolerance_rejects_an_error_of_one_percent_in_every_layout(kind: str, layout: str) -> None:
    assert difference(kind, layout, {}, {"lr": 1.01e-2}).params > 100 * TOLERANCE
    assert difference(kind, layout, {}, {"momentum": 0.9595}).params > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("kind", "options", "ours"),
    [
        *((kind, *case) for kind in SINGLE_OPTIONS for case in (
            ({}, {"weight_decay": 0.0101}),
            ({"weight_decay": 0.3, "weight_decay_method": "independent"}, {"weight_decay": 0.303}),
            ({"weight_decay": 0.3, "weight_decay_method": "palm"}, {"weight_decay": 0.303}),
            ({"weight_decay": 0.3, "weight_decay_method": "l2"}, {"weight_decay": 0.303}),
            ({}, {"nesterov": False}),
            ({}, {"steps": 6}),
            ({}, {"coefficients": "polar_express"}),
            ({"scale": 0.3}, {"scale": 0.303}),
            ({}, {"normalize": "row"}),
            ({"normalize": "row", "beta2": 0.95}, {"beta2": 0.9595}),
            ({}, {"keep_norm": True}),
        )),
        ("SOAPMuon", {}, {"beta2": 0.9595}),
        ("SOAPMuon", {}, {"shampoo_beta": 0.9595}),
        ("SOAPMuon", {"eps": 1e-2}, {"eps": 1.01e-2}),
        ("SOAPMuon", {}, {"sides": "both"}),
        ("SOAPMuon", {}, {"statistics_of": "gradient"}),
        ("SOAPMuon", {}, {"precondition_frequency": 4}),
        ("SOAPMuon", {"precondition_warmup_steps": 8}, {"precondition_warmup_steps": 7}),
        ("SOAPMuon", {}, {"muon_warmup_steps": 5}),
        ("SOAPMuon", {}, {"second_moment": "permute"}),
        ("SOAPMuon", {}, {"power_iter_steps": 2}),
        ("SOAPMuon", {}, {"refresh_method": "eigh"}),
    ],
    ids=str,
)  # fmt: skip
def test_tolerance_rejects_an_error_of_one_percent(
    kind: str, options: dict[str, Any], ours: dict[str, Any]
) -> None:
    """For whole numbers and choices the error is the next one."""
    shapes = [(6, 6), (5, 8), (8, 5)]
    found: Any = {}
    try:
        found = compare(
            kind, [Group(shapes)], {**preset(kind), **options}, gradients(shapes, STEPS), ours=ours
        ).params
    except AssertionError:  # the states have different entries
        return
    assert found > 100 * TOLERANCE


# --- special cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_but_for_the_dtype_of_the_iteration(
    adjust: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They coincide in the momentum, an average mu B + (1 - mu) G; in Nesterov's numerator; in the
    quintic iteration and its number of steps; in decoupled weight decay; and in both scales
    ("original" is our "spectral"). They differ in dtype, because torch iterates in bf16, which is
    switched off here; and for norms below 1e-7, which torch takes for 1e-7."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    ours = parameters([(6, 4), (4, 6), (5, 5)], torch.float64)
    theirs, wrong = clones(ours), clones(ours)
    common = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    a = Muon(
        ours,
        **common,
        scale={"original": "spectral"}.get(adjust, adjust),
        state_dtype=torch.float64,
    )
    b = torch.optim.Muon(theirs, **common, adjust_lr_fn=adjust)
    c = torch.optim.Muon(wrong, **{**common, "momentum": 0.909}, adjust_lr_fn=adjust)
    for step in range(14):
        give_gradients(ours, step)
        copy_gradients(ours, theirs)
        copy_gradients(ours, wrong)
        a.step()
        b.step()
        c.step()
    assert largest_difference(ours, theirs) <= TOLERANCE * 1e-2
    assert largest_difference(ours, wrong) > 1e-2 * 1e-2


def test_muon_with_bf16_iteration_is_torchs_to_the_rounding_of_bf16() -> None:
    """The measure is the share of torch's movement that ours covers; an error of 1 % in the rate
    changes it by 1 %."""
    for lr, is_right in ((1e-2, True), (1.01e-2, False)):
        ours = parameters([(48, 32), (32, 64)])
        theirs, start = clones(ours), clones(ours)
        a = Muon(ours, lr=lr, weight_decay=0.0, newton_schulz_dtype="bfloat16")
        b = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        run_both((a, ours), (b, theirs), range(14))
        for p, q, w in zip(ours, theirs, start, strict=True):
            x, y = ((moved - w).detach().flatten() for moved in (p, q))
            assert (abs(float(x @ y / (y @ y)) - 1) < 3e-3) == is_right
            assert (x - y).norm() < 0.03 * y.norm()


def test_dtype_of_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU "auto" is the dtype of the state's arithmetic; "bfloat16" is seen to round; the kind
    of CPU decides which of the two "fastest" is."""
    ends = {}
    for is_fast, dtype in (
        (True, "auto"),
        (True, "float32"),
        (True, "bfloat16"),
        (True, "fastest"),
        (False, "fastest"),
    ):
        monkeypatch.setattr(newton_schulz, "cpu_is_fast_in_bf16", lambda is_fast=is_fast: is_fast)
        params = parameters([(8, 6)])
        run(Muon(params, newton_schulz_dtype=dtype), params, range(3))
        ends[dtype, is_fast] = params
    exact = ends["float32", True]
    assert (
        largest_difference(ends["auto", True], exact)
        == largest_difference(ends["fastest", False], exact)
        == 0
    )
    assert 1e-5 < largest_difference(ends["bfloat16", True], exact) < 1e-2
    assert largest_difference(ends["bfloat16", True], ends["fastest", True]) == 0


def test_fastest_leaves_fp64_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton_schulz, "cpu_is_fast_in_bf16", lambda: True)
    x = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        newton_schulz.orthogonalize(x, dtype="fastest"), newton_schulz.orthogonalize(x)
    )


CPUS = {
    "Intel with AMX": ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", True),
    "Intel without AMX": ("GenuineIntel", "avx512f avx512_bf16", False),
    "AMD, fourth or fifth Zen": ("AuthenticAMD", "avx512f avx512_bf16", True),
    "AMD before": ("AuthenticAMD", "avx2", False),
    "ARM": ("ARM", "asimd bf16", False),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_which_cpus_are_faster_in_bf16(cpu: str) -> None:
    vendor, flags, expected = CPUS[cpu]
    assert newton_schulz.is_fast_in_bf16(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n") == expected


@pytest.mark.parametrize("cls", [Muon, SOAPMuon])
def test_vectors_and_tensors_take_adamws_step(cls: Any) -> None:
    """Scalars, vectors and, under "tensor", parameters of more than two dims step at the
    optimizer's rate and decay."""
    ours = parameters([(5,), (), (3, 4, 5), (7,)], torch.float64)
    theirs = clones(ours)
    a = cls(ours, lr=2e-2, weight_decay=0.1, state_dtype=torch.float64)
    b = torch.optim.AdamW(theirs, lr=2e-2, weight_decay=0.1, betas=(0.9, 0.95))
    run_both((a, ours), (b, theirs), range(8))
    assert largest_difference(ours, theirs) <= 1e-14
    assert all(a.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"} for p in ours)


def test_soap_muon_without_bases_is_muon() -> None:
    for options in ({"max_precond_dim": 0}, {"muon_warmup_steps": 100}):
        ours = parameters([(6, 4), (3, 4, 5), (5,)])
        theirs = clones(ours)
        groups = [
            [{"params": params[:2], "matrix_layout": "per_expert"}, {"params": params[2:]}]
            for params in (ours, theirs)
        ]
        a, b = SOAPMuon(groups[0], momentum=0.9, **options), Muon(groups[1], momentum=0.9)
        run_both((a, ours), (b, theirs), range(6))
        assert largest_difference(ours, theirs) == 0


def test_a_matrix_without_gradient_is_not_touched_and_one_of_zeros_does_not_move() -> None:
    for cls in (Muon, SOAPMuon):
        p, q = start = parameters([(6, 4), (6, 4)])
        before = clones(start)
        optimizer = cls([p, q], weight_decay=0.0)
        for _ in range(4):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        assert largest_difference([p, q], before) == 0
        assert not optimizer.state.get(q)


@every_kind
def test_skipped_gradients_are_missing_ones(kind: str) -> None:
    shapes = [(5, 5), (5, 5), (5, 4)]
    start, plan = starting_points(shapes), gradients(shapes, STEPS)
    ends = []
    for hole in (None, np.nan):
        optimizer, params = optimizer_of(
            kind, [Group(shapes)], start, **preset(kind), nonfinite="skip"
        )
        for grads in plan:
            given = [
                np.full(shape, hole) if g is None and hole else g
                for g, shape in zip(grads, shapes, strict=True)
            ]
            for p, g in zip(params, given, strict=True):
                p.grad = None if g is None else torch.tensor(g)
            with without_type_checks():
                optimizer.step()
        ends.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
