"""The command as a user meets it: help, overrides, results, and one clear line for everything that
can be put right."""

import contextlib
import errno
import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import fresh_python
from lather import __version__
from lather.checkpoint import save as checkpoint_save
from lather.cli import COMMANDS, USAGE, main
from lather.config.config import Config
from lather.config.fields import field_names
from lather.config.toml_file import config_to_toml, load_config
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.train.metrics import MetricsWriter, Row
from tiny_run import command, run, write_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Configuration, run directory and output of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder)
    options = ("--run-dir", folder / "run", "--optim.lr", "4e-3", "--log.picture")
    status, out, err = run("train", config, *options)
    assert status == 0, err
    return config, folder / "run", out


# --- train ----------------------------------------------------------------------------------------


def test_train_ends_with_losses_sample_and_paths_that_exist(
    trained: tuple[Path, Path, str],
) -> None:
    _, run_dir, out = trained
    lines = out.splitlines()
    assert any(line.startswith("step 12/12  loss") for line in lines)
    assert any("before" in line and "after 12 steps" in line for line in lines)
    assert any(line.startswith("--- sample") for line in lines)
    files = {
        "metrics": "metrics.jsonl",
        "picture": "loss.png",
        "report": "report.html",
        "checkpoint": "checkpoints/step-00000012",
    }
    for name, path in files.items():
        (shown,) = [line.split()[1] for line in lines if line.split()[:1] == [name]]
        assert Path(shown) == run_dir / path
        assert Path(shown).exists()
    sample = (run_dir / "sample.txt").read_text("utf-8")
    assert sample in out
    assert html.escape(sample) in (run_dir / "report.html").read_text("utf-8")


def test_metrics_have_every_step_and_validation(trained: tuple[Path, Path, str]) -> None:
    rows = [json.loads(line) for line in (trained[1] / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 5, 10, 12]
    step = rows[4]
    assert step["tokens"] == 64
    assert 0 < step["optimizer_seconds"] < step["step_seconds"]
    assert step["peak_memory_bytes"] > 10**7
    assert 0 <= step["expert_load_min"] <= 1 <= step["expert_load_max"] <= 4
    assert 0 < step["expert_load_entropy"] <= 1
    assert sum(row.get("refreshes_done", 0) for row in rows) > 0


def test_resolved_configuration_holds_every_field_and_the_override(
    trained: tuple[Path, Path, str],
) -> None:
    _, run_dir, _ = trained
    resolved = load_config(run_dir / "config.toml")
    assert resolved.optim.lr == 4e-3
    assert config_to_toml(resolved) == (run_dir / "config.toml").read_text()
    assert json.loads((run_dir / "provenance.json").read_text())["lather"] == __version__


def test_help_shows_every_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--help", "all"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    other_families = {name for name in field_names(Config) if name.startswith("model.")} - set(
        field_names(DeepseekV2Config, "model.")
    )
    for name in set(field_names(Config)) - other_families:
        assert f"--{name.replace('_', '-')}" in out
    assert "tokens" in out
    assert "Peak learning rate" in out


def test_general_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert "generate RUN" in out
    assert out.splitlines()[-1].startswith(f"lather {__version__} (")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_general_help_and_has_its_own(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"\n  {name} " in USAGE
    with contextlib.suppress(SystemExit):
        assert main([name, "--help"]) == 0
    assert f"usage: lather {name}" in capsys.readouterr().out


def test_steps_that_are_not_finite_stop_the_run_with_the_reason(
    trained: tuple[Path, Path, str], tmp_path: Path
) -> None:
    options = ["--optim.lr", "1e30", "--optim.warmup-steps", "0", "--train.max-skipped-steps", "3"]
    status, out, err = run("train", trained[0], "--run-dir", tmp_path, *options)
    assert status == 1, out
    assert len(err.splitlines()) == 1
    assert "3 steps in a row" in err
    assert "lower optim.lr" in err


# --- bad input ------------------------------------------------------------------------------------


def shard_of(folder: Path) -> Path:
    return next(folder.glob("data/*/train-00000-000.npy"))


def turn_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


STEP = "run/checkpoints/step-00000012"
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "train-00000-000.npy": (lambda folder: shard_of(folder).unlink(), "missing"),
    "train-00000-000.npy.": (lambda folder: shard_of(folder).write_bytes(b""), "empty"),
    "rank-00000.safetensors": (
        lambda folder: turn_bit(folder / STEP / "rank-00000.safetensors"),
        "checksum",
    ),
    "state.json": (lambda folder: turn_bit(folder / STEP / "state.json"), "damaged"),
}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.toml, its data, and its finished run."""
    folder = tmp_path_factory.mktemp("finished")
    assert main(["train", str(write_config(folder)), "--run-dir", str(folder / "run")]) == 0
    return folder


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_line_status_2_and_nothing_overwritten(
    case: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, what = DAMAGED[case]
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    for file in (folder / "tiny.toml", folder / "run" / "config.toml"):
        file.write_text(file.read_text().replace(str(finished), str(folder)))
    damage(folder)
    before = contents(folder)
    capsys.readouterr()
    assert main(["train", str(folder / "tiny.toml"), "--run-dir", str(folder / "run")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("lather: error: ")
    for words in (case.rstrip("."), what, "delete"):
        assert words in error
    after = contents(folder)
    assert {path: after[path] for path in before} == before
    assert {path.name for path in after.keys() - before.keys()} <= {".lock"}


def test_a_command_put_right_works_in_the_same_run_directory(
    finished: Path, tmp_path: Path
) -> None:
    config, run_dir = str(finished / "tiny.toml"), str(tmp_path / "run")
    assert main(["train", config, "--run-dir", run_dir, "--data.source", "nowhere"]) == 2
    assert not (tmp_path / "run").exists()
    assert main(["train", config, "--run-dir", run_dir]) == 0


def buffering(is_buffered: bool) -> dict[str, str]:
    """Return the environment of a process whose output is buffered, as it is by default, or not."""
    return os.environ | {"PYTHONUNBUFFERED": "" if is_buffered else "1"}


buffered_or_not = pytest.mark.parametrize("is_buffered", [True, False])


@buffered_or_not
def test_a_reader_that_leaves_early_does_not_end_the_run(
    finished: Path, tmp_path: Path, is_buffered: bool
) -> None:
    words = command("train", finished / "tiny.toml", "--run-dir", tmp_path / "run")[1:]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = fresh_python(words, env=buffering(is_buffered), **pipes)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0, process.stderr.read()
    assert process.stderr.read() == ""
    assert (tmp_path / "run/checkpoints/step-00000012").exists()


@buffered_or_not
def test_a_reader_that_never_reads_gets_no_error_either(is_buffered: bool) -> None:
    receiver, sender = os.pipe()
    os.close(receiver)
    process = fresh_python(
        ["-m", "lather", "--help"],
        env=buffering(is_buffered),
        stdout=sender,
        stderr=subprocess.PIPE,
    )
    os.close(sender)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENOSPC, r"No space left on device: [\d,]+ bytes are free there\): make room, "),
        (errno.EFBIG, r"File too large\): raise the limit on the size of a file \(ulimit -f, "),
        (errno.EROFS, r"Read-only file system\): make the disk writable, "),
        (errno.EIO, r"Input/output error\): check the disk, "),
    ],
)
def test_a_failing_disk_is_one_line_and_leaves_no_debris(
    number: int,
    why: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint_save, "write_safetensors", full)
    assert main(["train", str(finished / "tiny.toml"), "--run-dir", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(rf"/run/checkpoints cannot be written \({why}.*then start again$", error)
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


def test_a_file_that_may_not_be_written_is_one_line(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(file: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(checkpoint_save, "write_safetensors", refuse)
    assert main(["train", str(finished / "tiny.toml"), "--run-dir", str(tmp_path / "run")]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"rank-00000.safetensors cannot be read or written \(Permission d.*owner", error
    )


def test_a_run_whose_checkpoints_cannot_be_listed_does_not_begin_again(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics stay as they are."""
    listed, run_dir = os.listdir, finished / "run"

    def refuse(path: str | os.PathLike[str]) -> list[str]:
        if Path(path).name == "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    before = (run_dir / "metrics.jsonl").read_text()
    monkeypatch.setattr(os, "listdir", refuse)
    assert main(["train", str(run_dir), "--train.steps", "14"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{run_dir / 'checkpoints'} cannot be read" in error
    assert (run_dir / "metrics.jsonl").read_text() == before


def test_a_run_saves_nothing_into_the_folder_of_another(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder was moved away while a process trained there, and another run is in its place."""
    run_dir, written = tmp_path / "run", MetricsWriter.write

    def replace_folder(writer: MetricsWriter, row: Row) -> None:
        if not (tmp_path / "moved").exists():
            run_dir.rename(tmp_path / "moved")
            shutil.copytree(finished / "run", run_dir)
        written(writer, row)

    monkeypatch.setattr(MetricsWriter, "write", replace_folder)
    assert main(["train", str(finished / "tiny.toml"), "--run-dir", str(run_dir)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "was deleted or moved while this process trained there" in error
    assert [*contents(run_dir).values()] == [*contents(finished / "run").values()]


def test_errors_reach_the_shell(tmp_path: Path) -> None:
    """The process is a real one, not a fork."""
    words = command("train", tmp_path / "nowhere.toml")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lather: error: ")
