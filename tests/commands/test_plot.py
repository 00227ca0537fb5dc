"""`lather plot --schedule` of a run, and of the plain table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from lather.cli import main
from lather.train.plot import smoothed


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {
            "step": 3,
            "rank": rank,
            "action": f"{rank}{kind}0",
            "start": at + rank,
            "end": at + rank + 1,
        }
        for rank in (0, 1)
        for at, kind in enumerate("FB")
    ]
    (run / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_the_timeline_of_a_run_is_drawn(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--schedule", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'timeline.png'}\n"
    assert imread(run_dir / "timeline.png").shape[1] > 1000


def test_the_plain_table_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "plot --schedule --pp 2 --micro-batches"
    assert main([*command.split(), "5"]) == main([*command.split(), "6", "--out", "six.png"]) == 0
    assert capsys.readouterr().out == "schedule.png\nsix.png\n"
    assert (tmp_path / "schedule.png").read_bytes() != (tmp_path / "six.png").read_bytes()


@pytest.mark.parametrize("number", [1, 2, 3, 15, 21, 22, 300, 2000])
def test_the_smoothed_line_does_not_lag(number: int) -> None:
    """A straight line comes back unchanged, with its ends; the line of a decay stays close to it;
    and noise is at least halved."""
    steps = np.arange(number, dtype=np.float64)
    np.testing.assert_allclose(smoothed(3 - 0.1 * steps), 3 - 0.1 * steps, atol=1e-9)
    decay = 2 + 5 * np.exp(-steps / max(25, number / 8))
    assert np.abs(smoothed(decay) - decay).max() < 0.08
    if number >= 300:
        noise = np.random.default_rng(0).normal(size=number)
        assert smoothed(noise)[20:].std() < 0.5
        assert abs(smoothed(noise)[-1]) < 1


def test_the_smoothed_line_turns_where_the_loss_does() -> None:
    step = np.repeat([4.0, 1.0], 100)
    crossing = np.flatnonzero(smoothed(step) < 2.5)[0]
    assert crossing == 100
    np.testing.assert_allclose(smoothed(step)[40:160], 5 - smoothed(step)[40:160][::-1], atol=1e-9)
