"""SOAP, KL-SOAP, REKLS, stacked SOAP, Muon and SOAP-Muon against an independent fp64
implementation of their specification, over every option and layout."""

import random
from collections.abc import Sequence
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

from in_turn import in_turn

STEPS = 12
Options = dict[str, Any]


def each(**values: Sequence[Any]) -> list[Options]:
    """Return options that give one of the values."""
    return [{name: value} for name, several in values.items() for value in several]


def two_then_three(t: int) -> int:
    return 2 if t < 8 else 3


COUPLED: Options = {"weight_decay": 0.3, "weight_decay_method": "l2"}
ADAPTIVE: Options = {"use_adaptive_criteria": True, "adaptive_update_tolerance": 0.05}
BASES = each(
    precondition_frequency=[1, 5, two_then_three],
    max_precond_dim=[5, 0],
    power_iter_steps=[3],
    use_adaptive_criteria=[True],
    refresh_method=["qr", "eigh", "cholesky_qr"],
    sides=["smaller", "larger"],
)
ADAM: list[Options] = [
    *({}, ADAPTIVE, {**ADAPTIVE, "refresh_method": "eigh"}),
    *each(
        betas=[(0.9, 0.99), (0.0, 0.5)],
        shampoo_beta=[0.8, 0.5],
        eps=[1e-3],
        weight_decay=[0.0, 0.3],
        adam_warmup_steps=[6, STEPS + 1],
        max_update_rms=[0.5],
        correct_bias=[False],
        maximize=[True],
    ),
    *BASES,
    {"refresh_method": "auto", "precondition_frequency": 1},
    {"sides": "smaller", "max_precond_dim": 5},
]
MIXED: Options = {"slow_momentum_start": 4, "slow_momentum": 0.96}
MUON: list[Options] = [
    *({}, COUPLED, {**COUPLED, "maximize": True}),
    *({**MIXED, "momentum": 0.9}, {**MIXED, "nesterov": False, "slow_share": 0.3}),
    *each(
        momentum=[0.9, 0.0],
        nesterov=[False],
        steps=[1, 3],
        coefficients=["polar_express", "cubic"],
        scale=["spectral", 0.3, 2],
        normalize=["row"],
        weight_decay=[0.0, 0.3],
        maximize=[True],
        keep_norm=[True],
    ),
    {"coefficients": "polar_express", "steps": 9},
    {"coefficients": "hybrid", "steps": 10},
    {"normalize": "row", "beta2": 0.5, "scale": "spectral"},
    {"weight_decay": 0.3, "weight_decay_method": "independent"},
    {"weight_decay": 0.3, "weight_decay_method": "palm"},
]
OPTIONS: dict[str, list[Options]] = {
    "SOAP": [
        *ADAM,
        {"weight_decay": 0.3, "use_decoupled_weight_decay": False},
        {"weight_decay": 0.3, "use_decoupled_weight_decay": False, "maximize": True},
        {"use_nesterov": True, "correct_bias": False},
        {"precondition_warmup_steps": 5, "adam_warmup_steps": 7},
        {"trace_normalization": True, "lr": 1e-3},
        {"second_moment": "rotate", "precondition_frequency": 1},
        {"second_moment": "rotate", **ADAPTIVE, "use_eigh": True},
        {"statistics_of": "momentum", "correct_bias": False, "second_moment": "rotate"},
        {"statistics_of": "momentum", "precondition_frequency": 1, "use_eigh": True},
        {"orthogonalize": True, "statistics_of": "momentum", "sides": "smaller"},
        {"orthogonalize": True, "max_update_rms": 0.1},
        *each(
            use_nesterov=[True],
            precondition_warmup_steps=[9],
            normalize_preconditioned_grads=[True],
            second_moment=["rotate"],
            use_eigh=[True],
            statistics_of=["momentum"],
            orthogonalize=[True],
        ),
    ],
    "KLSOAP": [
        *ADAM,
        *(COUPLED, {**COUPLED, "maximize": True}),
        {"weight_decay": 0.3, "weight_decay_method": "independent"},
        {"weight_decay": 0.3, "weight_decay_method": "palm"},
        {"nesterov": True, "correct_bias": False},
        {"initial_eigenvalue": 20.0, "eps": 0.5},
        {"eigenvalue_floor": 2.0, "second_moment": "permute"},
        {"eigenvalue_floor": 1.0, "sides": "smaller"},
        {"second_moment": "permute", "precondition_frequency": 1},
        {"second_moment": "permute", "refresh_method": "eigh"},
        {"second_moment": "permute", **ADAPTIVE},
        *each(
            nesterov=[True],
            initial_eigenvalue=[0.1],
            eigenvalue_floor=[0.5],
            second_moment=["permute"],
        ),
    ],
    "Muon": MUON,
    "SOAPMuon": [
        *MUON,
        *BASES,
        {"sides": "both", "statistics_of": "gradient"},
        {"sides": "both", "max_precond_dim": 5},
        {"sides": "both", "refresh_method": "eigh"},
        {"statistics_of": "gradient", **COUPLED},
        {"beta2": 0.99, "shampoo_beta": 0.5},
        {"precondition_warmup_steps": 8, "precondition_frequency": 100},
        {"second_moment": "permute", "refresh_method": "eigh"},
        ADAPTIVE,
        *each(
            sides=["both", "auto"],
            statistics_of=["gradient"],
            beta2=[0.5],
            shampoo_beta=[0.8],
            eps=[1e-2],
            precondition_warmup_steps=[8],
            muon_warmup_steps=[6, STEPS + 1],
            second_moment=["permute"],
        ),
    ],
}
"""Options by kind."""

every_kind = pytest.mark.parametrize("kind", OPTIONS)
adams = pytest.mark.parametrize("kind", ["SOAP", "KLSOAP"])
with_bases = pytest.mark.parametrize("kind", ["SOAP", "KLSOAP", "SOAPMuon"])

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "tensor": [(6, 6), (5, 8), (5, 8), (7,), (), (3, 4, 5), (2, 3, 2, 4)],
    "per_expert": [(4, 5, 5), (3, 4, 6), (3, 4, 6), (6, 7), (2, 3, 3, 4)],
    "stacked": [(3, 5, 3), (3, 4, 6), (3, 4, 6), (6, 7)],
}
OF_MUON = {
    "tensor": [(6, 6), (5, 8), (5, 8), (8, 5), (1, 4)],
    "per_expert": [(4, 5, 5), (3, 4, 6), (3, 4, 6), (6, 7), (2, 6, 4)],
}
"""Shapes in which Muon and SOAP-Muon leave nothing to AdamW."""
LAYOUTS = list(SHAPES)


def warm(kind: str, steps: int = 4, frequency: int = 3) -> Options:
    """Return options of a warm-up, and of refreshes after it, for a kind that has bases."""
    if kind == "Muon":
        return {}
    name = "muon_warmup_steps" if kind == "SOAPMuon" else "adam_warmup_steps"
    return {name: steps, "precondition_frequency": frequency}


def difference(kind: str, layout: str, options: Options, ours: Options | None = None) -> Difference:
    shapes = {**SHAPES, **(OF_MUON if "Muon" in kind else {})}[layout]
    plan = gradients(shapes, STEPS, idle=layout == "per_expert")
    groups = [Group(shapes, {"matrix_layout": layout})]
    return compare(kind, groups, {**warm(kind), **options}, plan, ours=ours)


@pytest.mark.parametrize(
    ("kind", "options", "layout"),
    in_turn(((kind, options) for kind, several in OPTIONS.items() for options in several), LAYOUTS),
    ids=lambda value: described(value) if isinstance(value, dict) else value,
)
def test_each_option(kind: str, options: Options, layout: str) -> None:
    assert difference(kind, layout, options).is_rounding


@every_kind
@pytest.mark.parametrize("seed", range(9))
def test_options_combined(seed: int, kind: str) -> None:
    options: Options = {}
    for single in random.Random(seed).sample(OPTIONS[kind], 6):
        options.update(single)
    if options.get("use_eigh"):
        options.pop("refresh_method", None)
    assert difference(kind, LAYOUTS[seed % 3], options).is_rounding


@pytest.mark.parametrize("kind", ["REKLS", "StackedSOAP"])
def test_presets(kind: str) -> None:
    # these have full rank from the first gradient on
    shapes = [(5, 5, 5), (4, 4)] if kind == "REKLS" else [(5, 5), (1, 4, 4)]
    options = {"adam_warmup_steps": 4, "nesterov": True, "max_update_rms": 0.5}
    assert compare(kind, [Group(shapes)], {}).is_rounding
    assert compare(kind, [Group(shapes)], options).is_rounding
    assert compare(kind, [Group(SHAPES["stacked"])], options).is_rounding


NO_WARM_UP: Options = {"adam_warmup_steps": 0, "eps": 1e-3}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SOAP", {}),
        ("SOAP", {"second_moment": "rotate", "precondition_warmup_steps": 5}),
        *(("KLSOAP", {}), ("KLSOAP", NO_WARM_UP), ("REKLS", NO_WARM_UP)),
        ("KLSOAP", {**NO_WARM_UP, "second_moment": "permute", "refresh_method": "eigh"}),
        *(("SOAPMuon", {}), ("SOAPMuon", {"statistics_of": "gradient"})),
        ("SOAPMuon", {"precondition_frequency": 1}),
    ],
    ids=str,
)
def test_shortest_warm_up(kind: str, options: Options) -> None:
    """There are the defaults, and no warm-up at all, where the first projected gradient is diagonal
    but for rounding: hence the larger eps. Smaller sides have full rank at once."""
    groups = [Group([(5, 5), (3, 4, 5)])]
    if kind == "SOAPMuon":
        experts = Group([(3, 4, 5)], {"matrix_layout": "per_expert"})
        groups = [Group([(5, 8), (9, 4), (5, 5)]), experts]
    assert compare(kind, groups, options).is_rounding


@adams
@pytest.mark.parametrize("refresh_method", ["auto", "eigh"])
@pytest.mark.parametrize("second_moment", ["rotate", "permute"])
def test_one_dimensional_parameters_preconditioned(
    kind: str, refresh_method: str, second_moment: str
) -> None:
    options = {"refresh_method": refresh_method, "second_moment": second_moment, **warm(kind, 8, 1)}
    groups = [Group([(5,), (3,), (5,), (4, 4)])]
    assert compare(kind, groups, {"precondition_1d": True, **options}).is_rounding


@adams
def test_one_side_where_the_other_is_more_than_eight_times_as_long(kind: str) -> None:
    """A (2, 16) matrix still has both sides; experts and stacks are judged by the matrices that
    they are."""
    groups = [
        Group([(2, 17), (17, 2), (2, 16), (5, 6)]),
        Group([(2, 2, 17)], {"matrix_layout": "per_expert"}),
        Group([(3, 6, 3)], {"matrix_layout": "stacked"}),
    ]
    assert compare(kind, groups, {"sides": "auto", **warm(kind, 9, 2)}, steps=14).is_rounding


@adams
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dims_of_size_one(kind: str, layout: str) -> None:
    shapes = [(1, 4), (4, 1), (1, 1), (1, 3, 3), (3, 1, 3), (3, 3, 1)]
    shapes += [(1,)] if layout == "tensor" else []
    options = {"matrix_layout": layout, "precondition_1d": True, **warm(kind, 5, 2)}
    assert compare(kind, [Group(shapes)], options).is_rounding


@adams
@pytest.mark.parametrize("refresh_method", ["qr", "cholesky_qr", "auto"])
def test_more_than_a_block_of_rows(kind: str, refresh_method: str) -> None:
    """Cholesky-QR works through 32 rows at a time."""
    options = {**warm(kind, 3, 1), "refresh_method": refresh_method}
    assert compare(kind, [Group([(40, 36), (66, 70)])], options, steps=7).is_rounding


@every_kind
@pytest.mark.parametrize(
    "ours",
    [
        {},
        *each(batched=[False], bucket_bytes=[1, 6 * 8 * 25 * 2], num_streams=[2]),
        {"fp32_matmul_prec": "medium", "max_state_bytes": 2**20},
    ],
    ids=described,
)
def test_execution_does_not_matter(ours: Options, kind: str) -> None:
    """Equal matrices share a bucket; in every step other ones have a gradient. They are worked on
    whole, in pieces of two, and one by one."""
    shapes = [(5, 5)] * 4 + [(4, 5, 5), (2, 5, 5), (3, 5, 5)]
    plan = gradients(shapes, 16, idle=True, missing=())
    for step, grads in enumerate(plan):
        grads[step % 7] = grads[(step // 3 + 4) % 7] = None
    options = {**warm(kind, 5, 2), "matrix_layout": "per_expert"}
    assert compare(kind, [Group(shapes)], options, plan, ours=ours).is_rounding


GROUPS: dict[str, list[Options]] = {
    "Adam": [
        {"lr": 3e-3, "betas": (0.8, 0.9)},
        {"weight_decay": 0.2, "shampoo_beta": 0.7, "max_precond_dim": 8},
        {"precondition_frequency": 2, "adam_warmup_steps": 6, "refresh_method": "eigh"},
        {"second_moment": "rotate", "maximize": True, "eps": 1e-2},
        {"second_moment": "permute", "correct_bias": False, "max_update_rms": 0.3},
    ],
    "Muon": [
        {"lr": 3e-3, "momentum": 0.8},
        {"weight_decay": 0.2, "steps": 3},
        {"normalize": "row"},
        {"keep_norm": True, "maximize": True},
        {},
    ],
}


@every_kind
def test_groups(kind: str) -> None:
    """Groups have equal and different options and layouts, over matrices that could share a
    bucket."""
    first, second, *others = GROUPS["Muon" if "Muon" in kind else "Adam"]
    groups = [
        Group([(6, 6), (6, 6)]),
        Group([(6, 6), (2, 6, 6)], {**first, "matrix_layout": "per_expert"}),
        Group([(6, 6)]),
        Group([(6, 6), (2, 6, 6)], {**second, "matrix_layout": "stacked"}),
        *(Group([(6, 6)], options) for options in others),
    ]
    assert compare(kind, groups, warm(kind)).is_rounding


@pytest.mark.parametrize(
    "options", [{}, *each(refresh_method=["eigh"], use_adaptive_criteria=[True])], ids=described
)
@every_kind
def test_gradients_of_zeros(kind: str, options: Options) -> None:
    """Gradients are zero from the first step on, over the first basis, and later: as a whole and
    for single experts. Factors are square, so that the first gradient gives them full rank."""
    shapes = [(3, 5, 5), (4, 4), (4, 4)]
    plan: list[Any] = gradients(shapes, 14, missing=())
    for step, grads in enumerate(plan):
        experts = np.array([step > 6, step < 4, step % 3 == 1])[:, None, None]
        seen = [experts, step > 7, step not in (0, 5, 6)]
        grads[:] = [g * factor for g, factor in zip(grads, seen, strict=True)]
    settings = {} if kind == "Muon" else {**warm(kind, 3, 2), "eps": 1e-3, **options}
    for layout in ("per_expert", "tensor") if "Muon" not in kind else ("per_expert",):
        groups = [Group(shapes, {"matrix_layout": layout})]
        assert compare(kind, groups, settings, plan).is_rounding


@adams
@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_scale_of_gradients(kind: str, scale: float) -> None:
    """Eigenvalues begin at the scale, for with ones factors would first have its square."""
    options = {**warm(kind), "eps": 1e-8 * min(scale, 1.0) ** 2}
    options |= {"initial_eigenvalue": scale} if kind == "KLSOAP" else {}
    for layout, shapes in SHAPES.items():
        plan = gradients(shapes, STEPS, idle=layout == "per_expert", scale=scale)
        groups = [Group(shapes, {"matrix_layout": layout})]
        assert compare(kind, groups, options, plan).is_rounding


@every_kind
def test_skipped_gradients_are_missing_ones(kind: str) -> None:
    shapes = [(5, 5), (5, 5), (5, 4)]
    start, plan = starting_points(shapes), gradients(shapes, STEPS)
    ends = []
    for hole in (None, np.nan):
        options = {**warm(kind), "nonfinite": "skip"}
        optimizer, params = optimizer_of(kind, [Group(shapes)], start, **options)
        for grads in plan:
            for p, g in zip(params, grads, strict=True):
                given = np.full(p.shape, hole) if g is None and hole else g
                p.grad = None if given is None else torch.tensor(given)
            with without_type_checks():
                optimizer.step()
        ends.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def early(shift: int, t: int) -> int:
    """A number that divides t just when an interval of four, begun `shift` steps early, is full."""
    return 1 if (t + shift) % 4 == 0 else t + 1


@with_bases
def test_staggered_refreshes(kind: str) -> None:
    """With four equal matrices and an interval of four, matrix i is refreshed i steps before the
    interval is full."""
    shifts = [{"precondition_frequency": partial(early, shift)} for shift in range(4)]
    groups = [Group([(5, 6)], theirs=theirs) for theirs in shifts]
    assert compare(kind, groups, {**warm(kind, 3, 4), "stagger_refresh": True}).is_rounding


@adams
def test_staggered_first_bases(kind: str) -> None:
    """Matrix i of four has its first bases where its interval of four is first full; until then it
    is like one in a longer warm-up."""
    first = 1 if kind == "SOAP" else 2
    groups = []
    for shift in range(4):
        step = next(t for t in range(first, first + 4) if (t + shift) % 4 == 0)
        theirs = {**warm(kind, step + 1 - first), "precondition_frequency": partial(early, shift)}
        groups.append(Group([(5, 6)], theirs=theirs))
    options = {**warm(kind, 1, 4), "stagger_refresh": True, "stagger_first": True}
    assert compare(kind, groups, options).is_rounding


@pytest.mark.parametrize("kind", [*OPTIONS, "REKLS", "StackedSOAP"])
def test_annotations_hold(kind: str) -> None:
    """The other tests of this file do not check annotations, to save time."""
    groups = [Group([(3, 5, 5), (5, 5), (3, 5, 5)])]
    options: Options = {**warm(kind), "matrix_layout": "per_expert"}
    if "Muon" in kind:
        options["normalize"] = "row"
    else:
        groups.append(Group([(4,), ()], {"matrix_layout": "tensor"}))
        options |= {"use_adaptive_criteria": True}
        options |= {"matrix_layout": "stacked"} if kind == "StackedSOAP" else {}
    assert compare(kind, groups, options, steps=7, checked=True).is_rounding


@every_kind
def test_fp32_state_stays_close(kind: str) -> None:
    """This is the default state; an error of 1 % in the rate would exceed the tolerance ten
    times."""
    fp32 = {"state_dtype": torch.float32}
    for options in [{}] if "Muon" in kind else [{}, {"second_moment": "rotate"}]:
        assert difference(kind, "tensor", options, fp32).params < 5e-3
        assert difference(kind, "tensor", options, {**fp32, "lr": 1.01e-2}).params > 2e-2


@pytest.mark.parametrize("layout", LAYOUTS)
@every_kind
def test_tolerance_rejects_an_error_of_one_percent_in_every_layout(kind: str, layout: str) -> None:
    name = "momentum" if "Muon" in kind else "shampoo_beta"
    for options, ours in (({}, {"lr": 1.01e-2}), ({name: 0.95}, {name: 0.9595})):
        assert difference(kind, layout, options, ours).params > 100 * TOLERANCE


WRONG: dict[str, list[tuple[Options, Options]]] = {
    "SOAP KLSOAP": [
        ({"betas": (0.95, 0.95)}, {"betas": (0.9595, 0.95)}),
        ({"betas": (0.95, 0.95)}, {"betas": (0.95, 0.9595)}),
        ({"eps": 1e-3}, {"eps": 1.01e-3}),
        ({"max_update_rms": 0.5}, {"max_update_rms": 0.505}),
        ({}, {"adam_warmup_steps": 5}),
        ({}, {"correct_bias": False}),
        ({"second_moment": "permute"}, {"second_moment": "rotate"}),
    ],
    "SOAP KLSOAP Muon SOAPMuon": [({}, {"weight_decay": 0.0101})],
    "SOAP KLSOAP SOAPMuon": [
        ({}, {"precondition_frequency": 4}),
        ({}, {"power_iter_steps": 2}),
        ({"refresh_method": "qr"}, {"refresh_method": "eigh"}),
    ],
    "SOAP SOAPMuon": [
        ({"precondition_warmup_steps": 8}, {"precondition_warmup_steps": 7}),
        ({"statistics_of": "gradient"}, {"statistics_of": "momentum"}),
    ],
    "SOAP": [({}, {"use_nesterov": True}), ({}, {"orthogonalize": True})],
    "KLSOAP": [
        ({}, {"initial_eigenvalue": 1.01}),
        ({"eigenvalue_floor": 0.5}, {"eigenvalue_floor": 0.505}),
        ({}, {"nesterov": True}),
    ],
    "KLSOAP Muon SOAPMuon": [
        ({"weight_decay": 0.3, "weight_decay_method": method}, {"weight_decay": 0.303})
        for method in ("independent", "palm", "l2")
    ],
    "Muon SOAPMuon": [
        ({}, {"nesterov": False}),
        ({}, {"steps": 6}),
        ({}, {"coefficients": "polar_express"}),
        ({"scale": 0.3}, {"scale": 0.303}),
        ({"normalize": "row", "beta2": 0.95}, {"beta2": 0.9595}),
    ],
    "SOAPMuon": [
        ({}, {"beta2": 0.9595}),
        ({}, {"shampoo_beta": 0.9595}),
        ({"eps": 1e-2}, {"eps": 1.01e-2}),
        ({}, {"muon_warmup_steps": 5}),
        ({}, {"second_moment": "permute"}),
    ],
}
"""Options, and an error of 1 % in one of them, or the next whole number or choice."""


@pytest.mark.parametrize(
    ("kind", "options", "ours"),
    [(kind, *pair) for kinds, pairs in WRONG.items() for kind in kinds.split() for pair in pairs],
    ids=str,
)
def test_tolerance_rejects_an_error_of_one_percent(
    kind: str, options: Options, ours: Options
) -> None:
    assert difference(kind, "tensor", options, ours).params > 100 * TOLERANCE
