"""Output that cannot be written ends no run: units of the streams, and runs whose standard output
is on a full disk or a lost terminal."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forked import ForkedPython, fresh_python
from lather.checkpoint.folder import list_checkpoints, step_of
from lather.cli import main
from lather.files import read_rows
from lather.output import SurvivingStream, surviving_output
from lather.train.metrics import MetricsWriter, Row, StepRow
from reaper import reaped
from tiny_run import command, write_config


class Disk(io.StringIO):
    """A stream on a disk that can be full."""

    def __init__(self, error: int = errno.ENOSPC) -> None:
        super().__init__()
        self.error, self.is_full = error, False

    def flush(self) -> None:
        if self.is_full:
            raise OSError(self.error, os.strerror(self.error))

    def write(self, text: str) -> int:
        self.flush()
        return super().write(text)


@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG], ids=errno.errorcode.get
)
def test_a_full_stream_is_reported_on_the_other_once_and_written_again_when_possible(
    error: int,
) -> None:
    out, err = Disk(error), Disk()
    stream = SurvivingStream(out, "standard output", err)
    print("first", file=stream, flush=True)
    out.is_full = True
    for _ in range(3):
        print("lost", file=stream, flush=True)
    out.is_full = False
    print("later", file=stream, flush=True)
    assert out.getvalue() == "first\nlater\n"
    assert (
        err.getvalue()
        == f"lather: standard output cannot be written ({os.strerror(error)}): the run goes on\n"
    )


def test_a_closed_pipe_is_discarded_in_silence() -> None:
    receiver, sender = os.pipe()
    os.close(receiver)
    err = Disk()
    with open(sender, "w") as pipe:
        stream = SurvivingStream(pipe, "standard output", err)
        for _ in range(3):
            print("lost", file=stream, flush=True)
    assert err.getvalue() == ""


def test_blocks_may_lie_in_each_other() -> None:
    before = sys.stdout
    with surviving_output():
        inside = sys.stdout
        with surviving_output():
            assert sys.stdout is inside
    assert sys.stdout is before


ALONE = ("--log.sample-tokens", "0", "--train.steps", "3", "--checkpoint.every", "2")


@pytest.mark.parametrize("streams", ["output", "both"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_log_is_on_a_full_disk_trains_to_its_end(
    tmp_path: Path, ranks: int, streams: str
) -> None:
    config, run_dir = write_config(tmp_path), tmp_path / "run"
    arguments = ["-m", "lather", "train", config, "--run-dir", run_dir, *ALONE, "--nproc", ranks]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open("/dev/full", "w") as full:
        err = full if streams == "both" else subprocess.PIPE
        process = reaped(ForkedPython(arguments, env=environment, stdout=full, stderr=err))
        try:
            error = process.communicate(timeout=120)[1]
        finally:
            process.kill()
    assert process.returncode == 0, error
    assert (
        streams == "both"
        or error
        == "lather: standard output cannot be written (No space left on device): the run goes on\n"
    )
    assert [step_of(path) for path in list_checkpoints(run_dir / "checkpoints")] == [2, 3]
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]


def test_python_ends_with_the_runs_status_and_closed_streams_are_none(tmp_path: Path) -> None:
    """A real process: Python writes its buffers when it ends, and would end with 120."""
    arguments = command("train", write_config(tmp_path), "--run-dir", tmp_path / "run", *ALONE)
    for streams, option, status in (
        ("> /dev/full 2>&-", "--train.steps", 0),
        ("> /dev/full 2>&1", "--train.stepz", 2),
    ):
        shell = ["bash", "-c", f'exec "$0" "$@" {streams}', *arguments, option, "3"]
        assert subprocess.run(shell, timeout=120, check=False).returncode == status


def test_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    """The bar is drawn on a terminal that is closed after the first step; the process is in another
    session, as with setsid."""
    config, (controller, terminal) = write_config(tmp_path), os.openpty()
    arguments = ["-m", "lather", "train", config, "--run-dir", tmp_path / "run", *ALONE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    process = reaped(
        fresh_python(
            arguments, env=environment, stdout=terminal, stderr=terminal, start_new_session=True
        )
    )
    os.close(terminal)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while b"training" not in os.read(controller, 4096):
                pass
        os.close(controller)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert process.wait(120) == 0
    finally:
        process.kill()
        watcher.join()
    assert (tmp_path / "run/checkpoints/step-00000003").exists()


def test_metrics_that_cannot_be_written_end_the_run_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = MetricsWriter.write

    def full(self: MetricsWriter, row: Row) -> None:
        if isinstance(row, StepRow) and row.step == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        write(self, row)

    monkeypatch.setattr(MetricsWriter, "write", full)
    config = write_config(tmp_path)
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 1
    out, err = capsys.readouterr()
    assert "step-00000003, but not all metrics" in out
    assert len(err.splitlines()) == 1
    assert "run/metrics.jsonl cannot be written (No space left on device" in err
    assert (tmp_path / "run/checkpoints/step-00000003").exists()
    monkeypatch.undo()
    assert main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 0
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, *range(4, 13)]


@pytest.mark.parametrize("name", ["sample.txt", "loss.png", "report.html"])
def test_a_picture_that_cannot_be_written_is_told(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run_dir = write_config(tmp_path, steps=2), tmp_path / "run"
    arguments = ["train", str(config), "--run-dir", str(run_dir), "--log.picture"]
    assert main([*arguments, "--train.steps", "1"]) == 0
    (run_dir / name).unlink()
    (run_dir / name).mkdir()  # a folder of that name is in the way of a file
    assert main(arguments) == 0
    assert f"{name} cannot be written" in capsys.readouterr().out
    assert (run_dir / "checkpoints/step-00000002").exists()
