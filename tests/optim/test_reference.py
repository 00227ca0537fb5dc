"""SOAP, KLSOAP, REKLS and StackedSOAP against an independent fp64 implementation of their
specification, over every option and layout."""

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

STEPS = 12
FULL_RANK = {"adam_warmup_steps": 4, "precondition_frequency": 3}
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "tensor": [(6, 6), (5, 8), (5, 8), (7,), (), (3, 4, 5), (2, 3, 2, 4)],
    "per_expert": [(4, 5, 5), (3, 4, 6), (3, 4, 6), (6, 7), (2, 3, 3, 4)],
    "stacked": [(3, 5, 3), (3, 4, 6), (3, 4, 6), (6, 7)],
}
LAYOUTS = list(SHAPES)


def two_then_three(t: int) -> int:
    return 2 if t < 8 else 3


BOTH: list[dict[str, Any]] = [
    {},
    {"betas": (0.9, 0.99)},
    {"betas": (0.0, 0.5)},
    {"shampoo_beta": 0.8},
    {"shampoo_beta": 0.5},
    {"eps": 1e-3},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3},
    {"precondition_frequency": 1},
    {"precondition_frequency": 5},
    {"precondition_frequency": two_then_three},
    {"adam_warmup_steps": 6},
    {"adam_warmup_steps": STEPS + 1},
    {"max_precond_dim": 5},
    {"max_precond_dim": 0},
    {"max_update_rms": 0.5},
    {"correct_bias": False},
    {"power_iter_steps": 3},
    {"use_adaptive_criteria": True},
    {"use_adaptive_criteria": True, "adaptive_update_tolerance": 0.05},
    {"use_adaptive_criteria": True, "adaptive_update_tolerance": 0.05, "refresh_method": "eigh"},
    {"refresh_method": "qr"},
    {"refresh_method": "eigh"},
    {"refresh_method": "cholesky_qr"},
    {"refresh_method": "auto", "precondition_frequency": 1},
    {"maximize": True},
    {"sides": "smaller"},
    {"sides": "larger"},
    {"sides": "smaller", "max_precond_dim": 5},
]
SOAP_OPTIONS: list[dict[str, Any]] = [
    *BOTH,
    {"weight_decay": 0.3, "use_decoupled_weight_decay": False},
    {"weight_decay": 0.3, "use_decoupled_weight_decay": False, "maximize": True},
    {"use_nesterov": True},
    {"use_nesterov": True, "correct_bias": False},
    {"precondition_warmup_steps": 9},
    {"precondition_warmup_steps": 5, "adam_warmup_steps": 7},
    {"trace_normalization": True, "lr": 1e-3},
    {"normalize_preconditioned_grads": True},
    {"second_moment": "rotate"},
    {"second_moment": "rotate", "precondition_frequency": 1},
    {
        "second_moment": "rotate",
        "use_adaptive_criteria": True,
        "adaptive_update_tolerance": 0.05,
        "use_eigh": True,
    },
    {"use_eigh": True},
    {"statistics_of": "momentum"},
    {"statistics_of": "momentum", "correct_bias": False, "second_moment": "rotate"},
    {"statistics_of": "momentum", "precondition_frequency": 1, "use_eigh": True},
    {"orthogonalize": True},
    {"orthogonalize": True, "statistics_of": "momentum", "sides": "smaller", "max_update_rms": 0.1},
]
KL_OPTIONS: list[dict[str, Any]] = [
    *BOTH,
    {"weight_decay": 0.3, "weight_decay_method": "independent"},
    {"weight_decay": 0.3, "weight_decay_method": "l2"},
    {"weight_decay": 0.3, "weight_decay_method": "l2", "maximize": True},
    {"weight_decay": 0.3, "weight_decay_method": "palm"},
    {"nesterov": True},
    {"nesterov": True, "correct_bias": False},
    {"initial_eigenvalue": 0.1},
    {"initial_eigenvalue": 20.0, "eps": 0.5},
    {"eigenvalue_floor": 0.5},
    {"eigenvalue_floor": 2.0, "second_moment": "permute"},
    {"eigenvalue_floor": 1.0, "sides": "smaller"},
    {"second_moment": "permute"},
    {"second_moment": "permute", "precondition_frequency": 1},
    {"second_moment": "permute", "refresh_method": "eigh"},
    {"second_moment": "permute", "use_adaptive_criteria": True, "adaptive_update_tolerance": 0.05},
]
SINGLE_OPTIONS = {"SOAP": SOAP_OPTIONS, "KLSOAP": KL_OPTIONS}


def random_options(kind: str, seed: int) -> dict[str, Any]:
    """Draw all options at once."""
    draw = random.Random(seed)
    options: dict[str, Any] = {}
    for single in draw.sample(SINGLE_OPTIONS[kind], 6):
        options.update(single)
    if options.get("use_eigh"):
        options.pop("refresh_method", None)
    return options


def difference(
    kind: str, layout: str, options: dict[str, Any], ours: dict[str, Any] | None = None
) -> Difference:
    groups = [Group(SHAPES[layout], {"matrix_layout": layout})]
    plan = gradients(SHAPES[layout], STEPS, idle=layout == "per_expert")
    return compare(kind, groups, {**FULL_RANK, **options}, plan, ours=ours)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", SOAP_OPTIONS, ids=described)
def test_soap(options: dict[str, Any], layout: str) -> None:
    assert difference("SOAP", layout, options).is_rounding


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", KL_OPTIONS, ids=described)
def test_kl_soap(options: dict[str, Any], layout: str) -> None:
    assert difference("KLSOAP", layout, options).is_rounding


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
@pytest.mark.parametrize("seed", range(9))
def test_options_combined(seed: int, kind: str) -> None:
    assert difference(kind, LAYOUTS[seed % 3], random_options(kind, seed)).is_rounding


@pytest.mark.parametrize(
    "options",
    [{}, {"adam_warmup_steps": 4, "nesterov": True, "max_update_rms": 0.5}],
    ids=described,
)
@pytest.mark.parametrize("kind", ["REKLS", "StackedSOAP"])
def test_presets(kind: str, options: dict[str, Any]) -> None:
    # these have full rank from the first gradient on
    shapes = [(5, 5, 5), (4, 4)] if kind == "REKLS" else [(5, 5), (1, 4, 4)]
    assert compare(kind, [Group(shapes)], options).is_rounding
    if "adam_warmup_steps" in options:
        assert compare(kind, [Group(SHAPES["stacked"])], options).is_rounding


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SOAP", {}),
        ("SOAP", {"second_moment": "rotate", "precondition_warmup_steps": 5}),
        ("KLSOAP", {}),
        ("KLSOAP", {"adam_warmup_steps": 0, "eps": 1e-3}),
        (
            "KLSOAP",
            {
                "adam_warmup_steps": 0,
                "eps": 1e-3,
                "second_moment": "permute",
                "refresh_method": "eigh",
            },
        ),
        ("REKLS", {"adam_warmup_steps": 0, "eps": 1e-3}),
    ],
    ids=str,
)
def test_shortest_warm_up(kind: str, options: dict[str, Any]) -> None:
    """There are the defaults, and no warm-up at all, where the first projected gradient is diagonal
    but for rounding: hence the larger eps."""
    assert compare(kind, [Group([(5, 5), (3, 4, 5)])], options).is_rounding


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
@pytest.mark.parametrize("refresh_method", ["auto", "eigh"])
@pytest.mark.parametrize("second_moment", ["rotate", "permute"])
def test_one_dimensional_parameters_preconditioned(
    kind: str, refresh_method: str, second_moment: str
) -> None:
    options = {
        "precondition_1d": True,
        "adam_warmup_steps": 8,
        "refresh_method": refresh_method,
        "second_moment": second_moment,
    }
    assert compare(
        kind, [Group([(5,), (3,), (5,), (4, 4)])], {**options, "precondition_frequency": 1}
    ).is_rounding


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
def test_one_side_where_the_other_is_more_than_eight_times_as_long(kind: str) -> None:
    """A (2, 16) matrix still has both sides; experts and stacks are judged by the matrices that
    they are."""
    groups = [
        Group([(2, 17), (17, 2), (2, 16), (5, 6)]),
        Group([(2, 2, 17)], {"matrix_layout": "per_expert"}),
    ]
    groups += [Group([(3, 6, 3)], {"matrix_layout": "stacked"})]
    options = {"sides": "auto", "adam_warmup_steps": 9, "precondition_frequency": 2}
    assert compare(kind, groups, options, steps=14).is_rounding


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dims_of_size_one(kind: str, layout: str) -> None:
    shapes = [(1, 4), (4, 1), (1, 1), (1, 3, 3), (3, 1, 3), (3, 3, 1)] + (
        [(1,)] if layout == "tensor" else []
    )
    options = {
        "matrix_layout": layout,
        "adam_warmup_steps": 5,
        "precondition_frequency": 2,
        "precondition_1d": True,
    }
    assert compare(kind, [Group(shapes)], options).is_rounding


@pytest.mark.parametrize("refresh_method", ["qr", "cholesky_qr", "auto"])
@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
def test_more_than_a_block_of_rows(kind: str, refresh_method: str) -> None:
    """Cholesky-QR works through 32 rows at a time."""
    options = {
        "adam_warmup_steps": 3,
        "precondition_frequency": 1,
        "refresh_method": refresh_method,
    }
    assert compare(kind, [Group([(40, 36), (66, 70)])], options, steps=7).is_rounding


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
@pytest.mark.parametrize(
    "ours",
    [
        {},
        {"batched": False},
        {"bucket_bytes": 1},
        {"bucket_bytes": 6 * 8 * 25 * 2},
        {"num_streams": 2},
        {"fp32_matmul_prec": "medium", "qr_fp32_matmul_prec": "high"},
        {"max_state_bytes": 2**20},
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
    options = {"adam_warmup_steps": 5, "precondition_frequency": 2, "matrix_layout": "per_expert"}
    assert compare(kind, [Group(shapes)], options, plan, ours=ours).is_rounding


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
def test_groups(kind: str) -> None:
    """Groups have equal and different options and layouts, over matrices that could share a
    bucket."""
    nesterov = "use_nesterov" if kind == "SOAP" else "nesterov"
    groups = [
        Group([(6, 6), (6, 6)]),
        Group(
            [(6, 6), (2, 6, 6)], {"lr": 3e-3, "betas": (0.8, 0.9), "matrix_layout": "per_expert"}
        ),
        Group([(6, 6)]),
        Group(
            [(6, 6), (2, 6, 6)],
            {
                "weight_decay": 0.2,
                "shampoo_beta": 0.7,
                "max_precond_dim": 8,
                "matrix_layout": "stacked",
            },
        ),
        Group(
            [(6, 6)],
            {"precondition_frequency": 2, "adam_warmup_steps": 6, "refresh_method": "eigh"},
        ),
        Group(
            [(6, 6), (4,)],
            {"second_moment": "rotate", "maximize": True, "eps": 1e-2, nesterov: True},
        ),
        Group(
            [(6, 6)],
            {
                "second_moment": "permute",
                "correct_bias": False,
                "max_update_rms": 0.3,
                "power_iter_steps": 2,
            },
        ),
    ]
    assert compare(kind, groups, FULL_RANK).is_rounding


@pytest.mark.parametrize(
    "options", [{}, {"refresh_method": "eigh"}, {"use_adaptive_criteria": True}], ids=described
)
@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
def test_gradients_of_zeros(kind: str, options: dict[str, Any]) -> None:
    """Gradients are zero from the first step on, over the first basis, and later: as a whole and
    for single experts. Factors are square, so that the first gradient gives them full rank."""
    shapes = [(3, 5, 5), (4, 4), (4, 4)]
    plan: list[Any] = gradients(shapes, 14, missing=())
    for step, grads in enumerate(plan):
        seen = [
            np.array([step > 6, step < 4, step % 3 == 1])[:, None, None],
            step > 7,
            step not in (0, 5, 6),
        ]
        grads[:] = [g * factor for g, factor in zip(grads, seen, strict=True)]
    for layout in ("per_expert", "tensor"):
        settings = {
            "adam_warmup_steps": 3,
            "precondition_frequency": 2,
            "matrix_layout": layout,
            "eps": 1e-3,
        }
        assert compare(kind, [Group(shapes)], {**settings, **options}, plan).is_rounding


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_scale_of_gradients(kind: str, scale: float) -> None:
    options = {**FULL_RANK, "eps": 1e-8 * min(scale, 1.0) ** 2}
    if kind == "KLSOAP":
        options["initial_eigenvalue"] = (
            # factors then have this scale; with ones they would first have scale**2 and then one
            scale
        )
    for layout in LAYOUTS:
        plan = gradients(SHAPES[layout], STEPS, idle=layout == "per_expert", scale=scale)
        assert compare(
            kind, [Group(SHAPES[layout], {"matrix_layout": layout})], options, plan
        ).is_rounding


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
def test_skipped_gradients_are_missing_ones(kind: str) -> None:
    shapes = [(5, 5), (5, 5), (5, 4)]
    start, plan = starting_points(shapes), gradients(shapes, STEPS)
    ends = []
    for hole in (None, np.nan):
        optimizer, params = optimizer_of(
            kind, [Group(shapes)], start, **FULL_RANK, nonfinite="skip"
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


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
def test_staggered_refreshes(kind: str) -> None:
    """With four equal matrices and an interval of four, matrix i is refreshed i steps before the
    interval is full."""
    options = {"adam_warmup_steps": 3, "stagger_refresh": True, "precondition_frequency": 4}
    groups = [
        Group([(5, 6)], theirs={"precondition_frequency": partial(early, shift)})
        for shift in range(4)
    ]
    assert compare(kind, groups, options).is_rounding


@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
def test_staggered_first_bases(kind: str) -> None:
    """Matrix i of four has its first bases where its interval of four is first full; until then it
    is like one in a longer warm-up."""
    options = {
        "stagger_refresh": True,
        "stagger_first": True,
        "precondition_frequency": 4,
        "adam_warmup_steps": 1,
    }
    first = 1 if kind == "SOAP" else 2
    groups = []
    for shift in range(4):
        step = next(t for t in range(first, first + 4) if (t + shift) % 4 == 0)
        groups.append(
            Group(
                [(5, 6)],
                theirs={
                    "precondition_frequency": partial(early, shift),
                    "adam_warmup_steps": step + 1 - first,
                },
            )
        )
    assert compare(kind, groups, options).is_rounding


def early(shift: int, t: int) -> int:
    """A number that divides t just when an interval of four, begun `shift` steps early, is full."""
    return 1 if (t + shift) % 4 == 0 else t + 1


@pytest.mark.parametrize("kind", [*SINGLE_OPTIONS, "REKLS", "StackedSOAP"])
def test_annotations_hold(kind: str) -> None:
    """The other tests of this file do not check annotations, to save time."""
    groups = [Group([(3, 5, 5), (5, 5), (3, 5, 5)]), Group([(4,), ()], {"matrix_layout": "tensor"})]
    options = {
        "adam_warmup_steps": 4,
        "use_adaptive_criteria": True,
        "matrix_layout": "stacked" if kind == "StackedSOAP" else "per_expert",
    }
    assert compare(kind, groups, options, steps=7, checked=True).is_rounding


@pytest.mark.parametrize(
    "options", [{}, {"second_moment": "rotate"}, {"refresh_method": "eigh"}], ids=described
)
@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
def test_fp32_state_stays_close(kind: str, options: dict[str, Any]) -> None:
    """This is the default state; an error of 1 % in the rate would exceed the tolerance ten
    times."""
    assert difference(kind, "tensor", options, {"state_dtype": torch.float32}).params < 5e-3
    assert (
        difference(kind, "tensor", options, {"state_dtype": torch.float32, "lr": 1.01e-2}).params
        > 5e-2
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SINGLE_OPTIONS)
def test_tolerance_rejects_an_error_of_one_percent_in_every_layout(kind: str, layout: str) -> None:
    assert difference(kind, layout, {}, {"lr": 1.01e-2}).params > 100 * TOLERANCE
    assert (
        difference(kind, layout, {"shampoo_beta": 0.95}, {"shampoo_beta": 0.9595}).params
        > 100 * TOLERANCE
    )


@pytest.mark.parametrize(
    ("kind", "options", "ours"),
    [
        ("both", {}, {"betas": (0.9595, 0.95)}),
        ("both", {}, {"betas": (0.95, 0.9595)}),
        ("both", {}, {"weight_decay": 0.0101}),
        ("both", {"eps": 1e-3}, {"eps": 1.01e-3}),
        ("both", {"max_update_rms": 0.5}, {"max_update_rms": 0.505}),
        ("both", {}, {"precondition_frequency": 4}),
        ("both", {}, {"adam_warmup_steps": 5}),
        ("both", {"second_moment": "permute"}, {"second_moment": "rotate"}),
        ("both", {}, {"power_iter_steps": 2}),
        ("both", {}, {"correct_bias": False}),
        ("both", {"refresh_method": "qr"}, {"refresh_method": "eigh"}),
        ("SOAP", {"precondition_warmup_steps": 8}, {"precondition_warmup_steps": 7}),
        (
            "SOAP",
            {"weight_decay": 0.3, "use_decoupled_weight_decay": False},
            {"weight_decay": 0.303},
        ),
        ("SOAP", {}, {"use_nesterov": True}),
        ("SOAP", {}, {"statistics_of": "momentum"}),
        ("SOAP", {}, {"orthogonalize": True}),
        ("KLSOAP", {}, {"initial_eigenvalue": 1.01}),
        ("KLSOAP", {"eigenvalue_floor": 0.5}, {"eigenvalue_floor": 0.505}),
        ("KLSOAP", {}, {"nesterov": True}),
        *(
            (
                "KLSOAP",
                {"weight_decay": 0.3, "weight_decay_method": method},
                {"weight_decay": 0.303},
            )
            for method in ("independent", "l2", "palm")
        ),
    ],
    ids=str,
)
def test_tolerance_rejects_an_error_of_one_percent(
    kind: str, options: dict[str, Any], ours: dict[str, Any]
) -> None:
    """For whole numbers and choices the error is the next one."""
    for one in SINGLE_OPTIONS if kind == "both" else [kind]:
        options = {"betas": (0.95, 0.95), **options}
        assert difference(one, "tensor", options, ours).params > 100 * TOLERANCE
