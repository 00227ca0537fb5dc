"""The trackers with the real libraries: Weights & Biases offline, and MLflow with a folder as
store."""

import contextlib
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integrations
wandb = pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")

from google.protobuf.message import DecodeError
from wandb.proto.wandb_internal_pb2 import Record

from lather.config.changes import values_of
from lather.config.config import Config
from lather.config.records import LogConfig
from lather.files import read_rows
from lather.train.metrics import MetricsWriter

CONFIGURATION = values_of(Config(data=Config().data)) | {"data.path": ["x" * 9000]}
ROWS: list[dict[str, Any]] = [
    {"step": 0, "validation_loss": 2.5, "validation_losses": {"a b": 2.5, "c": None}},
    {"step": 1, "loss": 2.0, "grad_norm": None, "skipped": False},
    {"step": 1, "expert_load": [[0.5, 1.5], [2.0, 0.0]]},
    {"step": 2, "loss": 1.0, "grad_norm": 0.5, "skipped": False},
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take nothing from the environment, and send nothing."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")


def record(
    run_dir: Path, rows: list[dict[str, Any]], resume_step: int | None = None, **log: Any
) -> list[str]:
    """Write the rows; return the notes."""
    notes: list[str] = []
    run_dir.mkdir(exist_ok=True)
    writer = MetricsWriter(run_dir, resume_step, LogConfig(**log), CONFIGURATION, notes.append)
    for row in rows:
        writer.write(row)  # type: ignore[arg-type]
    writer.close()
    return notes


def offline_messages(content: bytes) -> Iterator[bytes]:
    """Split the file of an offline run, which is a log of LevelDB after seven bytes: blocks of 32
    KiB with pieces of (checksum, length, kind), where kinds 1 and 4 end a message."""
    at, message = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield message
            message = b""


def records_of(file: Path) -> list[Any]:
    """Read the records of an offline run, which wandb's service writes a moment after the run's
    end; the last one is that of the exit."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(DecodeError):  # the last message is being written
            records = [
                Record.FromString(content) for content in offline_messages(file.read_bytes())
            ]
            if records and records[-1].WhichOneof("record_type") == "exit":
                return records
        time.sleep(0.02)
    raise TimeoutError(f"{file} was not completed")


def offline_record(folder: Path) -> tuple[Any, dict[int, dict[str, str]]]:
    """Read the file of an offline run: its description, and JSON texts by step and name."""
    (file,) = folder.glob("*.wandb")
    run, history = None, dict[int, dict[str, str]]()
    for message in records_of(file):
        if message.WhichOneof("record_type") == "run":
            run = message.run
        elif message.WhichOneof("record_type") == "history":
            items = message.history.item
            named = {item.key or "/".join(item.nested_key): item.value_json for item in items}
            history[int(named["_step"])] = named
    return run, history


def test_wandb_offline_has_run_configuration_and_every_number(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    (note,) = record(run_dir, ROWS, wandb_project="soaps")
    assert note.startswith("note: Weights & Biases is offline; later: wandb sync ")
    (folder,) = (run_dir / "wandb").glob("offline-run-*")
    run, history = offline_record(folder)
    assert (run.run_id, run.display_name, run.project) == (
        (run_dir / "wandb_id").read_text(),
        "my run",
        "soaps",
    )
    given = {update.key: update.value_json for update in run.config.update}
    assert given["train.steps"] == "300"
    assert history[0]["validation_losses/a b"] == "2.5"
    assert history[1]["loss"] == "2"
    assert history[1]["expert_load/1/0"] == "2"
    assert history[2]["grad_norm"] == "0.5"

    time.sleep(1.1)  # folders of launches are named by the second
    assert (
        len(record(run_dir, [{"step": 3, "loss": 0.5}], resume_step=2, wandb_project="soaps")) == 1
    )
    later = max((run_dir / "wandb").glob("offline-run-*"))
    assert later != folder
    again, more = offline_record(later)
    assert again.run_id == run.run_id
    assert more[3]["loss"] == "0.5"


def test_wandb_without_a_login_records_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (note,) = record(tmp_path / "run", ROWS, wandb_project="soaps")
    assert "is offline (PermissionError: not logged in: wandb login); later: wandb sync" in note
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*"))) == 1


BEREFT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from lather.config.records import LogConfig
from lather.train.metrics import MetricsWriter

folder = Path(sys.argv[1])
writer = MetricsWriter(folder, None, LogConfig(wandb_project="soaps"))
writer.write({"step": 1, "loss": 1.0})
while not list(folder.glob("wandb/offline-run-*/*.wandb")):
    time.sleep(0.1)
command = ["pgrep", "-P", str(os.getpid()), "-f", "wandb-core"]
for service in subprocess.run(command, capture_output=True, text=True).stdout.split():
    os.kill(int(service), signal.SIGKILL)
    print("killed")
for step in range(2, 8):
    writer.write({"step": step, "loss": 1.0 / step})
    time.sleep(0.2)
writer.close()
"""


def test_the_death_of_wandbs_service_does_not_stop_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEREFT, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "killed" in run.stdout
    assert run.stdout.count("note: Weights & Biases failed (") == 1
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 7


@pytest.mark.parametrize("place", ["", "store", "file:"])
def test_mlflow_in_a_folder_has_run_parameters_and_every_number(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    folder = tmp_path / "mlruns" if not place else tmp_path / "store"
    if place:
        monkeypatch.setenv(
            "MLFLOW_TRACKING_URI", f"file:{folder}" if place == "file:" else str(folder)
        )
    assert record(tmp_path / "my run", ROWS, mlflow_experiment="soaps") == []
    monkeypatch.setitem(CONFIGURATION, "train.steps", 600)
    assert (
        record(
            tmp_path / "my run",
            [{"step": 3, "loss": 0.5}],
            resume_step=2,
            mlflow_experiment="soaps",
        )
        == []
    )
    client = mlflow.MlflowClient(tracking_uri=str(folder))
    (run,) = client.search_runs([client.get_experiment_by_name("soaps").experiment_id])
    assert run.info.run_id == (tmp_path / "my run/mlflow_run_id").read_text()
    assert (run.info.run_name, run.info.status) == ("my run", "FINISHED")
    assert run.data.params["optim.name"] == CONFIGURATION["optim.name"]
    assert len(run.data.params) == len(CONFIGURATION)
    assert len(run.data.params["data.path"]) == 500
    assert run.data.params["train.steps"] == "300"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    names = {"validation_losses/a b", "expert_load/0/1", "skipped", "grad_norm", "validation_loss"}
    assert names < run.data.metrics.keys()


def test_an_mlflow_server_that_is_not_there_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (note,) = record(tmp_path / "run", ROWS, mlflow_experiment="soaps")
    assert note.startswith("note: MLflow failed (MlflowException: ")
    assert note.endswith("training goes on without it; metrics.jsonl has every row")
    assert len(read_rows(tmp_path / "run/metrics.jsonl")) == len(ROWS)
