"""SOAP against an independent fp64 implementation of its specification, over every option.

Shapes and warm-ups are chosen so that the factors have full rank when the first basis is taken: the eigenvectors of a null space are
arbitrary, and two right implementations then part ways.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from reference_soap import ReferenceSOAP

from lather.optim import SOAP

STEPS = 16
FULL_RANK = {"adam_warmup_steps": 4, "precondition_frequency": 3, "lr": 1e-2}
SHAPES = [(6, 6), (5, 8), (9, 4), (7,), (), (3, 4, 5), (2, 3, 2, 4)]
EXPERT_SHAPES = [(4, 5, 5), (3, 4, 6), (6, 7), (2, 3, 3, 4)]


def two_then_three(t: int) -> int:
    return 2 if t < 8 else 3


def described(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in options.items()) or "defaults"


SINGLE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"betas": (0.9, 0.99)},
    {"betas": (0.0, 0.5)},
    {"shampoo_beta": 0.8},
    {"shampoo_beta": 0.5},
    {"eps": 1e-3},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3},
    {"weight_decay": 0.3, "use_decoupled_weight_decay": False},
    {"use_nesterov": True},
    {"use_nesterov": True, "correct_bias": False},
    {"precondition_frequency": 1},
    {"precondition_frequency": 5},
    {"precondition_frequency": two_then_three},
    {"precondition_warmup_steps": 9},
    {"precondition_warmup_steps": 5, "adam_warmup_steps": 7},
    {"adam_warmup_steps": 6},
    {"adam_warmup_steps": STEPS + 1},
    {"max_precond_dim": 5},
    {"max_precond_dim": 0},
    {"trace_normalization": True, "lr": 1e-3},
    {"normalize_preconditioned_grads": True},
    {"max_update_rms": 0.5},
    {"correct_bias": False},
    {"second_moment": "rotate"},
    {"second_moment": "rotate", "precondition_frequency": 1},
    {"use_eigh": True},
    {"use_eigh": True, "second_moment": "rotate"},
    {"power_iter_steps": 3},
    {"use_adaptive_criteria": True},
    {"use_adaptive_criteria": True, "adaptive_update_tolerance": 0.05},
    {"use_adaptive_criteria": True, "adaptive_update_tolerance": 0.05, "second_moment": "rotate", "use_eigh": True},
]


def random_options(seed: int) -> dict[str, Any]:
    """A draw over all options at once."""
    draw = random.Random(seed)
    options: dict[str, Any] = {}
    for single in draw.sample(SINGLE_OPTIONS, 6):
        options.update(single)
    return options


def gradients(shapes: list[tuple[int, ...]], seed: int, *, idle: bool) -> list[list[np.ndarray | None]]:
    """One list per step: ill-scaled Gaussians; now and then a parameter has none, and an expert's slice is zero."""
    rng = np.random.default_rng(seed)
    steps: list[list[np.ndarray | None]] = []
    for step in range(STEPS):
        grads: list[np.ndarray | None] = []
        for index, shape in enumerate(shapes):
            g = np.asarray(rng.normal(size=shape) * (0.2 + rng.random(shape[-1:] or None)) * 10.0 ** rng.integers(-1, 2))
            if idle and len(shape) > 2 and step != 1:
                g[(step + index) % shape[0]] = 0.0
            grads.append(None if step in (3, 9) and index == 1 else g)
        steps.append(grads)
    return steps


def largest_difference(shapes: list[tuple[int, ...]], options: dict[str, Any], *, idle: bool = False, **ours: Any) -> float:
    """Between the package (with the options in `ours` on top) and the reference, over all parameters and steps, in units of lr."""
    options = {**FULL_RANK, **options}
    rng = np.random.default_rng(0)
    start = [np.asarray(rng.normal(size=shape)) for shape in shapes]
    params = [torch.nn.Parameter(torch.tensor(p)) for p in start]
    reference = ReferenceSOAP(start, **options)
    groups = [{"params": [p], "matrix_layout": "tensor" if p.dim() < 2 else options.get("matrix_layout", "tensor")} for p in params]
    optimizer = SOAP(groups, **{**options, "state_dtype": torch.float64, **ours})
    worst = 0.0
    for grads in gradients(shapes, 1, idle=idle):
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        reference.step(grads)
        for p, expected in zip(params, reference.params, strict=True):
            worst = max(worst, float(np.abs(p.detach().numpy() - expected).max()))
    return worst / options["lr"]


TOLERANCE = 1e-7  # of lr; steps are of the order of lr, and 1e-13 is what rounding gives before eigenvectors amplify it


@pytest.mark.parametrize("options", SINGLE_OPTIONS, ids=described)
def test_tensor_layout(options: dict[str, Any]) -> None:
    assert largest_difference(SHAPES, options) < TOLERANCE


@pytest.mark.parametrize("options", SINGLE_OPTIONS, ids=described)
def test_per_expert_layout_with_idle_experts(options: dict[str, Any]) -> None:
    assert largest_difference(EXPERT_SHAPES, {"matrix_layout": "per_expert", **options}, idle=True) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"second_moment": "rotate"}, {"use_eigh": True}], ids=described)
def test_fp32_state_stays_close(options: dict[str, Any]) -> None:
    """The default state, by a tolerance that an error of 1 % in the rate exceeds twenty times."""
    assert largest_difference(SHAPES, options, state_dtype=torch.float32) < 5e-3
    assert largest_difference(SHAPES, options, state_dtype=torch.float32, lr=1.01e-2) > 0.1


@pytest.mark.parametrize("seed", range(16))
def test_options_combined(seed: int) -> None:
    assert largest_difference(SHAPES, random_options(seed)) < TOLERANCE
    assert largest_difference(EXPERT_SHAPES, {"matrix_layout": "per_expert", **random_options(seed)}, idle=True) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"use_eigh": True}, {"second_moment": "rotate"}], ids=described)
def test_one_dimensional_parameters_preconditioned(options: dict[str, Any]) -> None:
    one_d: dict[str, Any] = {"precondition_1d": True, "adam_warmup_steps": 8}
    assert largest_difference([(5,), (3,), (4, 4)], {**one_d, **options}) < TOLERANCE


@pytest.mark.parametrize(
    "ours",
    [
        {"lr": 1.01e-2},
        {"betas": (0.9595, 0.95)},
        {"betas": (0.95, 0.9595)},
        {"shampoo_beta": 0.9595},
        {"weight_decay": 0.0101},
        {"precondition_frequency": 4},
        {"second_moment": "rotate"},
        {"adam_warmup_steps": 5},
    ],
    ids=described,
)
def test_tolerance_rejects_an_error_of_one_percent(ours: dict[str, Any]) -> None:
    assert largest_difference(SHAPES, {}, **ours) > 100 * TOLERANCE
