"""`lather bench gaps` on two ranks, as short as possible."""

import json
from pathlib import Path

import pytest

from benchmarks import gaps
from benchmarks.check import CheckError
from benchmarks.gaps import GapsBenchmark
from lather.errors import UserError


@pytest.mark.timeout(300)
def test_a_run_fills_gaps_and_checks_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        gaps.run(GapsBenchmark(hidden_size=64, sequence_length=64, rounds=5, runs=1, out=tmp_path))
        == 0
    )
    (row,) = (json.loads(line) for line in (tmp_path / "gaps-cpu.jsonl").read_text().splitlines())
    assert row["benchmark"] == "gaps"
    assert 0 < row["filled_share"] <= 1
    assert set(row["step_ms"]) == {"filled", "at once"}
    assert "of the idle time filled" in capsys.readouterr().out


def test_other_weights_are_not_reported() -> None:
    rank = {"filled": {"weights": [1.0], "ms": [1.0]}, "at once": {"weights": [1.5], "ms": [1.0]}}
    with pytest.raises(CheckError, match="differ"):
        gaps._row(GapsBenchmark(), [rank, rank])


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(UserError, match="--rounds = 4 is not valid"):
        GapsBenchmark(rounds=4)
