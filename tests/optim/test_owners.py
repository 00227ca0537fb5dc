"""Where parts of a tensor are and who owns which matrix: pure functions of shapes, tested against
torch's own cutting and by their properties."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lather.boxes import Box, chunk
from lather.optim import Matrix
from lather.optim.batched.layouts import layout_of
from lather.optim.rules.soap import SOAPRule
from lather.optim.sharded.owners import assign, matrices_of, rows_of_copies, share_out
from lather.optim.sharded.placement import Spread, boxes_of

RULE = SOAPRule(matrix_layout="per_expert")


def spread(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Placement], position: int = 0
) -> Spread:
    boxes = boxes_of(shape, mesh, placements)
    return Spread(shape, tuple(range(len(boxes))), boxes, position)


def cut(x: torch.Tensor, mesh: tuple[int, ...], placements: list[Placement]) -> list[torch.Tensor]:
    """Cut x by torch's own chunks, mesh axis by mesh axis; returns what each position holds."""
    parts = [x]
    for size, placement in zip(mesh, placements, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            chunks = [list(part.chunk(size, dim)) if part.shape[dim] else [] for part in parts]
            empty = [[part.narrow(dim, 0, 0)] * size for part in parts]
            parts = [
                x for some, more in zip(chunks, empty, strict=True) for x in (some + more)[:size]
            ]
        else:
            parts = [part for part in parts for _ in range(size)]
    return parts


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (5,), (2, 2), (2, 3)], ids=str)
def test_boxes_are_what_torch_cuts(mesh: tuple[int, ...]) -> None:
    choices: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    for placements in itertools.product(choices, repeat=len(mesh)):
        x = torch.arange(7 * 4).view(7, 4)
        boxes, parts = boxes_of((7, 4), mesh, placements), cut(x, mesh, list(placements))
        for box, part in zip(boxes, parts, strict=True):
            found = x[box.within(Box.whole((7, 4)))]
            assert found.numel() == part.numel()
            assert found.flatten().tolist() == part.flatten().tolist()


@settings(deadline=None)
@given(length=st.integers(0, 40), num=st.integers(1, 9))
def test_chunks_are_those_of_torch(length: int, num: int) -> None:
    lengths = [len(part) for part in torch.arange(length).chunk(num)] if length else []
    lengths += [0] * (num - len(lengths))
    parts = [chunk(length, num, number) for number in range(num)]
    assert parts == list(zip(itertools.accumulate(lengths[:-1], initial=0), lengths, strict=True))


def test_overlap_and_index() -> None:
    a, b = Box((1, 2), (4, 3)), Box((3, 0), (5, 4))
    both = a.overlap(b)
    assert both == Box((3, 2), (2, 2))
    assert both.within(a) == (slice(2, 4), slice(0, 2))
    assert a.overlap(Box((5, 2), (1, 1))) is None
    assert Box((), ()).overlap(Box((), ())) == Box((), ())


@settings(deadline=None)
@given(
    costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=60),
    num=st.integers(1, 8),
    data=st.data(),
)
def test_every_item_has_an_owner_and_none_has_much_more_than_the_mean(
    costs: list[float], num: int, data: st.DataObject
) -> None:
    costs = sorted(costs, reverse=True)
    holders = [data.draw(st.lists(st.integers(0, num - 1), max_size=2, unique=True)) for _ in costs]
    owners = assign(costs, holders, [0.0] * num)
    loads = [0.0] * num
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    assert max(loads) <= sum(costs) / num + max(costs) + 1e-6
    assert owners == assign(costs, holders, [0.0] * num)


def test_a_matrix_stays_where_there_is_room() -> None:
    assert assign([1.0] * 4, [(0,), (1,), (2,), (3,)], [0.0] * 4) == [0, 1, 2, 3]
    assert assign([1.0] * 4, [(0,)] * 4, [0.0] * 2) == [0, 0, 1, 1]
    assert assign([5.0, 1.0, 1.0], [(), (), ()], [0.0, 4.0]) == [0, 1, 0]


def test_experts_that_are_whole_on_every_rank_alike_never_travel() -> None:
    layout = layout_of((8, 3, 4), RULE)
    where = spread((8, 3, 4), (4,), [Shard(0)])
    units = share_out([(where, layout)] * 3, {})
    assert all(unit.stays and unit.owner == unit.number // 2 for some in units for unit in some)


def test_uneven_experts_are_shared_out() -> None:
    layout = layout_of((2, 3, 4), RULE)
    units = share_out([(spread((2, 3, 4), (4,), [Shard(0)]), layout)] * 6, {})
    owners = [unit.owner for some in units for unit in some]
    assert sorted(owners.count(position) for position in range(4)) == [3, 3, 3, 3]


def test_loads_of_before_count() -> None:
    layout = layout_of((4, 4), RULE)
    where = spread((4, 4), (2,), [Shard(0)])
    cost = RULE.cost(Matrix((4, 4), 2))
    assert cost == 4**3 + 4**3 + 16 * 8
    units = share_out([(where, layout)] * 4, {0: 2 * cost})
    assert [unit.owner for some in units for unit in some].count(1) == 3


@pytest.mark.parametrize(
    "placements",
    [[Replicate(), Shard(0)], [Replicate(), Replicate()], [Shard(1), Replicate()]],
    ids=str,
)
@pytest.mark.parametrize("shape", [(7, 5), (1, 6), (3,), ()], ids=str)
def test_copies_are_cut_among_their_holders_once(
    shape: tuple[int, ...], placements: list[Placement]
) -> None:
    placements = [
        one if one.is_replicate() or one.dim < len(shape) else Replicate() for one in placements
    ]
    where = spread(shape, (2, 2), placements)
    counts = torch.zeros(shape)
    for unit in rows_of_copies(where):
        index = unit.box.within(Box.whole(shape))
        counts[index] += 1
        assert where.boxes[unit.owner].overlap(unit.box) == unit.box
    assert (counts == 1).all()


def test_matrices_of_layouts() -> None:
    offsets = [box.offset for box in matrices_of(layout_of((3, 2, 4), RULE))]
    assert offsets == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert matrices_of(layout_of((3, 4), RULE)) == [Box((0, 0), (3, 4))]
