"""Runs the package's optimizers beside the NumPy reference, on the same parameters and gradients,
and compares them.

Two right implementations agree only where the step is well-conditioned: the eigenvectors of a null
space are arbitrary, and an entry of the projected gradient that is zero but for rounding has an
arbitrary sign. Shapes and warm-ups of the fixed tests are therefore such that factors have full
rank when the first basis is taken. A column of a basis is free up to its sign, which no comparison
here sees."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jaxtyping
import numpy as np
import torch
from optim_helpers import whole
from reference import Array, Reference, ReferenceKLSOAP, ReferenceSOAP, project_out, unstacked
from reference_muon import Reference as ReferenceOfMuon
from reference_muon import ReferenceMuon, ReferenceSOAPMuon

from lather.optim import KLSOAP, REKLS, SOAP, MatrixOptimizer, Muon, SOAPMuon, StackedSOAP

Shape = tuple[int, ...]
Gradients = list[list[Array | None]]
"""Gradients by step, then by parameter; None: the parameter has no gradient."""

TOLERANCE = 1e-7
"""Largest difference that is allowed: of parameters in units of lr (a step has that size), of state
relative to its largest entry. Rounding gives 1e-13 before eigenvectors amplify it."""

AnyReference = Reference | ReferenceOfMuon

CLASSES: dict[str, tuple[type[MatrixOptimizer], type[AnyReference], dict[str, Any]]] = {
    "SOAP": (SOAP, ReferenceSOAP, {}),
    "KLSOAP": (KLSOAP, ReferenceKLSOAP, {}),
    "REKLS": (REKLS, ReferenceKLSOAP, {"refresh_method": "eigh", "precondition_frequency": 1}),
    "StackedSOAP": (StackedSOAP, ReferenceKLSOAP, {"matrix_layout": "stacked"}),
    "Muon": (Muon, ReferenceMuon, {}),
    "SOAPMuon": (SOAPMuon, ReferenceSOAPMuon, {}),
}
"""By name, the package's class, the reference's class, and the reference's options that make it the
same rule."""

OF_THE_PACKAGE_ALONE = {"batched", "bucket_bytes", "num_streams", "max_state_bytes", "state_dtype"}
OF_THE_PACKAGE_ALONE |= {"fp32_matmul_prec", "qr_fp32_matmul_prec", "newton_schulz_dtype"}
OF_THE_PACKAGE_ALONE |= {"nonfinite", "offload", "stagger_first", "stagger_refresh"}
"""Options that say how something is computed, not what."""


@dataclass(frozen=True)
class Group:
    """Parameters with options of their own, besides the options of all groups."""

    shapes: Sequence[Shape]
    options: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    """Options for the reference alone."""


@dataclass
class Difference:
    """The largest differences over all parameters and steps."""

    params: float = 0.0
    """Difference of parameters in units of lr."""
    state: float = 0.0
    """Difference of state relative to each tensor's largest entry."""

    @property
    def is_rounding(self) -> bool:
        return max(self.params, self.state) < TOLERANCE


@contextmanager
def without_type_checks() -> Iterator[None]:
    """Leave the package's annotations unchecked inside the block: checking takes ten times as long
    as the checked code."""
    config = jaxtyping.config
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        # this decorates functions inside functions, at every call
        with mock.patch.object(jaxtyping, "jaxtyped", _leave_alone):
            yield
    finally:
        config.update("jaxtyping_disable", before)


def _leave_alone(**_: Any) -> Callable[[Any], Any]:
    return lambda function: function


def described(options: dict[str, Any]) -> str:
    """Describe the options by an id for pytest that is the same in every process."""
    return (
        ", ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in options.items())
        or "defaults"
    )


def gradients(
    shapes: Sequence[Shape],
    steps: int,
    *,
    seed: int = 1,
    idle: bool = False,
    missing: tuple[int, ...] = (1,),
    scale: float = 1.0,
) -> Gradients:
    """Draw ill-scaled Gaussians, with a scale for each step and one for each column. If `idle`, in
    every step but the second one slice along the leading dim of each parameter with more than two
    dims is zero; the parameters `missing` have no gradient in the fourth and tenth step."""
    rng = np.random.default_rng(seed)
    plan: Gradients = []
    for step in range(steps):
        grads: list[Array | None] = []
        for index, shape in enumerate(shapes):
            g = np.asarray(rng.normal(size=shape) * (0.2 + rng.random(shape[-1:] or None)))
            g = g * scale * 10.0 ** rng.integers(-1, 2)
            if idle and len(shape) > 2 and step != 1:
                g[(step + index) % shape[0]] = 0.0
            grads.append(None if step in (3, 9) and index in missing else g)
        plan.append(grads)
    return plan


def starting_points(shapes: Sequence[Shape], seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=shape)) for shape in shapes]


def optimizer_of(
    kind: str, groups: Sequence[Group], start: Sequence[Array], **options: Any
) -> tuple[MatrixOptimizer, list[torch.Tensor]]:
    """Make the package's optimizer, with fp64 parameters and state unless `options` say otherwise;
    returns it and its parameters in order."""
    params = [torch.nn.Parameter(torch.tensor(p)) for p in start]
    remaining = iter(params)
    own = [{"params": [next(remaining) for _ in group.shapes], **group.options} for group in groups]
    given = {"lr": 1e-2, "state_dtype": torch.float64, **options}
    with without_type_checks():
        return CLASSES[kind][0](own, **given), list(params)


def reference_of(kind: str, start: Sequence[Array], options: dict[str, Any]) -> AnyReference:
    """Make the reference with the package's options, translated."""
    _, reference, preset = CLASSES[kind]
    known = {"lr": 1e-2, **preset, **options}
    known = {key: value for key, value in known.items() if key not in OF_THE_PACKAGE_ALONE}
    if known.get("refresh_method") in ("cholesky_qr", "auto"):
        known["refresh_method"] = "qr"
    return reference(list(start), **known)


def compare(
    kind: str,
    groups: Sequence[Group],
    options: dict[str, Any],
    plan: Gradients | None = None,
    *,
    ours: dict[str, Any] | None = None,
    steps: int = 12,
    checked: bool = False,
) -> Difference:
    """Run both; compare parameters after every step, and state after every fourth and the last.
    Without a `plan` of gradients, in the order of the groups' parameters, `gradients` draws those
    of so many `steps`. `ours` are options for the package alone; `checked` says whether its
    annotations are checked, too."""
    shapes = [shape for group in groups for shape in group.shapes]
    start = starting_points(shapes)
    optimizer, params = optimizer_of(kind, groups, start, **{**options, **(ours or {})})
    ends = np.cumsum([len(group.shapes) for group in groups])
    slices = [slice(end - len(group.shapes), end) for group, end in zip(groups, ends, strict=True)]
    references = [
        reference_of(kind, start[own], {**options, **group.options, **group.theirs})
        for group, own in zip(groups, slices, strict=True)
    ]
    worst = Difference()
    plan = gradients(shapes, steps) if plan is None else plan
    for number, grads in enumerate(plan, 1):
        step_package(optimizer, params, grads, checked=checked)
        for own, reference in zip(slices, references, strict=True):
            reference.step(grads[own])
            for p, w, state in zip(params[own], reference.params, reference.state, strict=True):
                difference = largest(p.detach().numpy() - w) / reference.options.lr
                worst.params = max(worst.params, difference)
                if number % 4 == 0 or number == len(plan):
                    difference = state_difference(optimizer.state.get(p, {}), state, w.shape)
                    worst.state = max(worst.state, difference)
    return worst


def step_package(
    optimizer: MatrixOptimizer,
    params: Sequence[torch.Tensor],
    grads: Sequence[Array | None],
    *,
    checked: bool = False,
) -> None:
    """Take a step with these gradients, which the step must not change."""
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else torch.tensor(g, dtype=p.dtype)
    with nullcontext() if checked else without_type_checks():
        optimizer.step()
    for p, g in zip(params, grads, strict=True):
        assert g is None or torch.equal(p.grad, torch.tensor(g, dtype=p.dtype))


def largest(x: Array) -> float:
    """The largest magnitude in x; infinite if an entry is not a number."""
    value = float(np.abs(x).max(initial=0.0))
    return value if np.isfinite(value) else np.inf


def relative(ours: Array, expected: Array) -> float:
    return largest(ours - expected) / (largest(expected) or 1.0)


def state_difference(ours: dict[str, Any], expected: dict[str, Any], shape: Shape) -> float:
    """The difference of two states of a parameter of this shape, with bases and exp_avg compared up
    to the signs of the bases' columns."""
    assert set(ours) == set(expected)
    if not expected:
        return 0.0
    assert int(ours["step"]) == expected["step"]
    got = {key: value.double().numpy() for key, value in whole(ours).items()}
    worst = 0.0
    for key, value in expected.items():
        if key.startswith(("factor", "eigenvalues", "momentum", "row_moment", "norm")):
            worst = max(worst, relative(got[key], value))
        elif key.startswith("basis"):
            cosines = (got[key] * value).sum(-2)
            worst = max(worst, largest(np.abs(cosines) - 1.0))
    for key in {"exp_avg", "exp_avg_sq"} & expected.keys():
        wanted, found = (
            moment_in_parameter_coordinates(one) if key == "exp_avg" else one[key]
            for one in (expected, got)
        )
        # a stacked parameter without any factor keeps its moments in its own shape
        if found.shape != wanted.shape:
            wanted = unstacked(wanted, shape)
        worst = max(worst, relative(found, wanted))
    return worst


def moment_in_parameter_coordinates(state: dict[str, Any]) -> Array:
    """Project exp_avg out of the eigenbases."""
    bases = {int(key[6:]): q for key, q in state.items() if key.startswith("basis_")}
    if any(q.ndim == 3 for q in bases.values()):
        of_experts = ({dim: q[e] for dim, q in bases.items()} for e in range(len(state["exp_avg"])))
        return np.stack(list(map(project_out, state["exp_avg"], of_experts)))
    return project_out(state["exp_avg"], bases)
