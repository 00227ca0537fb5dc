"""Buckets: equal matrices share one stack of state, and work on the stack gives the results of work
one by one. (State that leaves its stack and comes back is in `test_moved_state.py`.)"""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    FULL_RANK,
    KINDS,
    all_same,
    clones,
    copied,
    copy_gradients,
    few_kinds,
    give_gradients,
    largest_difference,
    make,
    parameter,
    parameters,
    run,
    run_both,
    run_of,
)

from in_turn import in_turn
from lather.optim import SOAP
from lather.optim.batched import buckets, runs
from lather.optim.batched.refresh import DimRefresh
from lather.optim.batched.runs import TEMPORARIES
from lather.optim.linalg.kronecker import SYMMETRIC_BLOCKS
from lather.optim.rules.soap import SOAPRule


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which SOAP's updates add the sizes of their batches."""
    found: list[int] = []
    original = SOAPRule.update

    def update(self: SOAPRule, g: torch.Tensor, *rest: Any) -> torch.Tensor:
        found.append(len(g))
        return original(self, g, *rest)

    monkeypatch.setattr(SOAPRule, "update", update)
    return found


def test_vectors_and_matrices_without_factors_share_one_stack() -> None:
    a = run_of(SOAP, [(4, 6), (5,), (), (2, 3, 4)], max_precond_dim=0)
    a.steps(range(2))
    moments = [a.state(i)["exp_avg"] for i in range(4)]
    assert [x.storage_offset() for x in moments] == [0, 24, 29, 30]
    assert len({x.untyped_storage().data_ptr() for x in moments}) == 1
    assert [x.shape for x in moments] == [p.shape for p in a.params]


def test_different_dtypes_and_kinds_of_state_stay_apart() -> None:
    params = [parameter(4, 6), parameter(4, 6, dtype=torch.bfloat16), *parameters([(4, 6)] * 2)]
    options: list[dict[str, Any]] = [{}, {}, {"max_precond_dim": 5}, {"lr": 0.5}]
    optimizer = SOAP([{"params": [p], **own} for p, own in zip(params, options, strict=True)])
    run(optimizer, params, range(2))
    storages = [optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() for p in params]
    assert storages[0] == storages[3]
    assert len(set(storages)) == 3


@pytest.mark.parametrize("deleted", [[1], [0, 1, 2]], ids=["one", "all"])
@few_kinds
def test_a_parameter_whose_state_is_deleted_starts_again(kind: str, deleted: list[int]) -> None:
    a = run_of(kind, [(4, 6), (4, 6), (3, 4, 5)], torch.float64, **FULL_RANK)
    a.steps(range(3))
    fresh, kept = clones(a.params), copied(a, copy.deepcopy)
    for number in deleted:
        del a.optimizer.state[a.params[number]]
    run_both(a, (make(kind, fresh, **FULL_RANK), fresh), range(3, 6))
    kept.steps(range(3, 6))
    for number, p in enumerate(a.params):
        expected = fresh[number] if number in deleted else kept.params[number]
        assert int(a.state(number)["step"]) == (3 if number in deleted else 6)
        assert largest_difference([p], [expected]) <= 1e-10


@few_kinds
def test_parameters_that_join_later_share_a_stack_among_themselves(kind: str) -> None:
    a = run_of(kind, [(4, 6)] * 4, torch.float64, **FULL_RANK)
    alone = clones(a.params)
    single = [make(kind, [p], **FULL_RANK) for p in alone]
    for step in range(8):
        give_gradients(a.params, step)
        for p in a.params[2:] if step < 2 else []:
            p.grad = None
        copy_gradients(a.params, alone)
        a.optimizer.step()
        for one, p in zip(single, alone, strict=True):
            if p.grad is not None:
                one.step()
    assert largest_difference(a.params, alone) <= 1e-10
    for first, second in ((a.state(0), a.state(1)), (a.state(2), a.state(3))):
        for name in first.keys() - {"step"}:
            x, y = first[name], second[name]
            assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
            assert (x.storage_offset(), y.storage_offset()) == (0, x.numel())


# --- together and one by one ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "how"),
    in_turn(
        [
            *((kind, torch.float64) for kind in KINDS),
            *((kind, torch.float32) for kind in FEW_KINDS),
        ],
        [{"batched": False}, {"bucket_bytes": 1}, {"bucket_bytes": 4000}],
    ),
    ids=str,
)
def test_work_together_gives_what_work_in_smaller_pieces_gives(
    kind: str, how: dict[str, Any], dtype: torch.dtype
) -> None:
    shapes = [(6, 4), (3, 4, 5), (6, 4), (3, 4, 5), (5,)]
    options = {**FULL_RANK, "state_dtype": dtype, "weight_decay": 0.1}
    options |= {"second_moment": "rotate"} if kind == "soap" else {}
    a, b = run_of(kind, shapes, dtype, **options), run_of(kind, shapes, dtype, **options, **how)
    run_both(a, b, range(5))
    tolerance = 1e-10 if dtype is torch.float64 else 1e-4
    assert largest_difference(a.params, b.params) <= tolerance
    assert largest_difference(a.params, parameters(shapes, dtype)) > 1e-2
    assert a.optimizer.counters == b.optimizer.counters


@pytest.mark.parametrize("kind", ["soap_per_expert", "kl_soap_per_expert"])
def test_idle_experts_in_smaller_pieces(kind: str) -> None:
    shapes, options = [(5, 4, 4), (5, 4, 4)], {"precondition_frequency": 1}
    a = run_of(kind, shapes, torch.float64, **options)
    b = run_of(kind, shapes, torch.float64, **options, bucket_bytes=3 * 6 * 16 * 8)
    for step in range(6):
        give_gradients(a.params, step)
        for index, p in enumerate(a.params):
            p.grad[(step + index) % 5] = 0
            p.grad[(step + 2 * index + 1) % 5] = 0
        if step == 4:  # the run does not begin with the first row of its bucket
            a.params[0].grad = None
        copy_gradients(a.params, b.params)
        a.optimizer.step()
        b.optimizer.step()
    assert largest_difference(a.params, b.params) <= 1e-10
    assert a.optimizer.counters == b.optimizer.counters
    assert a.optimizer.counters["refreshes_skipped"] > 0


def test_groups_are_worked_on_together_exactly_while_their_options_are_equal(
    sizes: list[int],
) -> None:
    params = parameters([(4, 6)] * 6)
    optimizer = SOAP([{"params": [p], "name": str(index)} for index, p in enumerate(params)])
    run(optimizer, params, range(1))
    for name, value in (("lr", 0.5), ("weight_decay", 0.5), ("lr", 3e-3), ("weight_decay", 0.01)):
        optimizer.param_groups[3][name] = value
        run(optimizer, params, range(1))
    assert sizes == [6, 3, 1, 2, 3, 1, 2, 3, 1, 2, 6]


def test_pieces_hold_as_many_matrices_as_fit(sizes: list[int]) -> None:
    factors = 2 * 2 * 64  # whole, and twice while they are packed
    per_matrix = (TEMPORARIES * 64 + factors + 64 // SYMMETRIC_BLOCKS) * 4
    for matrices in (3, 7, 100):
        run_of(SOAP, [(8, 8)] * 7, bucket_bytes=matrices * per_matrix).steps(range(1))
    assert sizes == [3, 3, 1, 7, 7]


@pytest.mark.parametrize(("least", "expected"), [(64, [1] * 7), (65, [7])])
def test_a_large_parameter_on_a_gpu_shares_no_batch(
    least: int, expected: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (run_of(SOAP, [(8, 8)] * 7) for _ in range(2))
    a.steps(range(2))
    sizes.clear()
    monkeypatch.setattr(runs, "is_gpu", lambda on: True)
    monkeypatch.setattr(runs, "LEAST_ALONE", least)
    b.steps(range(1))
    assert sizes == expected
    b.steps(range(1, 2))
    assert all(p.equal(q) for p, q in zip(a.params, b.params, strict=True))


def test_batches_on_a_gpu_do_not_depend_on_the_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that is resumed finds other memory free, and should have the same bits."""
    a = run_of(SOAP, [(8, 8)] * 3)
    a.steps(range(1))
    (bucket,) = {id(run.bucket): run.bucket for run in a.optimizer._plan.chunks}.values()
    assert bucket.temporary_bytes == 2**28
    monkeypatch.setattr(buckets, "is_gpu", lambda on: True)
    assert bucket.temporary_bytes == 2**32
    assert not hasattr(buckets, "gpu_module")


def test_a_batch_of_a_gpus_refresh_is_about_twenty_matrices_of_2048() -> None:
    bucket = SimpleNamespace(
        inner=(2048, 1408), device=torch.device("meta"), temporary_bytes=buckets.GPU_BYTES
    )
    job = DimRefresh(SimpleNamespace(bucket=bucket, rule=SOAPRule()), 0, range(64), ("auto",))
    assert len(next(job.batches()).rows) >= 20


def test_a_parameter_may_change_its_memory_format() -> None:
    """A convolution without factors, whose format changes by `model.to(memory_format=...)` after
    the first steps, is then no longer one flat batch."""
    a, b = (run_of(SOAP, [(4, 3, 2, 2)], max_precond_dim=0) for _ in range(2))
    run_both(a, b, range(2))
    p = a.params[0]
    p.data = p.data.contiguous(memory_format=torch.channels_last)
    run_both(a, b, range(2, 4))
    assert not p.is_contiguous()
    torch.testing.assert_close(p.detach(), b.params[0].detach(), rtol=0, atol=1e-6)


def test_a_group_may_begin_to_stagger_in_mid_training() -> None:
    params = parameters([(4, 4)] * 6)
    groups = [{"params": params[:3], "stagger_refresh": True}, {"params": params[3:]}]
    optimizer = SOAP(groups, precondition_frequency=3)
    run(optimizer, params, range(4))
    optimizer.param_groups[1]["stagger_refresh"] = True
    done = optimizer.counters["refreshes_done"]
    run(optimizer, params, range(4, 7))
    assert optimizer.counters["refreshes_done"] - done == 12


def test_a_tied_parameter_is_updated_once() -> None:
    alone = run_of(SOAP, [(4, 4)])
    alone.steps(range(4))
    for named in (False, True):
        p, q = parameter(4, 4), parameter(4, 4, seed=1)
        optimizer = SOAP([("a", p), ("b", q), ("tied", p)] if named else [p, q, p], lr=1e-2)
        assert len(optimizer.param_groups[0]["params"]) == 2
        run(optimizer, [p], range(4))
        assert all_same([p], alone.params)
