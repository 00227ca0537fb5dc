"""Which of several failures is named as the cause, and what a hub tells its ranks; in one process,
with sockets as ranks."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist

from lather.errors import ConfigError
from lather.parallel.launch.lifeline import COPY, SETTLE_SECONDS, Failure, Hub
from lather.parallel.launch.whereabouts import Standstill, whereabouts

BROKEN = RuntimeError(
    "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3022"
)


class Rank:
    """The rank's end of a line to the hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
        self.file = self.socket.makefile("r")
        self.rank = rank
        self.say(hello=rank, pid=1000 + rank)

    def say(self, **message: object) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def fail(self, error: BaseException) -> None:
        self.say(failed=asdict(Failure.of(self.rank, error)))

    def hear(self) -> dict[str, object]:
        message: dict[str, object] = json.loads(self.file.readline())
        return message

    def die(self) -> None:
        self.file.close()
        self.socket.close()


class Ended:
    """A hub with three ranks, and the causes of an end that it reported."""

    def __init__(self) -> None:
        self.causes: list[Failure] = []
        self.deaths: dict[int, str] = {}
        died = "was struck by lightning: process {}".format
        self.hub = Hub(
            "127.0.0.1", 3, self.causes.append, watch=lambda: self.deaths, died=died
        ).start()
        self.ranks = [Rank(self.hub, rank) for rank in range(3)]

    def cause(self) -> Failure:
        """Wait until the hub has told every rank that is left; returns the cause."""
        deadline = time.monotonic() + 10
        while not self.causes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (cause,) = self.causes
        return cause


@pytest.fixture
def job() -> Iterator[Ended]:
    job = Ended()
    yield job
    for rank in job.ranks:
        rank.die()
    job.hub.close()


def chained(error: Exception, cause: Exception) -> Exception:
    try:
        raise error from cause
    except Exception as raised:
        return raised


def copied(error: Exception) -> Exception:
    error.add_note(COPY)
    return error


@pytest.mark.parametrize(
    "consequence",
    [
        BROKEN,
        ConnectionResetError("reset"),
        dist.DistBackendError("NCCL error"),
        chained(ValueError("x"), BROKEN),
        copied(ValueError("x")),
    ],
    ids=["gloo", "socket", "nccl", "chained", "copy"],
)
def test_a_consequence_is_not_the_cause_even_if_it_is_heard_first(
    job: Ended, consequence: Exception
) -> None:
    job.ranks[0].fail(consequence)
    time.sleep(0.1)
    job.ranks[2].fail(ValueError("rank two is unwell"))
    assert (job.cause().rank, job.cause().kind) == (2, "error")
    assert "rank two is unwell" in job.cause().describe()
    assert job.ranks[1].hear() == {"end": asdict(job.cause())}


def test_a_death_is_the_cause_of_broken_connections(job: Ended) -> None:
    job.ranks[0].fail(BROKEN)
    job.ranks[1].die()
    assert (job.cause().rank, job.cause().kind, job.cause().text) == (
        1,
        "died",
        "was struck by lightning: process 1001",
    )


def test_the_first_of_two_causes_is_named(job: Ended) -> None:
    late = asdict(Failure.of(0, ValueError("late")))
    job.ranks[1].fail(ValueError("early"))
    job.ranks[0].say(failed={**late, "when": time.time() + 1})
    assert "early" in job.cause().text


def test_after_a_user_error_the_others_may_tidy_up(job: Ended) -> None:
    for rank in job.ranks[1:]:
        rank.fail(ConfigError("no such file"))
    time.sleep(3 * SETTLE_SECONDS)
    assert not job.causes
    job.ranks[0].fail(ConfigError("no such file"))
    assert job.cause().kind == "user"


def test_a_broken_connection_alone_is_the_cause(job: Ended) -> None:
    job.ranks[2].fail(BROKEN)
    assert (job.cause().rank, job.cause().kind) == (2, "connection")


def test_a_process_that_dies_before_it_has_a_line_is_noticed(job: Ended) -> None:
    time.sleep(0.3)  # so that the hub has heard who is there
    job.deaths = {1001: "known", 77: "ended with exit status 1"}
    assert job.cause().rank == -1
    assert (
        job.cause()
        .describe()
        .startswith("lather: stopped: a rank that was starting ended with exit status 1")
    )


def test_ranks_that_are_done_may_leave_and_strangers_may_come(job: Ended) -> None:
    with socket.create_connection(("127.0.0.1", job.hub.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    for rank in job.ranks:
        rank.say(done=True)
    job.hub.wait(10)
    job.ranks[1].die()
    time.sleep(0.2)
    job.hub.close()
    assert (job.causes, job.hub.cause) == ([], None)


def test_requests_reach_ranks_that_come_later(job: Ended) -> None:
    """A job that is starting gets them, too: a run that resumes saves after its first step."""
    job.hub.request(signal.SIGUSR1)
    job.hub.request(signal.SIGTERM)
    late = Rank(job.hub, 3)
    for rank in (*job.ranks, late):
        assert [rank.hear(), rank.hear()] == [{"request": 10}, {"request": 15}]
    late.say(done=True)


def test_what_can_be_put_right_keeps_its_line() -> None:
    assert Failure.of(1, ConfigError("a\n  b")).describe() == "lather: error: a b"
    full = Failure.of(1, OSError(28, "No space left on device", "/a/file"))
    assert (full.kind, full.number, full.text, full.file) == (
        "file",
        28,
        "No space left on device",
        "/a/file",
    )
    assert Failure.of(1, OSError(2, "No such file", "/a/file")).kind == "error"


TIMED_OUT = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms")


def test_after_a_timeout_the_rank_that_does_not_wait_is_the_cause(job: Ended) -> None:
    job.ranks[0].fail(TIMED_OUT)
    for rank in job.ranks[1:]:
        assert rank.hear() == {"where": True}
    job.ranks[1].say(place={"text": "step 3, a.py, line 4, in run", "waits": True})
    job.ranks[2].say(place={"text": "step 3, b.py, line 7, in read", "waits": False})
    cause = job.cause()
    assert (cause.rank, cause.kind) == (2, "stuck")
    assert cause.describe().startswith(
        "lather: stopped: rank 2 is in step 3, b.py, line 7, in read,"
    )


def test_if_all_ranks_wait_the_first_that_gave_up_is_the_cause(job: Ended) -> None:
    job.ranks[1].fail(TIMED_OUT)
    for rank in (job.ranks[0], job.ranks[2]):
        assert rank.hear() == {"where": True}
        rank.say(place={"text": "step 3", "waits": True})
    assert (job.cause().rank, job.cause().kind) == (1, "connection")


def test_after_a_standstill_the_rank_that_does_not_wait_is_named(job: Ended) -> None:
    """It has reported the standstill itself, and other ranks' reports change nothing."""
    for rank in (job.ranks[2], job.ranks[0]):
        rank.say(stalled=540.0)
    waits = {"text": "step 3, a.py, line 4, in run", "waits": True}
    for number, rank in enumerate(job.ranks):
        assert rank.hear() == {"where": True}
        place = {"text": "step 3, b.py, line 7, in read", "waits": False}
        rank.say(place=place if number == 2 else waits)
    cause = job.cause()
    assert (cause.rank, cause.kind) == (2, "stuck")
    text = "rank 2 is in step 3, b.py, line 7, in read, and the others have waited for it for 540 s"
    assert cause.describe().startswith(f"lather: stopped: {text}; the same command resumes")


def test_in_a_standstill_in_which_all_wait_all_are_named(job: Ended) -> None:
    job.ranks[1].say(stalled=540.0)
    for number, rank in enumerate(job.ranks):
        assert rank.hear() == {"where": True}
        rank.say(place={"text": f"step 3, action {number}F0", "waits": True})
    assert job.cause().text == "no rank has moved for 540 s: " + "; ".join(
        f"rank {number} is in step 3, action {number}F0" for number in range(len(job.ranks))
    )


def test_a_failure_after_a_standstill_is_the_cause(job: Ended) -> None:
    job.ranks[1].say(stalled=540.0)
    job.ranks[2].fail(ArithmeticError("lost count"))
    for rank in job.ranks[:2]:
        assert rank.hear() == {"where": True}
        rank.say(place={"text": "step 3", "waits": True})
    assert (job.cause().rank, job.cause().kind) == (2, "error")


def run_as(file: str, name: str, body: str, **variables: Any) -> Callable[[], None]:
    """Return a function that seems to stand in this file."""
    made = dict[str, Any](variables)
    exec(compile(f"def {name}():\n    {body}\n", file, "exec"), made)
    function: Callable[[], None] = made[name]
    return function


def test_a_call_of_a_step_that_does_not_return_is_a_standstill() -> None:
    """A read of a value of a GPU waits for other ranks; its caller is named."""
    released, seen = threading.Lock(), list[Any]()
    released.acquire()
    read = run_as("/a/lather/device.py", "read", "lock.acquire()", lock=released)
    step = run_as("/a/lather/train/loop.py", "_train_step", "read()", read=read)

    def look() -> None:
        standstill = Standstill(10.0)
        time.sleep(0.2)
        seen.extend(standstill.is_reached(now) for now in (0.0, 9.0, 10.0))
        seen.append(whereabouts())
        released.release()

    for call, reached in ((step, True), (read, False)):  # outside of a step nobody waits
        released.acquire(blocking=False)
        seen.clear()
        thread = threading.Thread(target=look)
        thread.start()
        call()
        thread.join()
        assert seen[:3] == [False, False, reached]
        assert seen[3].waits
    thread = threading.Thread(target=lambda: seen.append(Standstill(0.0).is_reached(1.0)))
    thread.start()
    thread.join()
    assert not seen[-1]


def test_a_rank_that_does_not_answer_is_the_cause(job: Ended) -> None:
    job.ranks[1].fail(TIMED_OUT)
    assert job.ranks[0].hear() == {"where": True}
    job.ranks[0].say(place={"text": "step 3", "waits": True})
    assert "rank 2 does not answer" in job.cause().describe()
