"""`lather train` as a user starts it: its own ranks or torchrun's, one report, and one process that
goes on from their checkpoints."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tiny_training import values_of, write_texts

from forked import ForkedPython, fresh_python
from lather.checkpoint.folder import list_checkpoints
from lather.files import read_rows
from reaper import reaped
from tiny_model import TINY

pytestmark = pytest.mark.timeout(600)  # a free machine needs a twentieth of this

SECONDS = 300
"""Seconds after which a command and its ranks are killed."""
CHANGES: dict[str, Any] = {
    "model": {**TINY, "aux_loss_alpha": 0.01, "tie_word_embeddings": True},
    "optim": {"lr": 1e-2, "schedule": "constant"},
    "train": {"steps": 3, "batch_size": 4, "validation_every": 0},
    "log": {"sample_tokens": 4, "picture": True},
}
LATHER = ["-m", "lather", "train", "tiny.toml"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *LATHER]
COMMANDS = {
    "two": [*LATHER, "--nproc", "2", "--parallel.pp", "2"],
    "torchrun": [*TORCHRUN, "--parallel.pp", "2"],
    "one": LATHER,
    "stopped": [*LATHER, "--nproc", "2", "--parallel.pp", "2", "--train.steps", "40"],
    "three": [*LATHER, "--nproc", "3", "--parallel.pp", "2"],
}
FRESH = ("stopped",)
"""Names of the commands that are started as a user would start them, besides torchrun's; the others
are forked."""
TOLERANCE = 1e-5
"""Relative rounding of fp32."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str
    run_dir: Path

    def validation_losses(self) -> list[float]:
        return [
            row["validation_loss"]
            for row in read_rows(self.run_dir / "metrics.jsonl")
            if "validation_loss" in row
        ]

    def rows(self) -> list[dict[str, object]]:
        return [row for row in read_rows(self.run_dir / "metrics.jsonl") if "loss" in row]


class Command:
    """`python ARGUMENTS --run_dir NAME` in `folder`, in a process group of its own."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.run_dir = folder / name
        self.is_torchrun = "torch.distributed.run" in arguments
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "TORCHELASTIC_", "COLUMNS"))
        }
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        options = {
            "env": environment,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
        }
        start = fresh_python if self.is_torchrun or name in FRESH else ForkedPython
        self.process = reaped(start([*arguments, "--run_dir", name], cwd=folder, **options))

    def end(self) -> Ended:
        try:
            out, err = self.process.communicate(timeout=SECONDS)
        finally:
            self.kill()
        return Ended(self.process.returncode, out, err, self.run_dir)

    def stop(self) -> None:
        """Send SIGTERM once the command trains."""
        deadline = time.monotonic() + SECONDS
        while (
            self.process.poll() is None
            and time.monotonic() < deadline
            and '"loss"' not in read(self.run_dir / "metrics.jsonl")
        ):
            time.sleep(0.01)
        self.process.terminate()

    def kill(self) -> None:
        """Kill at once; but torchrun gets time to end its ranks, which are no part of its process
        group: up to 30 s."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=40 if self.is_torchrun else 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    (folder / "tiny.toml").write_text(tomli_w.dumps(values_of(folder, "unused", CHANGES)))
    write_texts(folder)
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> Iterator[dict[str, Ended]]:
    """Start all commands at once, as most of their time is the start, and wait. They find one data
    set, or make it at the same time."""
    commands = {
        name: Command(folder, name.replace(" ", "_"), *arguments)
        for name, arguments in COMMANDS.items()
    }
    try:
        commands["stopped"].stop()
        yield {name: command.end() for name, command in commands.items()}
    finally:
        for command in commands.values():
            command.kill()


@pytest.mark.parametrize("name", ["two", "torchrun"])
def test_two_ranks_train_what_one_process_does(ended: dict[str, Ended], name: str) -> None:
    found, one = ended[name], ended["one"]
    assert (found.status, found.err) == (0, ""), found.err
    assert one.status == 0, one.err
    assert [path.name for path in list_checkpoints(found.run_dir / "checkpoints")] == [
        "step-00000003"
    ]
    assert found.validation_losses() == pytest.approx(one.validation_losses(), rel=TOLERANCE)
    # so that a rank that learns nothing is noticed
    assert one.validation_losses()[1] < one.validation_losses()[0] - 1e-2
    assert [row["step"] for row in found.rows()] == [1, 2, 3]
    for row, expected in zip(found.rows(), one.rows(), strict=True):
        assert row["tokens"] == expected["tokens"] == 4 * 16  # the tokens of all ranks
        for key in ("loss", "balance_loss", "grad_norm", "expert_load_max"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4), (row["step"], key)


@pytest.mark.parametrize("name", ["two", "torchrun"])
def test_one_rank_reports(ended: dict[str, Ended], name: str) -> None:
    """The ranks together show everything that one process shows, once."""

    def kinds(text: str) -> list[str]:
        # whichever process made the data prints these, and tests run beside other tests
        lines = [
            line
            for line in text.splitlines()
            if not line.startswith(("tokenizer:", "train:", "validation:", "waiting", "other"))
        ]
        return [line.split(":")[0].split(" ")[0] for line in lines]

    out = ended[name].out
    assert sorted(kinds(out)) == sorted([*kinds(ended["one"].out), "layers"])
    for once in (
        "2 ranks: 2 pipeline x 1 data x 1 expert",
        "layers by stage",
        "step 3/3",
        "--- sample",
        "before, ",
        "loss.png",
    ):
        assert out.count(once) == 1, out


def test_one_process_goes_on_from_what_two_ranks_left(
    ended: dict[str, Ended], folder: Path
) -> None:
    stopped = ended["stopped"]
    assert (stopped.status, stopped.err) == (0, ""), stopped.err
    *_, last = stopped.out.splitlines()
    (checkpoint,) = list_checkpoints(stopped.run_dir / "checkpoints")
    step = int(checkpoint.name[5:])
    assert step < 40
    assert last == (
        f"stopped at step {step}; saved "
        f"stopped/checkpoints/{checkpoint.name}; the same command resumes from there"
    )
    more = Command(folder, "stopped", *LATHER, "--train.steps", "40").end()
    assert (more.status, more.err) == (0, ""), more.err
    assert f"resuming stopped/checkpoints/{checkpoint.name}" in more.out
    assert [row["step"] for row in more.rows()] == list(range(1, 41))
    assert [path.name for path in list_checkpoints(more.run_dir / "checkpoints")] == [
        checkpoint.name,
        "step-00000040",
    ]
    before, after = more.validation_losses()
    assert after < before - 0.5


def test_ranks_that_the_mesh_does_not_divide_are_refused(ended: dict[str, Ended]) -> None:
    found = ended["three"]
    assert found.status == 2
    assert found.out == ""
    assert found.err.startswith(
        "lather: error: parallel.pp * parallel.ep = 2 * 1 = 2 does not divide the number of ranks, "
        "3: start 2 ranks"
    )
    assert found.err.count("\n") == 1
    assert not found.run_dir.exists()


def test_of_ranks_that_another_launcher_started_one_says_what_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two have the variables that torchrun would give them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    commands = []
    for rank in ("0", "1"):
        for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        commands.append(
            Command(folder, "no_divisor", *LATHER, "--parallel.pp", "2", "--parallel.ep", "2")
        )
    ends = [command.end() for command in commands]
    assert [(found.status, found.out) for found in ends] == [(2, "")] * 2
    errors = "".join(found.err for found in ends)
    assert errors.count("\n") == errors.count("lather: error:") == 1, errors
    assert "= 4 does not divide the number of ranks, 2" in errors
    assert not ends[0].run_dir.exists()
