"""A study of real, tiny runs: processes make them, are killed in the middle and resume; its rows,
tables, picture and costs."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.convergence.queue import read_rows
from forked import ForkedPython
from tiny_run import CONFIG, command, write_config

STUDY = """\
name = "tiny"
seeds = [1, 2]

[settings.small]

[contestants.muon]
optim = {{ name = "muon" }}
train = {{ average_timescale = 0.3 }}
rates = {{ small = [1e-2, 2e-2] }}

[contestants.muon-averaged]
optim = {{ name = "muon" }}
train = {{ average_timescale = 0.3 }}
weights = "average"
rates = {{ small = [1e-2, 2e-2] }}

[contestants.lion]
optim = {{ name = "beside:Lion" }}
rates = {{ small = [1e-3, 2e-2] }}

"""


def write_study(folder: Path, *, steps: int, more: str = "") -> Path:
    write_config(folder)
    text = CONFIG.format(
        corpus=folder / "corpus", cache=folder / "data", steps=steps, checkpoint_every=2
    )
    text = text.replace("precondition_frequency = 3\n", "").replace(
        "sample_tokens = 4", "sample_tokens = 0"
    )
    for section in ("model", "data", "optim", "train", "checkpoint", "log"):
        text = text.replace(f"[{section}]", f"[config.{section}]")
    (folder / "beside.py").write_text((Path(__file__).parents[1] / "lion_rule.py").read_text())
    study = folder / "study.toml"
    study.write_text(STUDY.replace("{{", "{").replace("}}", "}") + more + text)
    return study


def lather(*arguments: object) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def start(*arguments: object, **options: Any) -> ForkedPython:
    return ForkedPython(
        command("bench", "convergence", *arguments)[1:],
        env={**os.environ, "COLUMNS": "400"},
        **options,
    )


def numbers(out: Path) -> dict[str, Any]:
    """The numbers of a row that come from the training alone."""
    rows = read_rows(out / "rows.jsonl")
    return {
        key: (
            row["setting"],
            row["contestant"],
            row["seed"],
            row["final"],
            row["validation"],
            row["training"],
        )
        for key, row in rows.items()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A study, the folder of its rows, and what the command printed."""
    folder = tmp_path_factory.mktemp("study")
    study = write_study(folder, steps=8)
    done = lather("run", study, "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    return study, folder / "out", done.stdout


def test_rows_curves_and_tables(finished: tuple[Path, Path, str]) -> None:
    study, out, printed = finished
    rows = list(read_rows(out / "rows.jsonl").values())
    assert sorted((row["contestant"], row["seed"]) for row in rows) == [
        ("lion", 1),
        ("lion", 2),
        ("muon", 1),
        ("muon", 2),
    ]
    for row in rows:
        assert row["validation"][-1] == [8, row["final"]]
        assert [step for step, _ in row["validation"]] == [0, 5, 8]
        assert [step for step, _ in row["training"]] == list(range(1, 9))
        assert row["tokens_per_step"] == 64
        assert 0 < row["optimizer_seconds"] < row["seconds"]
        assert row.keys() >= {"commit", "dirty", "hardware", "versions", "study", "optim", "rates"}
    assert "| `muon` | 0.01 / 0.02 |" in printed
    averages = [row["average_validation"][-1][1] for row in rows if row["contestant"] == "muon"]
    assert f"| `muon-averaged` | 0.01 / 0.02 | {statistics.mean(averages):.3f} " in printed
    assert (out / "curves.png").stat().st_size > 10_000
    assert not list((out / "runs").iterdir())
    again = lather("report", study, "--out", out)
    assert again.stdout.strip() in printed


def test_a_finished_study_runs_nothing(finished: tuple[Path, Path, str]) -> None:
    study, out, _ = finished
    before = (out / "rows.jsonl").read_bytes()
    assert lather("run", study, "--out", out).returncode == 0
    assert (out / "rows.jsonl").read_bytes() == before


def test_a_run_that_ended_while_the_queue_was_stopped_is_not_made_again(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    study, out, _ = finished
    for key, row in read_rows(out / "rows.jsonl").items():
        place = tmp_path / "runs" / key
        place.mkdir(parents=True)
        (place / "row.json").write_text(json.dumps({**row, "final": 1.5}))
    assert lather("run", study, "--out", tmp_path).returncode == 0
    assert {row["final"] for row in read_rows(tmp_path / "rows.jsonl").values()} == {1.5}


def test_killed_at_any_moment_it_goes_on_to_the_same_rows(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """Parent and children are killed with -9 again and again, and the last row is torn."""
    study, whole, _ = finished
    out = tmp_path / "out"
    for seconds in (1.0, 1.5):
        process = start(
            "run",
            study,
            "--out",
            out,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(seconds)
        # on a fast machine the process may have ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if (out / "rows.jsonl").exists():
            with (out / "rows.jsonl").open("a") as file:
                file.write('{"key": "torn')
    assert lather("run", study, "--out", out).returncode == 0
    assert numbers(out) == numbers(whole)


def test_children_of_a_killed_parent_end(tmp_path: Path) -> None:
    study, out = write_study(tmp_path, steps=100_000), tmp_path / "out"
    process = start("run", study, "--out", out, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_for(
            lambda: (
                len(list((out / "runs").glob("*/run/metrics.jsonl"))) == 2
                if (out / "runs").exists()
                else False
            )
        )
        process.kill()
        process.wait()
        _wait_for(lambda: not _alive_in_group(process.pid))
    finally:
        if _alive_in_group(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    assert list((out / "runs").glob("*/run/checkpoints/*"))


def test_minutes_and_sigterm_leave_a_study_that_goes_on(tmp_path: Path) -> None:
    study, out = write_study(tmp_path, steps=100_000), tmp_path / "out"
    done = lather("run", study, "--out", out, "--minutes", "0.05")
    assert done.returncode == 2, done.stdout  # nothing is finished, so there is nothing to report
    assert "no run is finished yet" in done.stderr
    assert len(list((out / "runs").glob("*/run/checkpoints/*"))) >= 2


def test_costs(finished: tuple[Path, Path, str]) -> None:
    study, out, _ = finished
    done = lather("cost", study, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = {
        row["contestant"]: row
        for row in map(json.loads, (out / "costs.jsonl").read_text().splitlines())
    }
    assert rows.keys() == {"muon", "muon-averaged", "lion"}
    for row in rows.values():
        assert (
            0
            < row["optimizer_ms"]["p20"]
            <= row["optimizer_ms"]["median"]
            <= row["optimizer_ms"]["p80"]
        )
        assert row["gradient_ms"]["median"] > 0
        assert 4 * row["parameters"] <= row["state_bytes"] < 9 * row["parameters"]
    printed = lather("report", study, "--out", out).stdout
    assert "seconds to it" in printed


def test_a_run_that_fails_twice_stops_the_study_with_its_error(tmp_path: Path) -> None:
    study = write_study(tmp_path, steps=4)
    beside = tmp_path / "beside.py"
    beside.write_text(
        beside.read_text().replace(
            "u = m.lerp", "raise RuntimeError('a broken rule')\n        u = m.lerp"
        )
    )
    done = lather("run", study, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "failed twice" in done.stderr
    assert "a broken rule" in done.stderr


def _wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def _alive_in_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
