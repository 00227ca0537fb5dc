"""Two generators in one thread: which one has its turn, what they return, and what happens to one
when the other fails."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from lather.pipeline.overlap import run, run_both


def chunk(
    name: str, turns: int, seen: list[str], *, fails_at: int | None = None
) -> Generator[None, None, str]:
    """Note every turn, and note if the generator is closed before its end."""
    try:
        for turn in range(turns + 1):
            if turn == fails_at:
                raise ValueError(f"{name} failed")
            seen.append(f"{name}{turn}")
            if turn < turns:
                yield
    except GeneratorExit:
        seen.append(f"{name} closed")
        raise
    return f"result of {name}"


def test_turns_alternate_and_the_longer_one_goes_on_alone() -> None:
    seen: list[str] = []
    assert run_both(chunk("f", 1, seen), chunk("b", 3, seen)) == ("result of f", "result of b")
    assert seen == ["f0", "b0", "f1", "b1", "b2", "b3"]
    seen.clear()
    assert run_both(chunk("f", 2, seen), chunk("b", 0, seen)) == ("result of f", "result of b")
    assert seen == ["f0", "b0", "f1", "f2"]


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_alone(turns: int) -> None:
    seen: list[str] = []
    assert run(chunk("f", turns, seen)) == "result of f"
    assert seen == [f"f{turn}" for turn in range(turns + 1)]


@pytest.mark.parametrize(
    ("failing", "at", "expected"),
    [
        ("f", 0, ["b never started"]),
        ("f", 1, ["f0", "b0", "b closed"]),
        ("b", 0, ["f0", "f closed"]),
        ("b", 2, ["f0", "b0", "f1", "b1", "f2", "f closed"]),
    ],
)
def test_if_one_fails_the_other_is_closed_and_the_error_is_the_caller_s(
    failing: str, at: int, expected: list[str]
) -> None:
    seen: list[str] = []
    chunks = {name: chunk(name, 3, seen, fails_at=at if name == failing else None) for name in "fb"}
    with pytest.raises(ValueError, match=f"{failing} failed"):
        run_both(chunks["f"], chunks["b"])
    assert seen == [entry for entry in expected if "never" not in entry]
    for one in chunks.values():
        assert one.gi_frame is None, "still open"
