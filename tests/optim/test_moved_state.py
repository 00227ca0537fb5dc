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
from typing import Any

import pytest
import torch
from optim_helpers import (
    FEW_KINDS,
    KINDS,
    Run,
    all_same,
    assert_same,
    copied,
    every_kind,
    few_kinds,
    give_gradients,
    moment_of,
    parameter,
    run,
    run_both,
    run_of,
)
from torch import Tensor

from benchmarks.live_bytes import PeakBytes
from in_turn import in_turn
from lather.optim import SOAP, AdamW, MatrixOptimizer, Muon
from lather.optim.batched import buckets

SHAPES = [(4, 6), (3, 4, 5), (4, 6), (5,), (4, 6), (3, 4, 5)]


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Memory must be free without the collector's help."""
    gc.disable()
    yield
    gc.enable()


def twins(kind: Any, shapes: Any = SHAPES, **options: Any) -> tuple[Run, Run]:
    return run_of(kind, shapes, **options), run_of(kind, shapes, **options)


def entries(a: Run) -> list[Tensor]:
    return [x for state in a.optimizer.state.values() for x in state.values()]


def moment(a: Run, number: int) -> Tensor:
    return a.state(number)[moment_of(a.optimizer, a.params[number])]


def through_data(a: Run) -> None:
    for x in entries(a):
        x.data = x.data.clone()


def through_set(a: Run) -> None:
    for x in entries(a):
        x.set_(x.clone())


def one_of_them(a: Run) -> None:
    moment(a, 2).data = moment(a, 2).data.clone()


def all_but_one(a: Run) -> None:
    for x in entries(a):
        if x is not moment(a, 0):
            x.data = x.data.clone()


def into_one_storage(a: Run) -> None:
    """Move all state into one storage of the user's own, in which nothing is where stacks have
    it."""
    for dtype in {x.dtype for x in entries(a)}:
        same = [x for x in entries(a) if x.dtype == dtype]
        room = torch.zeros(sum(x.numel() for x in same) + 7, dtype=dtype)
        for x, part in zip(same, room[7:].split([x.numel() for x in same]), strict=True):
            x.data = part.view(x.shape).copy_(x)


def tensor_replaced(a: Run) -> None:
    name = moment_of(a.optimizer, a.params[1])
    a.state(1)[name] = a.state(1)[name].clone()


def tensors_replaced(a: Run) -> None:
    for state in a.optimizer.state.values():
        for name, x in state.items():
            state[name] = x.clone()


def states_replaced(a: Run) -> None:
    for p, state in a.optimizer.state.items():
        a.optimizer.state[p] = {name: x.clone() for name, x in state.items()}


def all_replaced(a: Run) -> None:
    copies = {p: {k: x.clone() for k, x in state.items()} for p, state in a.optimizer.state.items()}
    a.optimizer.state = defaultdict(dict, copies)


def loaded(a: Run) -> None:
    a.optimizer.load_state_dict(copy.deepcopy(a.optimizer.state_dict()))


def put_back(a: Run) -> None:
    before = dict(a.optimizer.state)
    a.optimizer.state.clear()
    a.optimizer.init_state()
    a.optimizer.state.clear()
    a.optimizer.state.update(before)


def weights_moved(a: Run) -> None:
    for p in a.params:
        p.data = p.data.clone()


def cleared(a: Run) -> None:
    a.optimizer.state.clear()


def each_cleared(a: Run) -> None:
    for state in a.optimizer.state.values():
        state.clear()


MOVES = [through_data, through_set, one_of_them, all_but_one, into_one_storage]
REPLACEMENTS = [tensor_replaced, tensors_replaced, states_replaced, all_replaced, loaded, put_back]
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}
EVENTS: dict[str, Callable[[Run], Any]] = {
    **{event.__name__: event for event in (*MOVES, *REPLACEMENTS, weights_moved)},
    **{name: lambda a, how=how: copied(a, how) for name, how in COPIES.items()},
}
"""Everything that may happen between two steps and changes no value; copies go on by
themselves."""


def assert_stacked(a: Run, *numbers: int) -> None:
    """Check that all state of these equal parameters, in this order, is one stack for each name."""
    for name, x in a.state(numbers[0]).items():
        if name == "step":
            continue
        views, first = [a.state(i)[name] for i in numbers], x.storage_offset()
        offsets = [first + i * x.numel() for i in range(len(numbers))]
        assert [view.storage_offset() for view in views] == offsets, name
        assert len({view.untyped_storage().data_ptr() for view in views}) == 1, name
        assert all(view.is_contiguous() for view in views)
        assert x.untyped_storage().nbytes() == len(numbers) * x.nbytes


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        *in_turn(KINDS, ("through_data", "deepcopy")),
        *in_turn((*FEW_KINDS, "adamw"), EVENTS, each=4),
    ],
)
def test_a_run_goes_on_whatever_happens_to_its_state(kind: str, event: str) -> None:
    a, b = twins(kind)
    for start in range(3):
        run_both(a, b, range(2 * start, 2 * start + 2))
        a = EVENTS[event](a) or a
        saved, expected = a.optimizer.state_dict()["state"], b.optimizer.state_dict()["state"]
        for number, state in expected.items():
            assert all(torch.equal(saved[number][key], x) for key, x in state.items())
    run_both(a, b, range(6, 8))
    assert_same(a, b)
    assert a.optimizer.counters == b.optimizer.counters
    if kind != "adamw":
        assert_stacked(a, 0, 2, 4)
    if "per_expert" in kind:
        assert_stacked(a, 1, 5)


@pytest.mark.parametrize("move", [through_data, through_set, into_one_storage, tensors_replaced])
@few_kinds
def test_writing_into_moved_state_has_an_effect(kind: str, move: Callable[[Run], None]) -> None:
    a, b = twins(kind)
    run_both(a, b, range(2))
    move(a)
    for one in (a, b):
        for number in range(len(SHAPES)):
            moment(one, number).fill_(0.5)
    run_both(a, b, range(2, 5))
    assert_same(a, b)


@every_kind
def test_a_step_count_that_was_moved_or_set_counts(kind: str) -> None:
    a, b = twins(kind)
    run_both(a, b, range(3))
    for number in range(len(SHAPES)):
        a.state(number)["step"].data = a.state(number)["step"].double() + 4
        b.state(number)["step"] += 4
    run_both(a, b, range(3, 5))
    assert_same(a, b)


@few_kinds
def test_state_that_moves_while_a_refresh_is_pending(kind: str) -> None:
    has_refreshes = "async_refresh" in run_of(kind, SHAPES).groups[0]
    a, b = twins(kind, **({"async_refresh": True} if has_refreshes else {}))
    a.optimizer.defer_refreshes()
    for step in range(4):
        run_both(a, b, [step])
        through_data(a)
    run_both(a, b, [4])
    a.optimizer.state_dict(), b.optimizer.state_dict()
    assert_same(a, b)
    a.optimizer.state.clear()
    a.steps(range(5, 7))


# --- memory ---------------------------------------------------------------------------------------


def memory_of(tensors: Iterable[Tensor | None]) -> list[weakref.ref[Any]]:
    storages = {x.untyped_storage() for x in tensors if x is not None and x.numel() > 1}
    return [weakref.ref(storage) for storage in storages]


def is_free(memory: Sequence[weakref.ref[Any]]) -> bool:
    assert memory
    return not any(storage() is not None for storage in memory)


GIVEN_BACK = [tensors_replaced, cleared, each_cleared, all_replaced]


@pytest.mark.parametrize(
    ("kind", "give_back"),
    in_turn(KINDS, [*GIVEN_BACK, through_data, through_set, loaded], each=2),
)
def test_memory_of_state_is_free_when_the_user_gives_it_back(
    kind: str, give_back: Callable[[Run], None]
) -> None:
    a = run_of(kind, SHAPES)
    a.steps(range(3))
    memory = memory_of(entries(a))
    give_back(a)
    assert is_free(memory)
    a.steps(range(3, 5))
    assert all(p.isfinite().all() for p in a.params)


@every_kind
def test_memory_of_weights_and_gradients_is_free_when_the_user_gives_it_back(kind: str) -> None:
    a = run_of(kind, SHAPES)
    a.steps(range(3))
    weights, gradients = memory_of(a.params), memory_of(p.grad for p in a.params)
    plan = a.optimizer._plan
    for p in a.params:
        p.data, p.grad = p.data.clone(), None
    assert is_free(weights)
    assert is_free(gradients)
    a.steps(range(3, 5))
    assert a.optimizer._plan is plan


def test_state_that_is_moved_one_by_one_frees_its_memory_by_and_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of a bucket is free after the last of its members, so buckets are small."""
    monkeypatch.setattr(buckets, "STATE_BYTES", 4 * 4 * 64 * 64 * 2 * 4)
    a = run_of(AdamW, [(64, 64)] * 32)
    a.steps(range(2))
    size = sum(x.nbytes for x in entries(a))
    # Each has three members, as a step count is state, too.
    assert len(a.optimizer._store.buckets) == 11
    memory = memory_of(entries(a))
    most_alive = 0
    for number in range(32):
        for name, x in a.state(number).items():
            a.state(number)[name] = x.clone()
        del x
        alive = sum(storage().nbytes() for storage in memory if storage() is not None)
        most_alive = max(most_alive, alive + size * (number + 1) // 32)
    assert most_alive <= 1.15 * size
    give_gradients(a.params, 3)
    tensors = memory_of(entries(a))
    a.optimizer.step()  # it makes new stacks: the tensors are free one bucket after the other
    assert is_free(tensors)


@every_kind
def test_a_deleted_optimizer_is_free_at_once_and_its_parameters_with_it(kind: str) -> None:
    a = run_of(kind, SHAPES, precondition_frequency=2)
    params, optimizer = a.params, a.optimizer
    for step in range(3):
        a.steps([step])
        params[step].grad = None
        optimizer.step()  # a new plan: the old one must be free
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(lambda: 0.0)
    memory, reference = memory_of(entries(a)), weakref.ref(optimizer)
    weights = memory_of(params)
    del a, optimizer
    assert reference() is None
    assert is_free(memory)
    del params
    assert is_free(weights)


def test_an_optimizer_that_was_copied_or_has_failed_in_a_step_is_free_at_once() -> None:
    a = run_of(SOAP, SHAPES)
    a.steps(range(2))
    params, optimizer = a.params, copy.deepcopy(a.optimizer)
    reference = weakref.ref(optimizer)
    del optimizer
    assert reference() is None
    params[0].grad[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite") as error:
        a.optimizer.step()
    reference = weakref.ref(a.optimizer)
    del a, error
    assert reference() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", [AdamW, Muon, SOAP])
def test_loading_takes_the_memory_of_the_state_once(
    cls: type[MatrixOptimizer], dtype: torch.dtype
) -> None:
    a = run_of(cls, [(64, 64)] * 8, dtype)
    a.steps(range(2))
    size = sum(x.nbytes for x in entries(a))
    saved = copy.deepcopy(a.optimizer.state_dict())
    params = a.params
    del a
    fresh = cls(params)
    for _ in range(2):  # the old state is free before there is new
        with PeakBytes() as peak:
            fresh.load_state_dict(saved)
        assert peak.bytes <= 1.1 * size
    for number, state in enumerate(fresh.state.values()):
        assert all(torch.equal(x, saved["state"][number][key]) for key, x in state.items())


# --- in between -----------------------------------------------------------------------------------


@few_kinds
def test_init_state_between_two_steps_makes_what_was_removed_and_moves_nothing_else(
    kind: str,
) -> None:
    a, b = twins(kind)
    run_both(a, b, range(2))
    for one in (a, b):
        del one.optimizer.state[one.params[2]]
    through_data(a)
    a.optimizer.init_state()
    run_both(a, b, range(2, 4))
    assert int(a.state(2)["step"]) == 2
    assert_same(a, b)


@few_kinds
def test_tensors_of_the_state_stay_the_same_objects(kind: str) -> None:
    """Tools that offload state list its tensors once."""
    a, b = twins(kind)
    run_both(a, b, range(1))
    listed = entries(a)
    for step in range(1, 5):
        through_data(a)
        memory = memory_of(listed)
        run_both(a, b, [step])
        assert all(x is y for x, y in zip(listed, entries(a), strict=True))
        through_data(a)
        assert is_free(memory)
    assert_same(a, b)


def test_one_tensor_that_is_given_to_two_parameters_becomes_two() -> None:
    a = run_of(AdamW, [(4, 6), (4, 6)])
    a.steps(range(1))
    shared = torch.zeros(4, 6)
    for number in range(2):
        a.state(number)["exp_avg"] = shared
    a.steps(range(1, 3))
    assert not torch.equal(a.state(0)["exp_avg"], a.state(1)["exp_avg"])


def test_deferred_refreshes_of_other_parameters_are_done_when_one_loses_its_state() -> None:
    a, b = twins(SOAP, [(4, 6)] * 3, async_refresh=True, precondition_frequency=100)
    a.optimizer.defer_refreshes()
    run_both(a, b, range(1))
    b.optimizer.state_dict()
    for one in (a, b):
        del one.optimizer.state[one.params[2]]
    run_both(a, b, range(1, 3))
    assert all_same(a.params, b.params)


def test_state_that_is_replaced_as_a_whole_gets_the_pending_refreshes() -> None:
    a, b = twins(SOAP, [(4, 6)] * 3, async_refresh=True, precondition_frequency=1)
    a.optimizer.defer_refreshes()
    for step in range(4):
        run_both(a, b, [step])
        memory = memory_of(entries(a))
        all_replaced(a)
        assert is_free(memory)
    assert all_same(a.params, b.params)


def test_a_parameter_that_leaves_takes_no_step_and_is_free_after_the_next_one() -> None:
    params = [parameter(4, 6), parameter(4, 6, seed=1)]
    optimizer = Muon(params)
    run(optimizer, params, range(2))
    optimizer.param_groups[0]["params"].pop()
    left = params.pop()
    del optimizer.state[left]
    before, memory = left.detach().clone(), memory_of([left])
    run(optimizer, [*params, left], range(2, 3))
    assert torch.equal(left, before)
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
