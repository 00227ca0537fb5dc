"""A run that is ended at any moment, by any signal, reaches the very end that the uninterrupted run
reaches."""

import contextlib
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lather.checkpoint.folder import list_checkpoints
from tiny_run import last_weights, run, start, timeless_rows, write_config

STEPS = 60
HELD_STEPS = """
import os, signal, sys, time
from lather.cli import main
from lather.train import loop

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

def held(run, step=loop._TrainingRun._train_step, seconds=float(sys.argv.pop(1))):
    os.write(1, b"held")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)  # a signal just before a long sleep would be handled after it
    step(run)

loop._TrainingRun._train_step = held
sys.exit(main(sys.argv[1:]))
"""
"""Program that runs a command whose steps take the seconds of its first argument longer."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The configuration, and a run of it without interruption, which averages its weights."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config, run_dir = write_config(folder, steps=STEPS, checkpoint_every=1), folder / "run"
    text = config.read_text().replace("[train]\n", "[train]\naverage_timescale = 0.3\n")
    config.write_text(text)
    status, out, err = run("train", config, "--run-dir", run_dir)
    assert status == 0, out + err
    assert any("average" in name for name in last_weights(run_dir))
    return config, run_dir


def rows_written(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def kill_somewhere(process: subprocess.Popen[str], run_dir: Path, chance: random.Random) -> bool:
    """Kill -9 the process, sometimes while it starts, mostly a little after a random number of
    further steps; returns whether it was still alive."""
    if chance.random() < 0.2:
        time.sleep(chance.uniform(0.0, 0.4))
    else:
        target, deadline = rows_written(run_dir) + chance.randint(1, 8), time.monotonic() + 60
        while rows_written(run_dir) < target and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.03))
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def finish(config: Path, run_dir: Path, expected: Path) -> str:
    """Resume the run to its end, which must be the expected end; return what is printed."""
    status, out, err = run("train", config, "--run-dir", run_dir)
    assert status == 0, out + err
    assert timeless_rows(run_dir) == timeless_rows(expected)
    assert last_weights(run_dir) == last_weights(expected)
    return out


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(1, 8))]
)
def test_killed_five_times_at_random_moments(
    uninterrupted: tuple[Path, Path], tmp_path: Path, seed: int
) -> None:
    """The run saves at every step, so that many of the kills hit a save."""
    config, expected = uninterrupted
    run_dir = tmp_path / "run"
    chance = random.Random(seed)
    killed = [
        kill_somewhere(start("train", config, "--run-dir", run_dir), run_dir, chance)
        for _ in range(5)
    ]
    assert sum(killed) >= 4  # on a fast machine one run may have ended before its kill
    finish(config, run_dir, expected)


@pytest.mark.parametrize(("number", "expected_status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_cleanly(
    uninterrupted: tuple[Path, Path], tmp_path: Path, number: signal.Signals, expected_status: int
) -> None:
    config, expected = uninterrupted
    run_dir = tmp_path / "run"
    process = start("train", config, "--run-dir", run_dir, "--checkpoint.every", 1000)
    while rows_written(run_dir) < 5 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == expected_status, out + err
    (checkpoint,) = list_checkpoints(run_dir / "checkpoints")
    assert f"saved {checkpoint}" in out
    assert 0 < int(checkpoint.name.removeprefix("step-")) < STEPS
    assert f"resuming {checkpoint}" in finish(config, run_dir, expected)


def test_ctrl_c_on_a_terminal_says_what_happens_and_what_a_second_one_does(
    uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    config, _ = uninterrupted
    out = []
    for times, seconds in ((1, 0.3), (2, 60)):
        run_dir = tmp_path / f"run-{times}"
        ours, theirs = pty.openpty()
        command = (sys.executable, "-c", HELD_STEPS, seconds, "train", config, "--run-dir", run_dir)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        process = subprocess.Popen(
            tuple(map(str, command)), stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        read, sent = b"", 0
        try:
            with contextlib.suppress(OSError):  # the process has ended
                while select.select([ours], [], [], 60)[0] and (piece := os.read(ours, 1 << 16)):
                    read += piece
                    if sent < times and (b"stopping: the step" if sent else b"held") in read:
                        process.send_signal(signal.SIGINT)
                        sent += 1
            assert process.wait(60) == 130, read.decode()
        finally:
            process.kill()
            os.close(ours)
        out.append(read.decode())
    assert "Ctrl-C again ends at once" in out[0]
    assert "stopped at step" in out[0]
    assert "lather: ended at once, not saved" not in out[0]
    assert "lather: ended at once, not saved; the last checkpoint, if any, can be resumed" in out[1]
    assert "stopped at step" not in out[1]


def test_sigterm_before_the_first_step(uninterrupted: tuple[Path, Path], tmp_path: Path) -> None:
    config, expected = uninterrupted
    run_dir = tmp_path / "run"
    process = start("train", config, "--run-dir", run_dir)
    while not (run_dir / ".lock").exists() and process.poll() is None:
        time.sleep(0.001)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    finish(config, run_dir, expected)


def test_a_finished_run_started_again_shows_its_results_and_changes_nothing(
    uninterrupted: tuple[Path, Path],
) -> None:
    config, run_dir = uninterrupted
    before = {
        path: path.read_bytes()
        for path in run_dir.rglob("*")
        if path.is_file() and path.name not in ("loss.png", "report.html")
    }
    status, out, err = run("train", config, "--run-dir", run_dir)
    assert status == 0, err
    assert "validation loss" in out
    assert f"all {STEPS} steps are done; a larger --train.steps continues" in out
    assert "step 1/" not in out
    assert {path: path.read_bytes() for path in before} == before
