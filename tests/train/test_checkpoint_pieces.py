"""Pieces of tensors: every element is written once and read from wherever it is, however the tensor
was cut and is cut now."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import stored_tensors
from torch import Tensor

from lather.boxes import Box, Piece
from lather.checkpoint.folder import Progress, Retention, Table, check_cover, piece_name, read_table
from lather.checkpoint.reader import CheckpointTensors, open_checkpoint
from lather.checkpoint.save import CheckpointWriter, each_once, stored_entries
from lather.errors import CheckpointError
from lather.files import digest_of

SHAPE = (7, 5, 3)
WHOLE = torch.arange(105, dtype=torch.float64).view(SHAPE)
CUTS: dict[str, tuple[list[int], ...]] = {
    "whole": ([7], [5], [3]),
    "rows": ([3, 0, 4], [5], [3]),
    "columns": ([7], [2, 3], [3]),
    "blocks": ([3, 3, 1], [4, 1], [2, 1]),
}
"""Sizes of the parts along each dim; a part may be empty."""


def cut(sizes: tuple[list[int], ...], whole: Tensor) -> list[Piece]:
    starts = [[0, *itertools.accumulate(along)][:-1] for along in sizes]
    pieces = []
    for at in itertools.product(
        *(zip(start, along, strict=True) for start, along in zip(starts, sizes, strict=True))
    ):
        inside = tuple(slice(start, start + size) for start, size in at)
        pieces.append(
            Piece("w", whole[inside].clone(), tuple(start for start, _ in at), tuple(whole.shape))
        )
    return pieces


def written(folder: Path, pieces: list[Piece]) -> Path:
    target = folder / "step-00000001"
    writer = CheckpointWriter(target, None)
    writer.publish(Table(Progress(1, 0.0), None, *writer.write(pieces)), Retention(1))
    return target


@pytest.mark.parametrize("before", CUTS)
def test_what_was_cut_in_one_way_is_read_in_any_other(before: str, tmp_path: Path) -> None:
    path = written(tmp_path, cut(CUTS[before], WHOLE))
    assert stored_tensors(path)["w"].equal(WHOLE)
    for after in CUTS.values():
        pieces = cut(after, torch.full(SHAPE, torch.nan, dtype=torch.float64))
        tensors = CheckpointTensors(path, read_table(path))
        for piece in pieces:
            tensors.read_into(piece.value, piece.name, piece.offset)
        for found, expected in zip(pieces, cut(after, WHOLE), strict=True):
            assert found.value.equal(expected.value)
    tensors = open_checkpoint(path)
    for index in (
        (),
        (2,),
        (slice(1, 5),),
        (6, slice(2, 4)),
        (slice(2, 2),),
        (slice(None), slice(3, 5), 1),
        (3, 1, 2),
    ):
        assert tensors.read("w", index).equal(WHOLE[index]), index


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
def test_tensors_of_any_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    value = torch.full(shape, 3.0)
    path = written(tmp_path, [Piece("w", value, (0,) * len(shape), shape)])
    assert open_checkpoint(path).read("w").equal(value)
    target = torch.zeros(shape)
    open_checkpoint(path).read_into(target, "w", (0,) * len(shape))
    assert target.equal(value)


def test_names_of_pieces_are_pythons_own() -> None:
    assert piece_name("w", Box((0, 0), (4, 3)), (4, 3)) == "w"
    assert piece_name("w", Box((1, 0), (2, 3)), (4, 3)) == "w[1:3, :]"
    assert piece_name("w", Box((0, 2), (4, 1)), (4, 3)) == "w[:, 2:3]"


# --- who writes -----------------------------------------------------------------------------------


def piece_of(name: str, size: int, whole: int, dtype: torch.dtype = torch.float32) -> Piece:
    return Piece(name, torch.zeros(size, dtype=dtype), (0,), (whole,)).described()


def plan(num_ranks: int, sizes: list[int], havers: list[list[int]]) -> list[list[Piece]]:
    """Decide who writes which of pieces of these lengths; each is on the ranks that have it, in an
    order of the rank's own."""
    local = []
    for rank in range(num_ranks):
        own = [number for number, ranks in enumerate(havers) if rank in ranks]
        random.Random(rank).shuffle(own)
        local.append([piece_of(str(n), sizes[n], sizes[n]) for n in own])
    return each_once(local)


def test_copies_are_written_once_and_spread_evenly() -> None:
    draw = random.Random(0)
    sizes = [draw.randint(1, 40) for _ in range(60)]
    havers = [list(range(4)) if number % 3 else [number % 4] for number in range(60)]
    found = plan(4, sizes, havers)
    names = [[piece.name for piece in own] for own in found]
    assert sorted(itertools.chain(*names), key=int) == [str(number) for number in range(60)]
    assert all(rank in havers[int(name)] for rank, own in enumerate(names) for name in own)
    loads = [sum(sizes[int(name)] for name in own) for own in names]
    assert max(loads) - min(loads) <= 3
    assert set(stored_entries(found)) == {str(number) for number in range(60)}
    assert names == [[piece.name for piece in own] for own in plan(4, sizes, havers)]


def test_ranks_must_agree_on_what_a_tensor_is() -> None:
    one, other = (piece_of("w", 2, 2, dtype) for dtype in (torch.float32, torch.float64))
    with pytest.raises(AssertionError, match="ranks differ in what w is"):
        each_once([[one], [other]])


def test_a_tensor_of_which_a_part_is_missing_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the pieces of 'w' do not cover it"):
        written(tmp_path, [Piece("w", torch.zeros(2), (0,), (3,))])
    assert not list(tmp_path.iterdir())


def test_cover_is_what_counting_elements_says() -> None:
    """The boxes are random, up to four in a 3 x 4 tensor."""
    draw = random.Random(1)
    covers = 0
    for _ in range(4000):
        boxes = []
        for _ in range(draw.randint(1, 4)):
            edges = [
                sorted((draw.choice((0, 0, 1, 2, size)), draw.choice((0, 1, 2, size, size))))
                for size in (3, 4)
            ]
            boxes.append(Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges)))
        times = torch.zeros(3, 4, dtype=torch.int64)
        for box in boxes:
            times[box.within(Box.whole((3, 4)))] += 1
        try:
            check_cover("w", (3, 4), boxes)
            is_cover = True
        except ValueError:
            is_cover = False
        assert is_cover == bool((times == 1).all()), boxes
        covers += is_cover
    assert covers > 20


# --- a table from elsewhere -----------------------------------------------------------------------


def change(path: Path, edit: Any) -> None:
    """Change `state.json` on purpose, so that its digest is right."""
    state = json.loads((path / "state.json").read_text())
    del state["digest"]
    edit(state)
    (path / "state.json").write_text(json.dumps({**state, "digest": digest_of(state)}))


def pieces_of(state: dict[str, Any]) -> list[Any]:
    pieces: list[Any] = state["tensors"]["w"]["pieces"]
    return pieces


EDITS = {
    "a piece is gone": lambda state: pieces_of(state).pop(),
    "a piece is twice": lambda state: pieces_of(state).append(pieces_of(state)[0]),
    "a piece is outside": lambda state: pieces_of(state)[0].__setitem__(1, [6, 0, 0]),
    "negative": lambda state: pieces_of(state)[0].__setitem__(1, [-1, 0, 0]),
    "too many dims": lambda state: pieces_of(state)[0].__setitem__(2, [3, 5, 3, 1]),
    "endless": lambda state: state["tensors"]["w"].__setitem__("shape", [2**70, 5, 3]),
    "no numbers": lambda state: state["tensors"]["w"].__setitem__("shape", [7.0, 5, True]),
    "dtype": lambda state: state["tensors"]["w"].__setitem__("dtype", "F128"),
    "another file": lambda state: pieces_of(state)[0].__setitem__(0, "rank-00009.safetensors"),
    "a file outside": lambda state: state["files"].__setitem__(
        "../rank-00000.safetensors", state["files"]["rank-00000.safetensors"]
    ),
    "an absolute file": lambda state: state["files"].__setitem__(
        "/etc/passwd", {"bytes": 1, "sha256": ""}
    ),
    "step": lambda state: state.__setitem__("step", "1"),
    "seconds": lambda state: state.__setitem__("seconds", None),
    "optimizer": lambda state: state.__setitem__("optimizer", 3),
    "files": lambda state: state.__setitem__("files", []),
    "tensors": lambda state: state.__setitem__("tensors", [1]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_table_that_makes_no_sense_is_named(edit: str, tmp_path: Path) -> None:
    path = written(tmp_path, cut(CUTS["rows"], WHOLE))
    change(path, EDITS[edit])
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(path)
    assert str(refused.value).startswith(f"{path / 'state.json'}: missing or damaged")


def test_a_file_that_holds_something_else_is_named(tmp_path: Path) -> None:
    """Bytes and checksum are those of the table, but the tensors are another model's."""
    path, other = (
        written(tmp_path / "one", cut(CUTS["rows"], WHOLE)),
        written(tmp_path / "other", cut(CUTS["rows"], WHOLE[:, :, :2])),
    )
    files = json.loads((other / "state.json").read_text())["files"]
    (path / "rank-00000.safetensors").write_bytes((other / "rank-00000.safetensors").read_bytes())
    change(path, lambda state: state.__setitem__("files", files))
    with pytest.raises(
        CheckpointError,
        match=r"rank-00000\.safetensors: missing or damaged \(it does not hold 'w\[\d:\d, :, :\]'",
    ):
        open_checkpoint(path)


def test_the_table_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    path, other = (
        written(tmp_path / "one", cut(CUTS["rows"], WHOLE)),
        written(tmp_path / "other", cut(CUTS["rows"], WHOLE + 1)),
    )
    (path / "state.json").write_bytes((other / "state.json").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"rank-00000\.safetensors: missing or damaged \(its size or checksum"
    ):
        open_checkpoint(path)
