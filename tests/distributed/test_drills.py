"""kill -9 of one or of all ranks at random moments, most of them in a save: checkpoints are
complete, and the next start goes on from them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import drill_workers
import pytest
from stored import same_bits
from tiny_training import write_texts

from forked import ForkedPython


def drill(folder: Path, count: int, mode: str, axis: str, seed: int) -> None:
    write_texts(folder)
    process = ForkedPython(
        [drill_workers.__file__, folder, count, mode, axis, seed], stderr=subprocess.PIPE
    )
    try:
        _, err = process.communicate(timeout=60 + 20 * count)
    finally:
        process.kill()
    errors = "".join(file.read_text() for file in sorted(folder.glob(f"errors{count}.*")))
    assert process.returncode == 0, err + errors
    result = json.loads((folder / "result.json").read_text())
    assert result["statuses"] == result["whole"] == [0, 0], errors
    newest = [names[-1] if names else "step-00000000" for names in result["found"]]
    assert newest == sorted(newest)
    assert len(set(newest)) > len(newest) / 2
    # the oldest is deleted when the newest has its name
    assert all(len(names) <= 3 + 1 for names in result["found"])
    ends = [
        folder / run / "checkpoints" / f"step-{result['end']:08d}" for run in ("run", "undisturbed")
    ]
    assert same_bits(*ends)
    assert not list((folder / "run" / "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize(
    ("mode", "axis"),
    [pytest.param("synchronous", "pp", marks=pytest.mark.grid), ("asynchronous", "ep")],
)
def test_a_killed_run_goes_on_from_a_complete_checkpoint(
    mode: str, axis: str, tmp_path: Path
) -> None:
    drill(tmp_path / "drill", 4, mode, axis, seed=1)


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("axis", ["pp", "ep"])
def test_thirty_killed_runs_go_on_from_a_complete_checkpoint(
    mode: str, axis: str, tmp_path: Path
) -> None:
    drill(tmp_path / "drill", 30, mode, axis, seed=2)
