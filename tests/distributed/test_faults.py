"""Fault drills on real training: wherever a rank dies, the job ends in seconds, names the rank, and
leaves whole checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fault_workers
import pytest
import torch
from jobs import SECONDS, Job, is_alive
from tiny_training import write_texts

from forked import ForkedPython
from lather.checkpoint.folder import list_checkpoints
from lather.checkpoint.reader import load_checkpoint
from lather.checkpoint.state import TrainingState
from lather.models.families import build_model

LOST = "ArithmeticError: rank one has lost count"
RAISED = {
    "raise": LOST,
    "save": LOST,
    "save beside": LOST,
    "shape": "ValueError: the batch's inputs have shape (2, 7), not (2, 8): ",
}
"""The places where rank 1 raises, and how its last line then begins; at the other places it is
killed."""


STUCK = {
    "stuck": "is in step 3, action 2F0, fault_workers.py, line ",
    "standstill": "is in step 3, action 2F0, fault_workers.py, line ",
    "paused": "does not answer, and the others have waited for it longer than parallel.timeout",
}
"""The places where rank 1 makes no progress, and what is said of it."""
IN_THE_GRID = ("save beside", "forward")
PLACES = [
    pytest.param(place, marks=[pytest.mark.grid] * (place in IN_THE_GRID))
    for place in fault_workers.PLACES
]


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Job]]:
    """Start all jobs that the selected tests ask for at once, as most of their time is the
    start."""
    folder = tmp_path_factory.mktemp("faults")
    asked = [
        item.callspec.params["place"] for item in request.session.items if item.path == request.path
    ]  # type: ignore[attr-defined]
    jobs = {}
    for place in asked:
        jobs[place] = Job.start(
            fault_workers.__file__, folder / place, place, 2, python=ForkedPython
        )
        write_texts(folder / place)
    yield jobs
    for job in jobs.values():
        job.kill()


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_ends_the_job_and_checkpoints_stay_whole(
    jobs: dict[str, Job], place: str
) -> None:
    job = jobs[place]
    pids = job.pids()
    (process,) = job.processes
    _, err = process.communicate(timeout=150)
    assert process.returncode == 1, err
    failed, ended = (float((job.folder / name).read_text()) for name in ("failed", "ended"))
    wait = {"standstill": fault_workers.PATIENCE}.get(place, fault_workers.WAIT * (place in STUCK))
    assert wait < ended - failed < wait + SECONDS
    assert not any(is_alive(pid) for pid in pids)
    if place in RAISED:
        assert err.startswith("lather: stopped: rank 1 failed:\nTraceback"), err
        assert err.rstrip().splitlines()[-1].startswith(RAISED[place]), err
    elif place in STUCK:
        assert err.startswith(f"lather: stopped: rank 1 {STUCK[place]}"), err
        assert ("have waited for it for 15 s" in err) == (place == "standstill"), err
        assert "rank 0" not in err
    else:
        assert "rank 1" in err, err
        assert "SIGKILL" in err, err
    assert err.count("Traceback") == (place in RAISED), err
    config = fault_workers.config_of(job.folder, place)
    checkpoints = list_checkpoints(Path(config.run_dir) / "checkpoints")
    assert [checkpoint.name for checkpoint in checkpoints] == ["step-00000001", "step-00000002"]
    for checkpoint in checkpoints:
        model = build_model(config.model, torch.Generator().manual_seed(1))
        assert load_checkpoint(checkpoint, TrainingState.of_model(model)).step == int(
            checkpoint.name[5:]
        )
