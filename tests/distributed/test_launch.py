"""Ranks that are started, asked to stop, or die: the whole job ends within seconds and says why,
and no process stays behind."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator

import launch_workers
import pytest
import torch.distributed as dist
from jobs import Job

from forked import ForkedPython
from lather.parallel.launch import start
from lather.parallel.launch.world import World


def slurm(num_ranks: int) -> list[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        "SLURM_STEP_NUM_TASKS": str(num_ranks),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_JOB_ID": "1",
        "MASTER_PORT": str(port),
    }
    return [
        {**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        for rank in range(num_ranks)
    ]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Start all jobs at once, as most of their time is the start. Those of the last two are
    processes as users start them."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = {
        "raises": Job.start(
            launch_workers.__file__, folder / "raises", "raise_on_one", 2, python=ForkedPython
        ),
        "killed": Job.start(
            launch_workers.__file__, folder / "killed", "block", 3, python=ForkedPython
        ),
        "stopped": Job.start(
            launch_workers.__file__, folder / "stopped", "until_stopped", 2, python=ForkedPython
        ),
        "orphans": Job.start(launch_workers.__file__, folder / "orphans", "block", 2),
        "slurm": Job.start(launch_workers.__file__, folder / "slurm", "refuse", 2, slurm(2)),
    }
    yield jobs
    for job in jobs.values():
        job.kill()


def nothing(job: Job, pids: list[int]) -> None:
    """Do nothing: the ranks end the job themselves."""


def test_a_rank_that_raises_ends_the_job_with_its_traceback_alone(jobs: dict[str, Job]) -> None:
    statuses, out, err = jobs["raises"].end(nothing)
    assert (statuses, out) == ([1], "")
    lines = err.splitlines()
    assert lines[:2] == ["lather: stopped: rank 1 failed:", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: rank one is unwell"
    assert "in raise_on_one" in err
    assert err.count("Traceback") == 1


def test_a_killed_rank_ends_those_that_would_not_notice(jobs: dict[str, Job]) -> None:
    statuses, out, err = jobs["killed"].end(lambda job, pids: os.kill(pids[1], signal.SIGKILL))
    assert (statuses, out) == ([1], "")
    assert len(err.splitlines()) == 1
    assert err.startswith("lather: stopped: rank 1 was killed by SIGKILL")


def test_a_signal_to_the_whole_group_lets_all_ranks_stop_together(jobs: dict[str, Job]) -> None:
    statuses, out, err = jobs["stopped"].end(
        lambda job, pids: os.killpg(job.processes[0].pid, signal.SIGINT)
    )
    assert (statuses, err) == ([37], "")
    assert sorted(out.splitlines()) == ["rank 0 stopped", "rank 1 stopped"]


def test_ranks_do_not_outlive_their_parent(jobs: dict[str, Job]) -> None:
    statuses, _, _ = jobs["orphans"].end(lambda job, pids: job.processes[0].kill())
    assert statuses == [-signal.SIGKILL]


def test_a_rank_that_another_launcher_started_ends_the_others_with_a_user_errors_line(
    jobs: dict[str, Job],
) -> None:
    statuses, out, err = jobs["slurm"].end(nothing)
    assert (statuses, out) == ([2, 2], "")
    assert re.fullmatch(r"lather: error: parallel\.pp = 3 is not valid: it must be 2\n", err)


def test_a_restart_by_torchrun_finds_nothing_of_the_attempt_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = dist.HashStore()
    monkeypatch.setattr(start, "rendezvous", lambda *_, **__: iter([(kept, 0, 2)]))
    world = World(0, 2, 0, 2, ("127.0.0.1", 29500))
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = start._store(world, start.GroupOptions())
        assert not store.check([start.HUB_KEY])
        store.set(start.HUB_KEY, "port")
        assert store.check([start.HUB_KEY])
