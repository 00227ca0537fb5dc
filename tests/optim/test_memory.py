"""Bytes of state are known without allocating, and bytes of temporary memory do not grow with the
number of parameters."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from optim_helpers import CLASSES, Run, give_gradients, parameters, run_of
from strangers import Lion, Shampoo
from torch.profiler import ProfilerActivity, profile

from lather.optim import KLSOAP, SOAP, MatrixOptimizer, Muon, Rule, SOAPMuon, StackedSOAP
from lather.optim import state_bytes as bytes_of

SHAPES = [(5, 6), (3, 4, 5), (3, 5, 4), (), (0, 5)]
BF16 = torch.bfloat16
PER_EXPERT = {"matrix_layout": "per_expert"}

OPTIONS: list[dict[str, Any]] = [
    *({}, PER_EXPERT, {"matrix_layout": "stacked"}, {"max_precond_dim": 4}, {"max_precond_dim": 0}),
    *({"state_dtype": torch.float64}, {"state_dtype": BF16}, {"state_dtype": {"bases": BF16}}),
    {"state_dtype": {"moments": BF16}, **PER_EXPERT},
    {"max_update_rms": 1.0, "max_precond_dim": 0},
    {"normalize": "row", **PER_EXPERT},
    {"relative_update": True},
    *({"keep_norm": True}, {"keep_norm": True, **PER_EXPERT, "state_dtype": BF16}),
    *({"sides": "smaller"}, {"sides": "larger", "matrix_layout": "stacked"}, {"sides": "auto"}),
]
TYPES: dict[str, Any] = {**CLASSES, "Shampoo": Shampoo, "Lion": Lion}


def rule_of(cls: Any) -> type[Rule]:
    rule: type[Rule] = cls if issubclass(cls, Rule) else cls.rule
    return rule


def assert_counted(cls: Any, shapes: Any, **options: Any) -> None:
    """Check that `state_bytes` of each shape is what `init_state` allocates."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = MatrixOptimizer(params, rule_of(cls)(1e-3, **options))
    optimizer.init_state()
    for p in params:
        allocated = sum(x.nbytes for x in optimizer.state[p].values())
        assert bytes_of(tuple(p.shape), cls, **options) == allocated, p.shape


@pytest.mark.parametrize("name", TYPES)
def test_state_bytes_is_what_is_allocated(name: str) -> None:
    known = {field.name for field in fields(rule_of(TYPES[name]))}
    for options in OPTIONS:
        if options.keys() <= known and not (
            name == "StackedSOAP" and PER_EXPERT.items() <= options.items()
        ):
            assert_counted(TYPES[name], SHAPES, **options)
    if "precondition_1d" in known:
        assert_counted(TYPES[name], [(7,)], matrix_layout="tensor")
        assert_counted(TYPES[name], [(7,)], matrix_layout="tensor", precondition_1d=True)


def test_state_bytes_in_numbers() -> None:
    m, n = 5, 6
    factors = (m * (m + 1) + n * (n + 1)) // 2
    assert bytes_of((m, n)) == 4 * (2 * m * n + m * m + n * n + factors) + 4
    assert bytes_of((m, n), KLSOAP) == 4 * (2 * m * n + m * m + n * n + factors + m + n) + 4
    assert bytes_of((8, m, n), **PER_EXPERT) == 8 * (bytes_of((m, n)) - 4) + 4
    assert bytes_of((8, n, m), StackedSOAP) == bytes_of((n, 8 * m), KLSOAP)
    assert bytes_of((m, n), Muon) == 4 * m * n + 4
    assert bytes_of((m, n), Muon, normalize="row", keep_norm=True) == 4 * (m * n + m + 1) + 4
    assert bytes_of((m, n), SOAPMuon) == 4 * (2 * m * n + m * m + m * (m + 1) // 2) + 4
    # as the class documentation says
    assert 0 <= bytes_of((768, 2048), SOAPMuon) / (4 * 768 * 2048) - 2.5625 < 1e-3
    experts = bytes_of((8, m, n), SOAPMuon, matrix_layout="per_expert", sides="both")
    assert experts == 8 * (bytes_of((m, n)) - 4) + 4
    assert bytes_of((m, n), state_dtype=BF16) == 2 * (2 * m * n + m * m + n * n) + 4 * factors + 4


def test_the_optimizers_own_account_of_bytes_is_the_limit_it_keeps() -> None:
    size = bytes_of((5, 6))
    SOAP(parameters([(5, 6)]), max_state_bytes=size)
    with pytest.raises(ValueError, match="max_state_bytes"):
        SOAP(parameters([(5, 6)]), max_state_bytes=size - 1)
    stack = torch.nn.Parameter(torch.empty(128, 768, 2048, device="meta"))
    options: dict[str, Any] = {"matrix_layout": "stacked", "max_state_bytes": 2**35}
    SOAP([stack], **options)  # the default of max_precond_dim makes this one-sided
    with pytest.raises(ValueError, match=r"55\.\d+ GiB"):
        SOAP([stack], **options, max_precond_dim=10**6)


# --- temporary memory -----------------------------------------------------------------------------


def peak_of(a: Run) -> int:
    """Take a step; returns the most bytes that it held at once beyond those before it."""
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        a.optimizer.step()
    held = peak = 0
    events = [x for x in profiler.profiler.kineto_results.events() if x.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert held < 2**14  # a step frees what it allocates
    return peak


def peak_of_a_step(kind: str, num: int, bucket_bytes: int) -> int:
    """Measure a step that refreshes every basis."""
    a = run_of(kind, [(64, 128)] * num, bucket_bytes=bucket_bytes, precondition_frequency=1)
    a.steps(range(2))
    give_gradients(a.params, 2)
    peak = peak_of(a)
    assert a.optimizer.counters["refreshes_done"] >= 4 * num
    return peak


@pytest.mark.parametrize("shape", [(512,), (4, 512)], ids=str)
def test_the_first_step_of_large_factors_keeps_to_the_bound(shape: tuple[int, ...]) -> None:
    """The factors are much larger than their gradients, and none is held twice."""
    for num in (4, 16):
        a = run_of(SOAP, [shape] * num, precondition_1d=True, bucket_bytes=2**24)
        a.optimizer.init_state()
        give_gradients(a.params, 0)
        assert peak_of(a) <= 2**24


@pytest.mark.parametrize(("kind", "num"), [("soap", 64), ("kl_soap", 24)])
def test_temporary_memory_is_bounded_by_bucket_bytes_whatever_the_number_of_parameters(
    kind: str, num: int
) -> None:
    bound = 3 * 2**18
    few, many = peak_of_a_step(kind, 4, bound), peak_of_a_step(kind, num, bound)
    assert 0.8 * few <= many <= 1.2 * few
    assert max(few, many) <= bound


def test_the_bound_on_temporary_memory_is_made_use_of() -> None:
    small, large = (peak_of_a_step("soap", 16, bound) for bound in (3 * 2**18, 3 * 2**20))
    assert 1.2 * small < large <= 3 * 2**20
