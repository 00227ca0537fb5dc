"""Random shapes, options and gradients: the package against the reference where a step is
well-defined, and invariants everywhere.

The reference itself tells whether a step is well-defined: it runs a second time with gradients that
differ in the twelfth digit. As long as that changes little and no basis was taken of a factor that
lacks full rank, the package has to agree to within that change. Where null spaces or equal
eigenvalues leave the rule a choice, only the invariants are checked.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from comparison import (
    Group,
    Shape,
    largest,
    optimizer_of,
    reference_of,
    starting_points,
    step_package,
)
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from optim_helpers import whole
from reference import Array, State

SETTINGS: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
MAX_NUMEL = 2000
NOISE = 1e-12

COMMON = {
    "lr": st.sampled_from([1e-3, 3e-2]),
    "betas": st.tuples(st.sampled_from([0.0, 0.9, 0.95]), st.sampled_from([0.5, 0.95, 0.999])),
    "shampoo_beta": st.sampled_from([0.0, 0.5, 0.95]),
    "eps": st.sampled_from([1e-8, 1e-3]),
    "weight_decay": st.sampled_from([0.0, 0.3]),
    "precondition_frequency": st.integers(1, 3),
    "correct_bias": st.booleans(),
    "power_iter_steps": st.integers(1, 3),
    "max_update_rms": st.sampled_from([0.0, 0.5]),
    "precondition_1d": st.booleans(),
    "max_precond_dim": st.sampled_from([0, 4, 16, 8192]),
    "use_adaptive_criteria": st.booleans(),
    "adaptive_update_tolerance": st.sampled_from([None, 1e-3, 0.05]),
    "refresh_method": st.sampled_from(["qr", "cholesky_qr", "eigh", "auto"]),
    "second_moment": st.sampled_from(["permute", "rotate"]),
    "maximize": st.booleans(),
}
SOAP_ALONE = {
    "use_decoupled_weight_decay": st.booleans(),
    "use_nesterov": st.booleans(),
    "precondition_warmup_steps": st.sampled_from([0, 3, 6]),
    "trace_normalization": st.booleans(),
    "normalize_preconditioned_grads": st.booleans(),
}
KL_ALONE = {
    "weight_decay_method": st.sampled_from(["decoupled", "independent", "l2", "palm"]),
    "initial_eigenvalue": st.sampled_from([0.1, 1.0, 30.0]),
    "nesterov": st.booleans(),
}
PATTERNS = ["plain", "plain", "plain", "none", "zero", "idle", "tiny", "huge"]


@dataclass
class Case:
    kind: str
    groups: list[Group]
    options: dict[str, Any]
    plan: list[list[Array | None]]

    @property
    def shapes(self) -> list[Shape]:
        return [shape for group in self.groups for shape in group.shapes]


@st.composite
def shapes_of(draw: st.DrawFn) -> Shape:
    """Draw shapes of 1 to 4 dims of 1 to 40, with few elements."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        shape.append(draw(st.integers(1, min(40, MAX_NUMEL // math.prod(shape)))))
    return tuple(draw(st.permutations(shape)))


def full_rank_after(shape: Shape, layout: str) -> int:
    """The number of gradients after which every factor of a matrix of this shape has full rank."""
    inner = shape[1:] if layout == "per_expert" and len(shape) > 2 else shape
    if layout == "stacked" and len(shape) == 3:
        b, m, n = shape
        inner = (m, b * n) if n <= m else (b * m, n)
    return max(math.ceil(n * n / math.prod(inner)) for n in inner)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["SOAP", "KLSOAP", "REKLS", "StackedSOAP"]))
    optional = {**COMMON, **(SOAP_ALONE if kind == "SOAP" else KL_ALONE)}
    options = draw(st.fixed_dictionaries({}, optional=optional))
    shapes = draw(st.lists(shapes_of(), min_size=1, max_size=2))
    shapes += shapes[: draw(st.integers(0, 1))]  # a second member of the first shape's bucket
    wanted = "stacked"
    if kind != "StackedSOAP":
        wanted = draw(st.sampled_from(["tensor", "per_expert", "stacked"]))
    groups, warmup = [], 0
    for shape in shapes:
        is_tensor = len(shape) < 2 or (wanted == "stacked" and len(shape) > 3)
        layout = "tensor" if is_tensor else wanted
        groups.append(Group([shape], {"matrix_layout": layout}))
        warmup = max(warmup, full_rank_after(shape, layout) + 1)
    options["adam_warmup_steps"] = draw(st.sampled_from([min(warmup, 5), 1, 0, 2]))
    rng = np.random.default_rng(draw(st.integers(1, 2**16)))  # seed 0 gives the parameters
    patterns = st.lists(st.sampled_from(PATTERNS), min_size=len(shapes), max_size=len(shapes))
    plan = [
        [gradient(rng, shape, pattern) for shape, pattern in zip(shapes, row, strict=True)]
        for row in draw(st.lists(patterns, min_size=3, max_size=8))
    ]
    return Case(kind, groups, options, plan)


def gradient(rng: np.random.Generator, shape: Shape, pattern: str) -> Array | None:
    """Draw values that fp32 holds exactly."""
    if pattern == "none":
        return None
    scale = {"zero": 0.0, "tiny": 1e-12, "huge": 1e6}.get(pattern, 1.0)
    g = rng.normal(size=shape) * (0.2 + rng.random(shape[-1])) * scale
    if pattern == "idle":
        g[rng.random(shape[0]) < 0.5] = 0.0
    return g.astype(np.float32).astype(np.float64)


def disturbed(g: Array | None, layout: str, rng: np.random.Generator) -> Array | None:
    """Add noise to all entries of g, those of zero too, except where a whole matrix is zero."""
    if g is None:
        return None
    axes = tuple(range(1, g.ndim)) if layout == "per_expert" and g.ndim > 2 else None
    largest_of_matrix = np.abs(g).max(axis=axes, keepdims=True)
    return np.asarray(g + NOISE * largest_of_matrix * rng.normal(size=g.shape))


def lacks_rank(state: State) -> bool:
    """Whether a factor with a basis lacks full rank; a factor of zeros does not count, because its
    basis is the identity."""
    for name, q in state.items():
        if name.startswith("basis"):
            w = np.linalg.eigvalsh(state[name.replace("basis", "factor")])
            has_basis = (q != np.eye(q.shape[-1])).any((-2, -1))
            if (has_basis & (w[..., -1] > 0) & (w[..., 0] < 1e-10 * w[..., -1])).any():
                return True
    return False


def check_state(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], tolerance: float
) -> None:
    """Check that values are finite, bases orthonormal, factors symmetric and positive
    semi-definite, and second moments not negative."""
    for p in params:
        assert bool(p.isfinite().all())
        for name, value in whole(optimizer.state.get(p, {})).items():
            assert bool(value.isfinite().all()), name
            x = value.detach().double()
            if name.startswith("basis"):
                assert (x.mT @ x - torch.eye(x.shape[-1])).abs().max() < tolerance, name
            elif name.startswith("factor"):
                x = x / x.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
                assert (x - x.mT).abs().max() <= tolerance, name
                assert torch.linalg.eigvalsh(x).min() > -tolerance, name
            elif name == "exp_avg_sq":
                assert x.min() >= 0, name


BATCHED = given(cases(), st.booleans(), st.sampled_from([2**13, 2**28]))
TRANSPOSED = given(cases(), st.booleans(), st.booleans(), st.sampled_from([2**13, 2**28]))
BUCKETED = given(cases(), st.sampled_from([2**13, 2**28]))


@BATCHED
@settings(max_examples=60, **SETTINGS)
def test_package_follows_the_reference_where_it_is_well_defined(
    case: Case, batched: bool, bucket_bytes: int
) -> None:
    start = starting_points(case.shapes)
    ours = {**case.options, "batched": batched, "bucket_bytes": bucket_bytes}
    optimizer, params = optimizer_of(case.kind, case.groups, start, **ours)
    rng = np.random.default_rng(0)
    pairs = [
        [reference_of(case.kind, [w], {**case.options, **group.options}) for _ in range(2)]
        for w, group in zip(start, case.groups, strict=True)
    ]
    well_defined = [True] * len(params)
    for grads in case.plan:
        step_package(optimizer, params, grads)
        for i, ((reference, other), g) in enumerate(zip(pairs, grads, strict=True)):
            before = reference.params[0].copy()
            reference.step([g])
            other.step([disturbed(g, case.groups[i].options["matrix_layout"], rng)])
            w, lr = reference.params[0], reference.options.lr
            sensitivity = largest(other.params[0] - w)
            follows = sensitivity <= 1e-3 * max(lr, largest(w - before))
            well_defined[i] = well_defined[i] and follows and not lacks_rank(reference.state[0])
            if well_defined[i]:
                tolerance = 1e-9 * lr + 1e-13 * largest(w) + 10 * sensitivity
                assert largest(params[i].detach().numpy() - w) <= tolerance
    event(f"{sum(well_defined)} of {len(params)} parameters well-defined to the end")
    check_state(optimizer, params, 1e-9)


def run_fp32(case: Case, *, transposed: bool = False, **options: Any) -> list[torch.Tensor]:
    """Run with the default state; returns parameters and state at the end."""
    start = [p.astype(np.float32) for p in starting_points(case.shapes)]
    options = {**case.options, "state_dtype": torch.float32, **options}
    optimizer, params = optimizer_of(case.kind, case.groups, start, **options)
    for p in params:
        if transposed and p.dim() > 1:
            p.data = p.data.mT.contiguous().mT
    before = [(p.stride(), p.dtype, p.data_ptr()) for p in params]
    for grads in case.plan:
        step_package(optimizer, params, grads)
    assert [(p.stride(), p.dtype, p.data_ptr()) for p in params] == before
    check_state(optimizer, params, 1e-4)
    return [*params, *(value for p in params for value in optimizer.state.get(p, {}).values())]


@TRANSPOSED
@settings(max_examples=40, **SETTINGS)
def test_invariants_in_fp32(case: Case, transposed: bool, batched: bool, bucket_bytes: int) -> None:
    run_fp32(case, transposed=transposed, batched=batched, bucket_bytes=bucket_bytes)


@pytest.mark.skipif(
    not torch.backends.mkl.is_available(),
    reason="only MKL, with MKL_CBWR as in tests/tester.py, promises these bits",
)
@BUCKETED
@settings(max_examples=25, **SETTINGS)
def test_one_by_one_gives_the_bits_of_batches(case: Case, bucket_bytes: int) -> None:
    batched = run_fp32(case, bucket_bytes=bucket_bytes)
    one_by_one = run_fp32(case, batched=False)
    assert all(torch.equal(a, b) for a, b in zip(batched, one_by_one, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("test", "drawn", "number"),
    [
        (test_package_follows_the_reference_where_it_is_well_defined, BATCHED, 200),
        (test_invariants_in_fp32, TRANSPOSED, 100),
        (test_one_by_one_gives_the_bits_of_batches, BUCKETED, 60),
    ],
)
def test_more_examples(test: Any, drawn: Any, number: int) -> None:
    settings(max_examples=number, **SETTINGS)(drawn(test.hypothesis.inner_test))()
