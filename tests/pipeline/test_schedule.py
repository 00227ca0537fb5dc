"""The table of actions: it is torch's, complete, in order, free of deadlock, and the same after a
trip through text."""

from __future__ import annotations

from collections import Counter, deque
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from lather.errors import ConfigError, UserError
from lather.pipeline.schedule import Action, Kind, Schedule, dualpipev, forwards, sequential
from pipeline.schedule_text import from_text, to_text

SIZES = [
    (p, n)
    for p in range(1, 9)
    for n in (range(2 * p, 4 * p + 1) if p <= 3 else (2 * p, 2 * p + 1, 4 * p))
]
SENDS = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}


@pytest.fixture(scope="module")
def tables() -> dict[tuple[int, int], Schedule]:
    return {size: dualpipev(*size) for size in SIZES}


def torch_table(num_ranks: int, num_micro_batches: int) -> list[str]:
    """Lower the table with torch's own functions and defaults; returns it as text."""
    stages = 2 * num_ranks
    sizes: Any = SimpleNamespace(pp_group_size=num_ranks, _n_microbatches=num_micro_batches)
    rows: dict[int, Any] = {}
    for rank in range(num_ranks):
        compute = torch_schedules.ScheduleDualPipeV._calculate_single_rank_operations(sizes, rank)
        rows[rank] = torch_schedules._add_reduce_grad(
            torch_schedules._add_unshard_reshard(compute), num_micro_batches
        )
    rows = torch_schedules._add_send_recv(
        rows, lambda stage: min(stage, stages - 1 - stage), stages
    )
    return [" ".join(map(str, rows[rank])) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches"), [(1, 2), (1, 5), (2, 4), (3, 7), (4, 16), (8, 21)]
)
def test_the_table_is_torch_s_word_for_word(num_ranks: int, num_micro_batches: int) -> None:
    table = dualpipev(num_ranks, num_micro_batches)
    assert [" ".join(map(str, row)) for row in table.ranks] == torch_table(
        num_ranks, num_micro_batches
    )


def test_every_chunk_is_there_once_and_at_most_2p_plus_1_live(
    tables: dict[tuple[int, int], Schedule],
) -> None:
    for (num_ranks, n), table in tables.items():
        assert (table.num_ranks, table.num_stages, table.num_micro_batches) == (
            num_ranks,
            2 * num_ranks,
            n,
        )
        chunks = [str(chunk) for row in table.ranks for action in row for chunk in action.chunks]
        names = set(chunks)
        assert len(chunks) == len(names)
        for stage in range(2 * num_ranks):
            for m in range(n):
                assert f"{stage}F{m}" in names
                assert (f"{stage}B{m}" in names) != (f"{stage}I{m}" in names)
                assert (f"{stage}I{m}" in names) == (f"{stage}W{m}" in names)
        assert max(map(table.peak_live_chunks, range(num_ranks))) <= 2 * num_ranks + 1


def test_stages_are_in_v_order() -> None:
    table = dualpipev(3, 6)
    assert [table.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [table.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert {chunk.stage for action in table.ranks[1] for chunk in action.chunks} == {1, 4}


def transfers(
    table: Schedule,
) -> tuple[dict[tuple[int, int], list[str]], dict[tuple[int, int], list[str]]]:
    """Return what is sent, by the name under which it is received, and what is received, by
    (source, destination), with the V order written out."""
    home = [*range(table.num_ranks), *reversed(range(table.num_ranks))]
    sent: dict[tuple[int, int], list[str]] = {}
    received: dict[tuple[int, int], list[str]] = {}
    for rank, row in enumerate(table.ranks):
        for action in row:
            if action.kind.value in SENDS:
                name, step = SENDS[action.kind.value]
                sent.setdefault((rank, home[action.stage + step]), []).append(
                    f"{action.stage + step}{name}{action.micro_batch}"
                )
            elif action.kind.value.startswith("RECV"):
                source = home[action.stage + (-1 if action.kind.value == "RECV_F" else 1)]
                received.setdefault((source, rank), []).append(str(action))
    return sent, received


def test_sends_and_receives_match_in_order(tables: dict[tuple[int, int], Schedule]) -> None:
    for table in tables.values():
        sent, received = transfers(table)
        assert sent == received
        assert all(abs(source - destination) == 1 for source, destination in sent)


def run_blocking(table: Schedule) -> bool:
    """Whether all ranks finish if a send waits for its receive and a receive for its send, and
    nothing else goes on meanwhile."""
    home = [*range(table.num_stages // 2), *reversed(range(table.num_stages // 2))]
    rows = [
        deque(
            action
            for action in row
            if "_" in action.kind.value and action.kind.value[:4] in ("SEND", "RECV")
        )
        for row in table.ranks
    ]
    moving = True
    while moving:
        moving = False
        for row in rows:
            while row and row[0].kind.value in SENDS:
                name, step = SENDS[row[0].kind.value]
                other = rows[home[row[0].stage + step]]
                if not other or str(other[0]) != f"{row[0].stage + step}{name}{row[0].micro_batch}":
                    break
                row.popleft()
                other.popleft()
                moving = True
    return not any(rows)


def test_blocking_transfers_do_not_deadlock(tables: dict[tuple[int, int], Schedule]) -> None:
    """A host may therefore wait at any time until its device has done all that it has started, also
    receives that were started ahead: no ranks wait for each other in a circle."""
    assert all(run_blocking(table) for table in tables.values())
    assert all(run_blocking(forwards(2 * p, n)) for p in range(1, 6) for n in (1, 3, 2 * p, 9))


def test_early_weight_gradients_follow_their_input_gradients_and_nothing_else_changes() -> None:
    """Without W the two tables are equal, and so are transfers and live chunks. At most one chunk
    waits, until its gradient is sent."""
    for p, n in SIZES:
        table, early = dualpipev(p, n), dualpipev(p, n, early_weight_gradients=True)
        assert run_blocking(early)
        for row, early_row in zip(table.ranks, early.ranks, strict=True):
            assert Counter(row) == Counter(early_row)
            assert without_weight_gradients(row) == without_weight_gradients(early_row)
            assert most_waiting(early_row) == 1
        assert max(map(most_waiting, table.ranks)) > 1 or p == 1


def without_weight_gradients(row: tuple[Action, ...]) -> list[Action]:
    return [action for action in row if action.kind is not Kind.BACKWARD_WEIGHT]


def most_waiting(row: tuple[Action, ...]) -> int:
    """The most chunks of a rank whose input gradient is done and whose weight gradients are not."""
    waiting = [
        {Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0) for action in row
    ]
    return max(accumulate(waiting))


def test_parameters_are_gathered_and_reduced_once(tables: dict[tuple[int, int], Schedule]) -> None:
    for table in tables.values():
        for rank, row in enumerate(table.ranks):
            for kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD):
                assert sorted(action.stage for action in row if action.kind is kind) == list(
                    table.stages_of(rank)
                )


def test_sequential() -> None:
    table = sequential(3)
    assert (
        " ".join(map(str, table.ranks[0]))
        == "0UNSHARD 0F0 0B0 0F1 0B1 0F2 0B2 0REDUCE_GRAD 0RESHARD"
    )
    assert (
        table.num_ranks,
        table.num_stages,
        table.stages_of(0),
        table.rank_of(0),
        table.peak_live_chunks(0),
    ) == (1, 1, (0,), 0, 1)


@pytest.mark.parametrize("text", ["3F0", "12W345", "0UNSHARD", "7SEND_B3", "(0F3;3B1)OVERLAP_F_B"])
def test_an_action_s_text_is_torch_s(text: str) -> None:
    assert str(Action.from_text(text)) == text == str(torch_schedules._Action.from_str(text))


@pytest.mark.parametrize(
    "text", ["", "F0", "3X0", "3F0 ", "-1F0", "(0F3)OVERLAP_F_B", "0OVERLAP_F_B"]
)
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.from_text(text)


def changed(old: str, new: str, count: int = 1) -> str:
    text = to_text(dualpipev(2, 4))
    assert old in text
    return text.replace(old, new, count)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 comes before 0F0"),
        ("3W0 ", "", "3W1 is out of order|is out of order"),
        ("0W3 ", "", "0REDUCE_GRAD comes before the last weight gradient"),
        ("0F0 0SEND_F0", "0F0 0F0 0SEND_F0", "0F0 is out of order, or occurs twice"),
        ("3I0 3SEND_B0 3W0", "3W0 3I0 3SEND_B0", "3W0 comes before 3I0"),
        ("3RECV_F0 0F2", "0F2", "3F0 comes before 3RECV_F0"),
        ("0UNSHARD", "0UNSHARD 0UNSHARD", "unsharded already"),
        ("0UNSHARD ", "", "not unsharded"),
        (" 0RESHARD", "", "still unsharded"),
        (
            "0REDUCE_GRAD 0RESHARD",
            "0RESHARD 0REDUCE_GRAD",
            "0REDUCE_GRAD comes while its parameters are not unsharded",
        ),
        ("0REDUCE_GRAD ", "", "0 REDUCE_GRAD and should have 1"),
        ("0REDUCE_GRAD", "0REDUCE_GRAD1", "has a micro-batch"),
        ("1F0", "2F0", "comes before"),
        ("0F0", "5F0", "not on one of this rank's stages"),
        ("0SEND_F3 ", "", "3 SEND_F and should have 4"),
        ("3SEND_B3 ", "", "3 SEND_B and should have 4"),
        ("4 micro-batches", "5 micro-batches", "before the last weight gradient"),
    ],
)
def test_a_table_that_cannot_be_executed_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_text(changed(old, new))


def test_transfers_in_another_order_at_both_ends_are_refused() -> None:
    text = changed("1RECV_F1 2F0 2SEND_F0 1RECV_F2 1F1", "1RECV_F1 2F0 2SEND_F0 1F1 1RECV_F2")
    from_text(text)  # a later receive is in the same order
    with pytest.raises(ValueError, match="is out of order"):
        from_text(changed("1RECV_F1 2F0 2SEND_F0 1RECV_F2", "1RECV_F2 2F0 2SEND_F0 1RECV_F1"))
    text = changed("0SEND_F3 3SEND_B1", "3SEND_B1 0SEND_F3")
    with pytest.raises(ValueError, match="from rank 0 to rank 1 is sent as"):
        from_text(text)


def test_too_many_live_chunks_are_refused() -> None:
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    chunks = [Action(0, kind, m) for kind in kinds for m in range(4)]
    row = (Action(0, Kind.UNSHARD), *chunks, Action(0, Kind.REDUCE_GRAD), Action(0, Kind.RESHARD))
    with pytest.raises(ValueError, match="keeps 4 chunks alive"):
        Schedule(1, 4, (row,))


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches", "message"),
    [(2, 3, "= 3 .* 4 for"), (64, 127, "128"), (0, 4, "parallel.pp = 0")],
)
def test_sizes_that_do_not_fit_are_refused(
    num_ranks: int, num_micro_batches: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dualpipev(num_ranks, num_micro_batches)


def test_a_torch_that_makes_no_such_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_schedules, "_add_send_recv")
    with pytest.raises(UserError, match=r"torch .* 2\.11 to 2\.13"):
        dualpipev(2, 4)
