"""Buckets: equal matrices share one stack of state, whatever happens to it, and work on the stack
gives the results of work one by one."""

import copy
import math
import pickle
from collections.abc import Iterable
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
    copy_gradients,
    give_gradients,
    largest_difference,
    make,
    moment_of,
    parameter,
    parameters,
    run,
    run_both,
    same_state,
)
from torch import Tensor

from lather.optim import SOAP, MatrixOptimizer
from lather.optim.batched import buckets
from lather.optim.batched.refresh import DimRefresh
from lather.optim.batched.runs import TEMPORARIES
from lather.optim.linalg.kronecker import SYMMETRIC_BLOCKS
from lather.optim.rules.soap import SOAPRule

few_kinds = pytest.mark.parametrize("kind", FEW_KINDS)


def stacks(
    optimizer: MatrixOptimizer, params: Iterable[Tensor], name: str
) -> list[tuple[int, int]]:
    """Return (storage, first element) of each parameter's tensor of state."""
    tensors = [optimizer.state[p][name] for p in params]
    assert all(x.is_contiguous() for x in tensors)
    return [(x.untyped_storage().data_ptr(), x.storage_offset()) for x in tensors]


def assert_stacked(optimizer: MatrixOptimizer, params: list[Tensor]) -> None:
    """Check that all state of these equal parameters, in this order, is one stack for each name."""
    for name in set(optimizer.state[params[0]]) - {"step"}:
        size = optimizer.state[params[0]][name].numel()
        (storage, first), *_ = places = stacks(optimizer, params, name)
        assert places == [(storage, first + index * size) for index in range(len(params))], name
        assert optimizer.state[params[0]][name].untyped_storage().nbytes() == len(params) * size * 4


@few_kinds
def test_equal_shapes_share_a_stack_and_their_state_is_a_view_of_it(kind: str) -> None:
    params = parameters([(4, 6), (3, 4, 5), (4, 6), (6, 4), (3, 4, 5), (4, 6)])
    optimizer = make(kind, params)
    for steps in (1, 5):
        run(optimizer, params, range(steps))
        assert_stacked(optimizer, [params[0], params[2], params[5]])
        assert_stacked(optimizer, [params[1], params[4]])
        assert_stacked(optimizer, [params[3]])


def test_vectors_and_matrices_without_factors_share_one_stack() -> None:
    params = parameters([(4, 6), (5,), (), (2, 3, 4)])
    optimizer = SOAP(params, max_precond_dim=0)
    run(optimizer, params, range(2))
    places = stacks(optimizer, params, "exp_avg")
    assert [offset for _, offset in places] == [0, 24, 29, 30]
    assert len({storage for storage, _ in places}) == 1
    assert [optimizer.state[p]["exp_avg"].shape for p in params] == [p.shape for p in params]


def test_different_dtypes_and_kinds_of_state_stay_apart() -> None:
    params = [
        parameter(4, 6),
        parameter(4, 6, dtype=torch.bfloat16),
        parameter(4, 6),
        parameter(4, 6),
    ]
    groups = [
        {"params": params[:2]},
        {"params": params[2:3], "max_precond_dim": 5},
        {"params": params[3:], "lr": 0.5},
    ]
    optimizer = SOAP(groups)
    run(optimizer, params, range(2))
    storages = [storage for storage, _ in stacks(optimizer, params, "exp_avg")]
    assert storages[0] == storages[3]
    assert len(set(storages)) == 3


def changed_by(what: str, optimizer: MatrixOptimizer) -> MatrixOptimizer:
    """Do something that separates state from its stacks and changes no value; returns the
    optimizer."""
    p = optimizer.param_groups[0]["params"][1]
    if what == "deepcopy":
        return copy.deepcopy(optimizer)
    if what == "pickle":
        copied: MatrixOptimizer = pickle.loads(pickle.dumps(optimizer))
        return copied
    if what == "load_state_dict":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif what == "replaced_tensor":
        name = moment_of(optimizer, p)
        optimizer.state[p][name] = optimizer.state[p][name].clone()
    elif what == "replaced_state":
        optimizer.state[p] = {name: value.clone() for name, value in optimizer.state[p].items()}
    elif what == "replaced_all":
        for q in optimizer.state:
            optimizer.state[q] = {name: value.clone() for name, value in optimizer.state[q].items()}
    return optimizer


@pytest.mark.parametrize(
    "what",
    ["deepcopy", "pickle", "load_state_dict", "replaced_tensor", "replaced_state", "replaced_all"],
)
@few_kinds
def test_state_that_left_its_stack_is_stacked_again_with_its_values(kind: str, what: str) -> None:
    params = parameters([(4, 6), (4, 6), (4, 6), (3, 4, 5)])
    others = clones(params)
    optimizer, plain = make(kind, params), make(kind, others)
    run_both((optimizer, params), (plain, others), range(3))
    optimizer = changed_by(what, optimizer)
    params = optimizer.param_groups[0]["params"]
    run_both((optimizer, params), (plain, others), range(3, 5))
    assert_stacked(optimizer, params[:3])
    assert all_same(params, others)
    assert same_state(optimizer, params, plain, others)


def test_state_replaced_by_hand_takes_effect() -> None:
    params, others = parameters([(4, 6), (4, 6)]), parameters([(4, 6), (4, 6)])
    a, b = SOAP(params), SOAP(others)
    run_both((a, params), (b, others), range(2))
    a.state[params[1]]["exp_avg"] = torch.zeros(4, 6)
    b.state[others[1]]["exp_avg"].zero_()
    run_both((a, params), (b, others), range(2, 4))
    assert all_same(params, others)
    assert_stacked(a, params)


@pytest.mark.parametrize("how_much", ["one", "all"])
@few_kinds
def test_a_parameter_whose_state_is_deleted_starts_again(kind: str, how_much: str) -> None:
    params = parameters([(4, 6), (4, 6), (3, 4, 5)], torch.float64)
    optimizer = make(kind, params, **FULL_RANK)
    run(optimizer, params, range(3))
    fresh, kept = clones(params), copy.deepcopy(optimizer)
    deleted = [1] if how_much == "one" else [0, 1, 2]
    for index in deleted:
        del optimizer.state[params[index]]
    run_both((optimizer, params), (make(kind, fresh, **FULL_RANK), fresh), range(3, 6))
    run(kept, kept.param_groups[0]["params"], range(3, 6))
    for index, p in enumerate(params):
        expected = fresh[index] if index in deleted else kept.param_groups[0]["params"][index]
        assert int(optimizer.state[p]["step"]) == (3 if index in deleted else 6)
        assert largest_difference([p], [expected]) <= 1e-10


def test_a_parameter_that_leaves_its_group_leaves_the_step() -> None:
    params = parameters([(4, 6), (4, 6)])
    optimizer = SOAP(params)
    run(optimizer, params, range(2))
    optimizer.param_groups[0]["params"].pop(1)
    del optimizer.state[params[1]]
    before = params[1].detach().clone()
    run(optimizer, params, range(2, 4))
    assert torch.equal(params[1], before)
    assert int(optimizer.state[params[0]]["step"]) == 4


@few_kinds
def test_parameters_that_join_later_share_a_stack_among_themselves(kind: str) -> None:
    params = parameters([(4, 6)] * 4, torch.float64)
    alone = clones(params)
    optimizer, single = (
        make(kind, params, **FULL_RANK),
        [make(kind, [p], **FULL_RANK) for p in alone],
    )
    for step in range(8):
        give_gradients(params, step)
        for p in params[2:] if step < 2 else []:
            p.grad = None
        copy_gradients(params, alone)
        optimizer.step()
        for one, p in zip(single, alone, strict=True):
            if p.grad is not None:
                one.step()
    assert largest_difference(params, alone) <= 1e-10
    for pair in (params[:2], params[2:]):
        for name in set(optimizer.state[pair[0]]) - {"step"}:
            places = stacks(optimizer, pair, name)
            assert places == [
                (places[0][0], 0),
                (places[0][0], optimizer.state[pair[0]][name].numel()),
            ]


# --- together and one by one ----------------------------------------------------------------------

WORK = [(6, 4), (3, 4, 5), (6, 4), (3, 4, 5), (5,)]


@pytest.mark.parametrize(
    "how",
    [{"batched": False}, {"bucket_bytes": 1}, {"bucket_bytes": 4000}],
    ids=["one_by_one", "tiny", "small"],
)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float64) for kind in KINDS), *((kind, torch.float32) for kind in FEW_KINDS)],
    ids=str,
)
def test_work_together_gives_what_work_in_smaller_pieces_gives(
    kind: str, how: dict[str, Any], dtype: torch.dtype
) -> None:
    together = parameters(WORK, dtype)
    apart, start = clones(together), clones(together)
    options = {
        **FULL_RANK,
        "state_dtype": dtype,
        "weight_decay": 0.1,
        **({"second_moment": "rotate"} if kind == "soap" else {}),
    }
    a, b = make(kind, together, **options), make(kind, apart, **options, **how)
    run_both((a, together), (b, apart), range(5))
    difference = largest_difference(together, apart)
    assert difference <= (1e-10 if dtype is torch.float64 else 1e-4)
    assert largest_difference(together, start) > 1e-2
    assert a.counters == b.counters


def test_idle_experts_in_smaller_pieces() -> None:
    for kind in ("soap_per_expert", "kl_soap_per_expert"):
        together = parameters([(5, 4, 4), (5, 4, 4)], torch.float64)
        apart = clones(together)
        options = {"precondition_frequency": 1, "state_dtype": torch.float64}
        a, b = (
            make(kind, together, **options),
            make(kind, apart, **options, bucket_bytes=3 * 6 * 16 * 8),
        )
        for step in range(6):
            give_gradients(together, step)
            for index, p in enumerate(together):
                p.grad[(step + index) % 5] = 0
                p.grad[(step + 2 * index + 1) % 5] = 0
            copy_gradients(together, apart)
            a.step()
            b.step()
        assert largest_difference(together, apart) <= 1e-10
        assert a.counters == b.counters
        assert a.counters["refreshes_skipped"] > 0


def test_groups_of_equal_options_are_worked_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters([(4, 6)] * 6)
    optimizer = SOAP([{"params": [p], "name": str(index)} for index, p in enumerate(params)])
    sizes: list[int] = []
    original = SOAPRule.update
    monkeypatch.setattr(
        SOAPRule,
        "update",
        lambda self, g, *rest: (sizes.append(len(g)), original(self, g, *rest))[1],
    )
    run(optimizer, params, range(1))
    optimizer.param_groups[3]["lr"] = 0.5
    run(optimizer, params, range(1, 2))
    assert sizes == [6, 3, 1, 2]


def test_pieces_hold_as_many_matrices_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters([(8, 8)] * 7)
    sizes: list[int] = []
    original = SOAPRule.update
    monkeypatch.setattr(
        SOAPRule,
        "update",
        lambda self, g, *rest: (sizes.append(len(g)), original(self, g, *rest))[1],
    )
    per_matrix = (TEMPORARIES * 64 + 64 // SYMMETRIC_BLOCKS) * 4
    for matrices in (3, 7, 100):
        optimizer = SOAP(params, bucket_bytes=matrices * per_matrix)
        run(optimizer, params, range(1))
    assert sizes == [3, 3, 1, 7, 7]
    assert math.prod(params[0].shape) == 64


def test_batches_on_a_gpu_do_not_depend_on_the_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that is resumed finds other memory free, and should have the same bits."""
    params = parameters([(8, 8)] * 3)
    optimizer = SOAP(params)
    run(optimizer, params, range(1))
    (bucket,) = {id(run.bucket): run.bucket for run in optimizer._plan.chunks}.values()
    assert bucket.temporary_bytes == 2**28
    monkeypatch.setattr(buckets, "is_gpu", lambda on: True)
    assert bucket.temporary_bytes == 2**32
    assert not hasattr(buckets, "gpu_module")


def test_a_batch_of_a_gpus_refresh_is_about_twenty_matrices_of_2048() -> None:
    bucket = SimpleNamespace(
        inner=(2048, 1408), device=torch.device("meta"), temporary_bytes=buckets.GPU_BYTES
    )
    job = DimRefresh(SimpleNamespace(bucket=bucket, rule=SOAPRule()), 0, range(64), ("auto",))  # type: ignore[arg-type]
    assert len(next(job.batches()).rows) >= 20


def test_a_parameter_may_change_its_memory_format() -> None:
    """A convolution without factors, whose format changes by `model.to(memory_format=...)` after
    the first steps, is then no longer one flat batch."""
    p, q = (
        torch.nn.Parameter(torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)))
        for _ in range(2)
    )
    a, b = SOAP([p], max_precond_dim=0), SOAP([q], max_precond_dim=0)
    for step in range(4):
        if step == 2:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        give_gradients([p], step)
        q.grad = p.grad.clone()
        a.step()
        b.step()
    assert not p.is_contiguous()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-6)


def test_a_group_may_begin_to_stagger_in_mid_training() -> None:
    params = parameters([(4, 4)] * 6)
    optimizer = SOAP(
        [{"params": params[:3], "stagger_refresh": True}, {"params": params[3:]}],
        precondition_frequency=3,
    )
    run(optimizer, params, range(4))
    optimizer.param_groups[1]["stagger_refresh"] = True
    done = optimizer.counters["refreshes_done"]
    run(optimizer, params, range(4, 7))
    assert optimizer.counters["refreshes_done"] - done == 12
