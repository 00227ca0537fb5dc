"""Requests that a run obeys while it trains: a checkpoint, an end, and the wall-clock limit of a
launch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from changing_runs import Shown
from forked import ForkedPython, fresh_python
from lather.checkpoint.folder import list_checkpoints, step_of
from lather.cli import main
from lather.commands.train import read_arguments
from lather.files import read_rows
from lather.parallel.launch.requests import Requests, receiving_signals, stop_signals
from lather.train.loop import train
from lather.train.requests import RunRequests, TimeLimit
from reaper import reaped
from tiny_run import write_config

SECONDS = 120
LONG = (
    *("--train.steps", "100000", "--train.validation-every", "0"),
    *("--checkpoint.every", "100000", "--checkpoint.keep-last", "9"),
)


def steps(run_dir: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run_dir / "checkpoints")]


def wait_until(what: str, met: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not met():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def has_trained(run_dir: Path) -> bool:
    file = run_dir / "metrics.jsonl"
    return file.exists() and '"loss"' in file.read_text()


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def held_by(pid: int) -> set[int]:
    """Read which signals a process holds back."""
    status = Path(f"/proc/{pid}/status").read_text()
    bits = int(status.partition("SigBlk:")[2].split()[0], 16)
    return {number for number in range(1, 65) if bits >> number - 1 & 1}


def test_requests_are_told_apart() -> None:
    asked = Requests()
    with stop_signals(asked.add), receiving_signals():
        signal.raise_signal(signal.SIGUSR1)
        assert (asked.stop, asked.save > 0) == (None, True)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGTERM)
        assert asked.stop == signal.SIGUSR2


def test_a_signal_that_was_held_back_is_received() -> None:
    asked = Requests()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        with stop_signals(asked.add):
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
            assert asked.stop is None
            with receiving_signals():
                assert asked.stop == signal.SIGUSR2
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(lambda number: pytest.fail("nohup")):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_request_of_many_ranks_saves_once(tmp_path: Path) -> None:
    """The same request arrives at each step, as from ranks that received the signal a moment later;
    then there is another one."""
    config, _ = read_arguments(
        [str(write_config(tmp_path, steps=6)), "--run-dir", str(tmp_path / "run")]
    )
    shown, calls, start = Shown(), [0], time.monotonic()

    def save() -> float:
        calls[0] += 1
        return 0.0 if calls[0] < 3 else start if calls[0] < 5 else start + 1e4

    train(config, shown, RunRequests(save=save))
    notes = [note for note in shown.notes if "SIGUSR1" in note]
    assert [note.split(":")[0] for note in notes][:2] == ["step 2", "step 4"]


@pytest.mark.parametrize(
    ("ranks", "whom"), [(1, "the command"), (2, "the command"), (2, "one rank"), (2, "all")]
)
def test_signals_save_and_end(tmp_path: Path, ranks: int, whom: str) -> None:
    config, run_dir = write_config(tmp_path), tmp_path / "run"
    arguments = ["-m", "lather", "train", config, "--run-dir", run_dir, *LONG, "--nproc", ranks]
    pipe = subprocess.PIPE
    process = reaped(
        ForkedPython(arguments, env=environment(), stdout=pipe, stderr=pipe, start_new_session=True)
    )
    try:
        wait_until("a step", lambda: has_trained(run_dir) or process.poll() is not None)
        workers = children_of(process.pid)

        def send(number: signal.Signals) -> None:
            if whom == "all":
                os.killpg(process.pid, number)
            else:
                os.kill(workers[-1] if whom == "one rank" else process.pid, number)

        send(signal.SIGUSR1)
        wait_until("a checkpoint", lambda: steps(run_dir) or process.poll() is not None)
        time.sleep(0.2)
        assert len(steps(run_dir)) == 1
        send(signal.SIGUSR2)
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    first, last = steps(run_dir)
    assert f"step {first}: SIGUSR1 saves" in out
    assert f"stopped at step {last}; saved" in out
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row] == list(
        range(1, last + 1)
    )


def as_srun_sets(num_tasks: int) -> list[dict[str, str]]:
    """Return the variables of the tasks of a step on several machines, all of which are this
    one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    step = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": str(num_tasks),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_tasks})",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_LOCALID": "0",
        "MASTER_PORT": str(port),
    }
    return [{**step, "SLURM_PROCID": str(task)} for task in range(num_tasks)]


def test_signals_that_slurm_sends_to_all_tasks_save_once_and_end(tmp_path: Path) -> None:
    """Two machines have a task each, as `srun` starts them: no launcher passes signals on."""
    config, run_dir = write_config(tmp_path), tmp_path / "run"
    arguments = ["-m", "lather", "train", config, "--run-dir", run_dir, *LONG]
    pipe = subprocess.PIPE
    processes = [
        reaped(ForkedPython(arguments, env=environment() | task, stdout=pipe, stderr=pipe))
        for task in as_srun_sets(2)
    ]

    def ended() -> bool:
        return any(process.poll() is not None for process in processes)

    try:
        wait_until("a step", lambda: has_trained(run_dir) or ended())
        for process in processes:
            process.send_signal(signal.SIGUSR1)
        wait_until("a checkpoint", lambda: steps(run_dir) or ended())
        time.sleep(0.2)
        assert len(steps(run_dir)) == 1
        for process in processes:
            process.send_signal(signal.SIGUSR2)
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    first, last = steps(run_dir)
    assert f"step {first}: SIGUSR1 saves" in outputs[0][0]
    assert f"stopped at step {last}; saved" in outputs[0][0]
    assert outputs[1] == ("", "")


def test_signals_while_it_starts_end_nothing(tmp_path: Path) -> None:
    """A real process, which gets them while it imports torch: it has nothing to save yet, and ends
    as asked once it could."""
    config, run_dir = write_config(tmp_path), tmp_path / "run"
    arguments = ["-m", "lather", "train", config, "--run-dir", run_dir, *LONG]
    process = reaped(fresh_python(arguments, env=environment(), stdout=subprocess.PIPE))
    try:
        wait_until(
            "its first line",
            lambda: signal.SIGUSR2 in held_by(process.pid) or process.poll() is not None,
        )
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
        out, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "stopped at step" in out


def test_the_limit_leaves_room_for_a_step_and_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = TimeLimit(1.0, 100.0, checkpoint_bytes=int(5e8))  # 5 s by the estimate
    assert not limit.is_reached(0.0)
    limit.count_step(50.0)  # the first one compiles
    now[0] = 104.9
    assert not limit.is_reached(0.0)
    now[0] = 105.1
    assert limit.is_reached(0.0)
    for seconds in (3.0, 2.0):
        limit.count_step(seconds)
    for save, end in ((0.0, 152.0), (10.0, 147.0)):
        for now[0] in (end - 0.1, end + 0.1):
            assert limit.is_reached(save) is (now[0] > end)
    now[0] = 1e6
    assert not TimeLimit(0.0, 100.0, 0).is_reached(9.0)


def test_minutes_end_a_launch_with_a_checkpoint_and_the_next_has_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", str(write_config(tmp_path)), "--run-dir", str(run_dir), *LONG]
    assert main([*arguments, "--train.minutes", "0.02"]) == 0
    out = capsys.readouterr().out
    (done,) = steps(run_dir)
    why = "because the 0.02 minutes of train.minutes are nearly over"
    assert f"stopped at step {done} {why}; saved" in out
    assert "the same command resumes from there" in out
    assert main(["train", str(run_dir), "--train.steps", str(done + 2)]) == 0
    assert steps(run_dir)[-1] == done + 2
