"""State and weights belong to the user: what is moved, changed or removed between two steps counts,
and its memory is free at once; an optimizer that is deleted frees everything without the
collector."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    KINDS,
    all_same,
    clones,
    give_gradients,
    make,
    moment_of,
    parameter,
    parameters,
    run,
    run_both,
    same_state,
)
from torch import Tensor

from benchmarks.live_bytes import PeakBytes
from lather.optim import SOAP, AdamW, MatrixOptimizer, Muon
from lather.optim.batched import buckets

kinds = pytest.mark.parametrize("kind", KINDS)
few_kinds = pytest.mark.parametrize("kind", FEW_KINDS)

SHAPES = [(4, 6), (3, 4, 5), (4, 6), (5,), (4, 6), (3, 4, 5)]


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Memory must be free without the collector's help."""
    gc.disable()
    yield
    gc.enable()


def entries(optimizer: MatrixOptimizer) -> list[Tensor]:
    return [x for state in optimizer.state.values() for x in state.values()]


def through_data(optimizer: MatrixOptimizer) -> None:
    for x in entries(optimizer):
        x.data = x.data.clone()


def through_set(optimizer: MatrixOptimizer) -> None:
    for x in entries(optimizer):
        x.set_(x.clone())  # type: ignore[call-overload]


def one_of_them(optimizer: MatrixOptimizer) -> None:
    p = optimizer.param_groups[0]["params"][2]
    x = optimizer.state[p][moment_of(optimizer, p)]
    x.data = x.data.clone()


def all_but_one(optimizer: MatrixOptimizer) -> None:
    p = optimizer.param_groups[0]["params"][0]
    kept = optimizer.state[p][moment_of(optimizer, p)]
    for x in entries(optimizer):
        if x is not kept:
            x.data = x.data.clone()


def into_one_storage(optimizer: MatrixOptimizer) -> None:
    """Move all state into one storage of the user's own, in which nothing is where stacks have
    it."""
    found = entries(optimizer)
    for dtype in {x.dtype for x in found}:
        same = [x for x in found if x.dtype == dtype]
        room = torch.zeros(sum(x.numel() for x in same) + 7, dtype=dtype)
        for x, part in zip(same, room[7:].split([x.numel() for x in same]), strict=True):
            x.data = part.view(x.shape).copy_(x)


MOVES: dict[str, Callable[[MatrixOptimizer], None]] = {
    "data": through_data,
    "set_": through_set,
    "one": one_of_them,
    "all but one": all_but_one,
    "one storage": into_one_storage,
}


@pytest.mark.parametrize(
    ("kind", "move"),
    [*((kind, "data") for kind in KINDS), *product(("soap", "adamw", "muon_stacked"), MOVES)],
)
def test_steps_and_state_dict_go_on_with_state_that_was_moved(kind: str, move: str) -> None:
    params = parameters(SHAPES)
    others = clones(params)
    optimizer, undisturbed = make(kind, params), make(kind, others)
    for start in range(3):
        run_both((optimizer, params), (undisturbed, others), range(2 * start, 2 * start + 2))
        MOVES[move](optimizer)
        saved, expected = optimizer.state_dict()["state"], undisturbed.state_dict()["state"]
        for number, state in expected.items():
            assert all(torch.equal(saved[number][key], x) for key, x in state.items())
    run_both((optimizer, params), (undisturbed, others), range(6, 8))
    assert all_same(params, others)
    assert same_state(optimizer, params, undisturbed, others)


def test_a_moved_moment_of_adamw_has_the_value_of_arithmetic() -> None:
    p = torch.nn.Parameter(torch.zeros(3, 3))
    optimizer = AdamW([p])
    for _ in range(2):
        p.grad = torch.ones(3, 3)
        optimizer.step()
        through_data(optimizer)
    saved = optimizer.state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(saved, torch.full((3, 3), 0.19))


@pytest.mark.parametrize("move", ["data", "set_", "one storage"])
@few_kinds
def test_writing_into_moved_state_has_an_effect(kind: str, move: str) -> None:
    params, others = parameters(SHAPES), parameters(SHAPES)
    a, b = make(kind, params), make(kind, others)
    run_both((a, params), (b, others), range(2))
    MOVES[move](a)
    for optimizer, same in ((a, params), (b, others)):
        for p in same:
            optimizer.state[p][moment_of(optimizer, p)].fill_(0.5)
    run_both((a, params), (b, others), range(2, 5))
    assert all_same(params, others)


@kinds
def test_a_step_count_that_was_moved_or_set_counts(kind: str) -> None:
    params, others = parameters(SHAPES), parameters(SHAPES)
    a, b = make(kind, params), make(kind, others)
    run_both((a, params), (b, others), range(3))
    for p, q in zip(params, others, strict=True):
        a.state[p]["step"].data = a.state[p]["step"].double() + 4
        b.state[q]["step"] += 4
    run_both((a, params), (b, others), range(3, 5))
    assert all_same(params, others)
    assert same_state(a, params, b, others)


@few_kinds
def test_state_that_moves_while_a_refresh_is_pending(kind: str) -> None:
    has_refreshes = "async_refresh" in make(kind, parameters(SHAPES)).param_groups[0]
    options = {"async_refresh": True} if has_refreshes else {}
    params, others = parameters(SHAPES), parameters(SHAPES)
    a, b = make(kind, params, **options), make(kind, others, **options)
    a.defer_refreshes()
    for start in range(4):
        run_both((a, params), (b, others), range(start, start + 1))
        through_data(a)
    run_both((a, params), (b, others), range(4, 5))
    a.state_dict(), b.state_dict()
    assert all_same(params, others)
    assert same_state(a, params, b, others)
    a.state.clear()
    run(a, params, range(5, 7))


# --- memory ---------------------------------------------------------------------------------------


def memory_of(tensors: Iterable[Tensor]) -> list[weakref.ref[Any]]:
    return [
        weakref.ref(storage) for storage in {x.untyped_storage() for x in tensors if x.numel() > 1}
    ]


def is_free(memory: Sequence[weakref.ref[Any]]) -> bool:
    assert memory
    return not any(storage() is not None for storage in memory)


def replaced(optimizer: MatrixOptimizer) -> None:
    for state in optimizer.state.values():
        for name, x in state.items():
            state[name] = x.clone()


def cleared(optimizer: MatrixOptimizer) -> None:
    optimizer.state.clear()


def each_cleared(optimizer: MatrixOptimizer) -> None:
    for state in optimizer.state.values():
        state.clear()


def all_replaced(optimizer: MatrixOptimizer) -> None:
    optimizer.state = defaultdict(dict)


def loaded(optimizer: MatrixOptimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize(
    "give_back",
    [replaced, cleared, each_cleared, all_replaced, through_data, through_set, loaded],
    ids=lambda f: f.__name__,
)
@kinds
def test_memory_of_state_is_free_when_the_user_gives_it_back(
    kind: str, give_back: Callable[[MatrixOptimizer], None]
) -> None:
    params = parameters(SHAPES)
    optimizer = make(kind, params)
    run(optimizer, params, range(3))
    memory = memory_of(entries(optimizer))
    give_back(optimizer)
    assert is_free(memory)
    run(optimizer, params, range(3, 5))
    assert all(p.isfinite().all() for p in params)


@kinds
def test_memory_of_weights_and_gradients_is_free_when_the_user_gives_it_back(kind: str) -> None:
    params = parameters(SHAPES)
    optimizer = make(kind, params)
    run(optimizer, params, range(3))
    weights, gradients = memory_of(params), memory_of(p.grad for p in params if p.grad is not None)
    for p in params:
        p.data, p.grad = p.data.clone(), None
    assert is_free(weights)
    assert is_free(gradients)
    run(optimizer, params, range(3, 5))


@few_kinds
def test_moving_weights_changes_no_bits_and_makes_no_new_plan(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters(SHAPES)
    others = clones(params)
    a, b = make(kind, params), make(kind, others)
    run_both((a, params), (b, others), range(3))
    plan = a._plan
    for step in range(3, 6):
        for p in params:
            p.data = p.data.clone()
        run_both((a, params), (b, others), range(step, step + 1))
    assert a._plan is plan
    assert all_same(params, others)


def test_state_that_is_moved_one_by_one_frees_its_memory_by_and_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of a bucket is free after the last of its members, so buckets are small."""
    monkeypatch.setattr(buckets, "STATE_BYTES", 4 * 4 * 64 * 64 * 2 * 4)
    params = [parameter(64, 64, seed=seed) for seed in range(32)]
    optimizer = AdamW(params)
    run(optimizer, params, range(2))
    size = sum(x.nbytes for x in entries(optimizer))
    # Each has three members, as a step count is state, too.
    assert len(optimizer._store.buckets) == 11
    memory = memory_of(entries(optimizer))
    most_alive = 0
    for number, p in enumerate(params):
        for name, x in optimizer.state[p].items():
            optimizer.state[p][name] = x.clone()
        del x
        alive = sum(storage().nbytes() for storage in memory if storage() is not None)
        most_alive = max(most_alive, alive + size * (number + 1) // len(params))
    assert most_alive <= 1.15 * size
    give_gradients(params, 3)
    tensors = memory_of(entries(optimizer))
    optimizer.step()  # it makes new stacks: the tensors are free one bucket after the other
    assert is_free(tensors)


@kinds
def test_a_deleted_optimizer_is_free_at_once(kind: str) -> None:
    params = parameters(SHAPES)
    optimizer = make(kind, params, precondition_frequency=2)
    run(optimizer, params, range(4))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer = pickle.loads(pickle.dumps(optimizer)) if kind == "soap" else optimizer
    optimizer.step(lambda: 0.0)
    memory, reference = memory_of(entries(optimizer)), weakref.ref(optimizer)
    del optimizer
    assert reference() is None
    assert is_free(memory)


def test_an_optimizer_that_failed_in_a_step_is_free_at_once() -> None:
    params = parameters(SHAPES)
    optimizer = SOAP(params)
    run(optimizer, params, range(2))
    params[0].grad[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(ValueError, match="not finite") as error:
        optimizer.step()
    reference = weakref.ref(optimizer)
    del optimizer, error
    assert reference() is None


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", [AdamW, Muon, SOAP])
def test_loading_takes_the_memory_of_the_state_once(
    cls: type[MatrixOptimizer], dtype: torch.dtype
) -> None:
    params = [parameter(64, 64, dtype=dtype, seed=seed) for seed in range(8)]
    optimizer = cls(params)
    run(optimizer, params, range(2))
    size = sum(x.nbytes for x in entries(optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    del optimizer
    fresh = cls(params)
    with PeakBytes() as peak:
        fresh.load_state_dict(saved)
    assert size <= peak.bytes <= 1.1 * size
    with PeakBytes() as again:  # the old state is free before there is new
        fresh.load_state_dict(saved)
    assert again.bytes <= 1.1 * size
    assert all(
        torch.equal(x, saved["state"][number][key])
        for number, state in enumerate(fresh.state.values())
        for key, x in state.items()
    )


# --- in between -----------------------------------------------------------------------------------


@few_kinds
def test_init_state_between_two_steps_makes_what_was_removed_and_moves_nothing_else(
    kind: str,
) -> None:
    params, others = parameters(SHAPES), parameters(SHAPES)
    a, b = make(kind, params), make(kind, others)
    run_both((a, params), (b, others), range(2))
    for optimizer, same in ((a, params), (b, others)):
        del optimizer.state[same[2]]
    through_data(a)
    a.init_state()
    run_both((a, params), (b, others), range(2, 4))
    assert int(a.state[params[2]]["step"]) == 2
    assert all_same(params, others)
    assert same_state(a, params, b, others)


@few_kinds
def test_tensors_of_the_state_stay_the_same_objects(kind: str) -> None:
    """Tools that offload state list its tensors once."""
    params, others = parameters(SHAPES), parameters(SHAPES)
    a, b = make(kind, params), make(kind, others)
    run_both((a, params), (b, others), range(1))
    listed = entries(a)
    for step in range(1, 5):
        for x in listed:
            x.data = x.data.clone()
        memory = memory_of(listed)
        run_both((a, params), (b, others), range(step, step + 1))
        assert all(x is y for x, y in zip(listed, entries(a), strict=True))
        for x in listed:
            x.data = x.data.clone()
        assert is_free(memory)
    assert all_same(params, others)


def test_one_tensor_that_is_given_to_two_parameters_becomes_two() -> None:
    params = parameters([(4, 6), (4, 6)])
    optimizer = AdamW(params)
    run(optimizer, params, range(1))
    shared = torch.zeros(4, 6)
    for p in params:
        optimizer.state[p]["exp_avg"] = shared
    run(optimizer, params, range(1, 3))
    first, second = (optimizer.state[p]["exp_avg"] for p in params)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("what", ["slice", "step"])
def test_state_that_does_not_fit_is_refused_before_anything_changes(what: str) -> None:
    params = parameters([(4, 6), (4, 6)])
    optimizer = SOAP(params)
    run(optimizer, params, range(2))
    weights = clones(params)
    state = optimizer.state[params[0]]
    if what == "slice":
        state["exp_avg"] = state["exp_avg"][:2]
    else:
        del state["step"]
    with pytest.raises(ValueError, match="exp_avg" if what == "slice" else "step"):
        run(optimizer, params, range(2, 3))
    assert all_same(params, weights)


def test_deferred_refreshes_of_other_parameters_are_done_when_one_loses_its_state() -> None:
    params, others = parameters([(4, 6)] * 3), parameters([(4, 6)] * 3)
    options = {"async_refresh": True, "precondition_frequency": 100}
    a, b = SOAP(params, **options), SOAP(others, **options)
    a.defer_refreshes()
    run_both((a, params), (b, others), range(1))
    for optimizer, same in ((a, params), (b, others)):
        optimizer.state_dict() if optimizer is b else None
        del optimizer.state[same[2]]
    run_both((a, params), (b, others), range(1, 3))
    assert all_same(params, others)


def test_state_that_is_replaced_as_a_whole_gets_the_pending_refreshes() -> None:
    params, others = parameters([(4, 6)] * 3), parameters([(4, 6)] * 3)
    options = {"async_refresh": True, "precondition_frequency": 1}
    a, b = SOAP(params, **options), SOAP(others, **options)
    a.defer_refreshes()
    for step in range(4):
        run_both((a, params), (b, others), range(step, step + 1))
        memory = memory_of(entries(a))
        copies = {p: {name: x.clone() for name, x in state.items()} for p, state in a.state.items()}
        a.state = defaultdict(dict, copies)
        del copies
        assert is_free(memory)
    assert all_same(params, others)


@kinds
def test_parameters_are_free_when_user_and_optimizer_are_gone(kind: str) -> None:
    params = parameters(SHAPES)
    optimizer = make(kind, params)
    for step in range(3):
        run(optimizer, params, range(step, step + 1))
        params[step].grad = None
        optimizer.step()  # a new plan: the old one must be free
    weights = memory_of(params)
    del params, optimizer
    assert is_free(weights)


def test_a_parameter_that_leaves_is_free_after_the_next_step() -> None:
    params = parameters([(4, 6), (4, 6)])
    optimizer = Muon(params)
    run(optimizer, params, range(2))
    optimizer.param_groups[0]["params"].pop()
    left = params.pop()
    del optimizer.state[left]
    memory = memory_of([left])
    run(optimizer, params, range(2, 3))
    del left
    assert is_free(memory)


@pytest.mark.parametrize("cls", [AdamW, Muon])
def test_a_parameter_that_becomes_larger_or_smaller_in_place_is_refused(
    cls: type[MatrixOptimizer],
) -> None:
    memory = torch.zeros(64, 16)
    p = torch.nn.Parameter(memory[:16])
    optimizer = cls([p], lr=0.1)
    run(optimizer, [p], range(2))
    for rows in (32, 4):
        p.data, p.grad = memory[:rows], None
        before = memory.clone()
        with pytest.raises(ValueError, match="shape"):
            run(optimizer, [p], range(2, 3))
        assert torch.equal(memory, before)


@few_kinds
def test_state_that_is_removed_made_anew_and_put_back(kind: str) -> None:
    params, others = parameters(SHAPES), parameters(SHAPES)
    a, b = make(kind, params), make(kind, others)
    run_both((a, params), (b, others), range(2))
    before = dict(a.state)
    a.state.clear()
    a.init_state()
    a.state.clear()
    a.state.update(before)
    run_both((a, params), (b, others), range(2, 4))
    assert all_same(params, others)
