"""Bytes of state are known without allocating, and bytes of temporary memory do not grow with the
number of parameters."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from optim_helpers import CLASSES, give_gradients, make, parameters
from strangers import Lion, Shampoo
from torch.profiler import ProfilerActivity, profile

from lather.optim import (
    KLSOAP,
    SOAP,
    MatrixOptimizer,
    Muon,
    Rule,
    SOAPMuon,
    StackedSOAP,
    state_bytes,
)

SHAPES = [(5, 6), (3, 4, 5), (3, 5, 4), (), (0, 5)]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"matrix_layout": "per_expert"},
    {"matrix_layout": "stacked"},
    {"max_precond_dim": 4},
    {"max_precond_dim": 0},
    {"state_dtype": torch.float64},
    {"state_dtype": torch.bfloat16},
    {"state_dtype": {"moments": torch.bfloat16}, "matrix_layout": "per_expert"},
    {"state_dtype": {"bases": torch.bfloat16}},
    {"max_update_rms": 1.0, "max_precond_dim": 0},
    {"normalize": "row", "matrix_layout": "per_expert"},
    {"keep_norm": True},
    {"keep_norm": True, "matrix_layout": "per_expert", "state_dtype": torch.bfloat16},
    {"sides": "smaller"},
    {"sides": "larger", "matrix_layout": "stacked"},
    {"sides": "auto"},
]
TYPES: dict[str, Any] = {**CLASSES, "Shampoo": Shampoo, "Lion": Lion}
KNOWN = {
    name: {field.name for field in fields(cls if issubclass(cls, Rule) else cls.rule)}
    for name, cls in TYPES.items()
}
"""The options that each class knows."""


def described(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items()) or "defaults"


def allocated(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> int:
    return sum(value.numel() * value.element_size() for value in optimizer.state[p].values())


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in TYPES for options in OPTIONS if options.keys() <= KNOWN[name]],
    ids=str,
)
def test_state_bytes_is_what_is_allocated(name: str, options: dict[str, Any]) -> None:
    if name == "StackedSOAP" and options.get("matrix_layout") == "per_expert":
        with pytest.raises(ValueError, match="per_expert"):
            state_bytes((3, 4, 5), StackedSOAP, **options)
        return
    cls = TYPES[name]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = (
        MatrixOptimizer(params, cls(1e-3, **options))
        if issubclass(cls, Rule)
        else cls(params, lr=1e-3, **options)
    )
    optimizer.init_state()
    for p in params:
        assert state_bytes(tuple(p.shape), cls, **options) == allocated(optimizer, p), p.shape


@pytest.mark.parametrize("options", [{}, {"precondition_1d": True}], ids=described)
@pytest.mark.parametrize("name", ["SOAP", "KLSOAP", "REKLS"])
def test_state_bytes_of_a_vector(name: str, options: dict[str, Any]) -> None:
    p = torch.nn.Parameter(torch.zeros(7))
    optimizer = CLASSES[name]([p], lr=1e-3, **options)
    optimizer.init_state()
    assert state_bytes((7,), CLASSES[name], **options) == allocated(optimizer, p)


def test_state_bytes_in_numbers() -> None:
    m, n = 5, 6
    assert state_bytes((m, n)) == 4 * (2 * m * n + 2 * (m * m + n * n)) + 4
    assert state_bytes((m, n), KLSOAP) == 4 * (2 * m * n + 2 * (m * m + n * n) + m + n) + 4
    assert state_bytes((8, m, n), matrix_layout="per_expert") == 8 * (state_bytes((m, n)) - 4) + 4
    assert state_bytes((8, n, m), StackedSOAP) == state_bytes((n, 8 * m), KLSOAP)
    assert state_bytes((m, n), Muon) == 4 * m * n + 4
    assert state_bytes((m, n), Muon, normalize="row", keep_norm=True) == 4 * (m * n + m + 1) + 4
    assert state_bytes((m, n), SOAPMuon) == 4 * (2 * m * n + 2 * m * m) + 4
    # as the class documentation says
    assert state_bytes((768, 2048), SOAPMuon) - 4 == 4 * 2.75 * 768 * 2048
    assert (
        state_bytes((8, m, n), SOAPMuon, matrix_layout="per_expert", sides="both")
        == 8 * (state_bytes((m, n)) - 4) + 4
    )
    assert (
        state_bytes((m, n), state_dtype=torch.bfloat16)
        == 2 * 2 * m * n + (4 + 2) * (m * m + n * n) + 4
    )


def test_the_optimizers_own_account_of_bytes_is_the_limit_it_keeps() -> None:
    size = state_bytes((5, 6))
    SOAP(parameters([(5, 6)]), max_state_bytes=size)
    with pytest.raises(ValueError, match="max_state_bytes"):
        SOAP(parameters([(5, 6)]), max_state_bytes=size - 1)


@pytest.mark.parametrize(
    "options",
    [{"initial_eigenvalue": 1.0}, {"second_momentum": "rotate"}, {"max_precond_dim": -1}],
    ids=described,
)
def test_state_bytes_refuses_options_that_the_optimizer_does_not_take(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        state_bytes((4, 4), SOAP, **options)


# --- temporary memory -----------------------------------------------------------------------------


def peak_of_a_step(kind: str, num: int, bucket_bytes: int, **options: Any) -> int:
    """Return the most bytes that a step held at once beyond those before it; the step refreshes
    every basis."""
    params = parameters([(64, 128)] * num)
    optimizer = make(kind, params, bucket_bytes=bucket_bytes, precondition_frequency=1, **options)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    give_gradients(params, 2)
    peak = peak_of(optimizer)
    assert optimizer.counters["refreshes_done"] >= 4 * num
    return peak


def peak_of(optimizer: MatrixOptimizer) -> int:
    """Take a step; returns the most bytes that it held at once beyond those before it."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        optimizer.step()
    held = peak = 0
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert held < 2**14  # a step frees what it allocates
    return peak


@pytest.mark.parametrize("shape", [(512,), (4, 512)], ids=str)
def test_the_first_step_of_large_factors_keeps_to_the_bound(shape: tuple[int, ...]) -> None:
    """The factors are much larger than their gradients, and none is held twice."""
    bound = 2**24
    for num in (4, 16):
        params = parameters([shape] * num)
        optimizer = SOAP(params, precondition_1d=True, bucket_bytes=bound)
        optimizer.init_state()
        give_gradients(params, 0)
        assert peak_of(optimizer) <= bound


@pytest.mark.parametrize(("kind", "num"), [("soap", 64), ("kl_soap", 24)])
def test_temporary_memory_is_bounded_by_bucket_bytes_whatever_the_number_of_parameters(
    kind: str, num: int
) -> None:
    bound = 3 * 2**18
    few, many = peak_of_a_step(kind, 4, bound), peak_of_a_step(kind, num, bound)
    assert 0.8 * few <= many <= 1.2 * few
    assert few <= bound
    assert many <= bound


def test_the_bound_on_temporary_memory_is_made_use_of() -> None:
    small, large = (peak_of_a_step("soap", 16, bound) for bound in (3 * 2**18, 3 * 2**20))
    assert 1.2 * small < large <= 3 * 2**20
