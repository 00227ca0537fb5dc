"""The measurements of a run; and the metrics of a resumed run are the uninterrupted one's."""

import errno
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lather import files
from lather.config.records import LogConfig
from lather.errors import RunError
from lather.files import read_rows
from lather.train import metrics, trackers
from lather.train.metrics import (
    MetricsWriter,
    StepRow,
    expert_load,
    take_peak_memory_bytes,
    training_rows,
)

MakeRow = Callable[..., StepRow]


def validation(step: int, loss: float = 5.0) -> dict[str, Any]:
    return {"step": step, "seconds": 0.1 * step, "validation_loss": loss}


def write(
    run_dir: Path,
    rows: list[StepRow | dict[str, Any]],
    resume_step: int | None = None,
    note: Callable[[str], None] = print,
    **log: Any,
) -> None:
    writer = MetricsWriter(run_dir, resume_step, LogConfig(**log), {"optim.lr": 0.5}, note)
    for row in rows:
        writer.write(row)
    writer.sync()
    writer.close()


@pytest.fixture
def five_steps(step_row: MakeRow) -> list[StepRow | dict[str, Any]]:
    """Make rows with a validation before the first step, after step 2 and after step 4."""
    rows: list[StepRow | dict[str, Any]] = [validation(0)]
    for step in range(1, 6):
        rows.append(step_row(step))
        if step in (2, 4):
            rows.append(validation(step))
    return rows


# --- metrics.jsonl --------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_as_soon_as_they_are_written(
    tmp_path: Path, five_steps: list[Any]
) -> None:
    writer = MetricsWriter(tmp_path, None)
    for row in five_steps:
        writer.write(row)
        expected = row if isinstance(row, dict) else asdict(row)
        assert read_rows(tmp_path / "metrics.jsonl")[-1] == expected
    writer.close()


@pytest.mark.parametrize("resume_step", [None, *range(6)])
def test_a_resumed_run_has_the_uninterrupted_ones_file(
    tmp_path: Path, five_steps: list[Any], resume_step: int | None
) -> None:
    write(tmp_path, five_steps)
    uninterrupted = (tmp_path / "metrics.jsonl").read_bytes()
    steps = [row["step"] if isinstance(row, dict) else row.step for row in five_steps]
    later = [
        row
        for row, step in zip(five_steps, steps, strict=True)
        if step > (-1 if resume_step is None else resume_step)
    ]
    write(tmp_path, later, resume_step)
    assert (tmp_path / "metrics.jsonl").read_bytes() == uninterrupted
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", [1, 2, 30, 200])
def test_a_last_line_that_a_kill_left_unfinished_is_passed_over(
    tmp_path: Path, step_row: MakeRow, cut: int
) -> None:
    write(tmp_path, [step_row(1), step_row(2)])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[: -cut - 1])  # without the newline, too
    assert [row["step"] for row in read_rows(path)] == [1]
    write(tmp_path, [step_row(2)], resume_step=1)
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_a_run_without_a_checkpoint_says_what_it_drops(
    tmp_path: Path, five_steps: list[Any]
) -> None:
    write(tmp_path, five_steps)
    notes: list[str] = []
    MetricsWriter(tmp_path, None, note=notes.append).close()
    said = "begins again at step 0; the metrics of 5 steps are dropped"
    assert notes == [f"no checkpoint in {tmp_path}: {said}"]
    MetricsWriter(tmp_path, None, note=pytest.fail).close()


LINES = ("{", "[]", "3", "null", "{}", '{"step": "x"}', '{"step": 1e999}', "\x00\x00", "\udcff")


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_line_is_named_by_number(tmp_path: Path, line: str) -> None:
    """Only a last line without its end may be incomplete."""
    path = tmp_path / "metrics.jsonl"
    for more in ('{"step": 4}\n', ""):
        text = f'{{"step": 1}}\n{{"step": 2}}\n{line}\n{more}'
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(
            RunError, match=rf"^{path}, line 3: not a row of metrics: restore the file, or "
        ):
            read_rows(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_becomes_null(
    tmp_path: Path, step_row: MakeRow, value: float
) -> None:
    write(tmp_path, [step_row(1, loss=value, grad_norm=value, skipped=True), validation(1, value)])
    text = (tmp_path / "metrics.jsonl").read_text()
    step, validated = (json.loads(line, parse_constant=pytest.fail) for line in text.splitlines())
    assert step["loss"] is step["grad_norm"] is validated["validation_loss"] is None
    assert step["lr"] == 1e-3


def test_training_rows_are_the_steps_that_changed_something(step_row: MakeRow) -> None:
    steps = [asdict(step_row(step, skipped=step == 2)) for step in (1, 2, 3)]
    assert [row["step"] for row in training_rows([validation(0), *steps])] == [1, 3]


# --- what is measured -----------------------------------------------------------------------------


def test_expert_load_by_hand() -> None:
    least, most, entropy = expert_load(torch.tensor([[4, 4, 4, 4], [8, 8, 0, 0], [1, 3, 4, 8]]))
    uneven = -sum(share * math.log(share, 4) for share in (1 / 16, 3 / 16, 4 / 16, 8 / 16))
    assert (least, most) == (0.0, 2.0)
    assert entropy == pytest.approx((1 + 0.5 + uneven) / 3, rel=1e-12)


@pytest.mark.parametrize(
    ("counts_LE", "expected"),
    [
        (torch.zeros(0, 0, dtype=torch.int64), (math.nan,) * 3),  # there is no MoE block
        (torch.tensor([[7]]), (1, 1, 1)),  # there is one expert
        (torch.tensor([[5, 5]]), (1, 1, 1)),
        (torch.tensor([[0, 0, 9]]), (0, 3, 0)),
        (torch.tensor([[0, 0]]), (0, 0, 0)),  # there is no token
    ],
)
def test_expert_load_at_its_ends(
    counts_LE: torch.Tensor, expected: tuple[float, float, float]
) -> None:
    assert expert_load(counts_LE) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_a_gpus_peak_is_that_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = [100]
    gpu = SimpleNamespace(
        max_memory_allocated=lambda device: peak[0],
        reset_peak_memory_stats=lambda device: peak.__setitem__(0, 40),
    )
    assert 50e6 < take_peak_memory_bytes(torch.device("cpu")) < 1e12  # of Python with torch
    monkeypatch.setattr(metrics, "gpu_module", lambda device: gpu)
    assert [take_peak_memory_bytes(torch.device("cuda")) for _ in range(2)] == [100, 40]


# --- TensorBoard and Weights & Biases -------------------------------------------------------------


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_gets_every_number(tmp_path: Path, five_steps: list[Any]) -> None:
    write(tmp_path, five_steps, tensorboard=True)
    rows = read_rows(tmp_path / "metrics.jsonl")
    for tag in ("loss", "expert_load_entropy", "refreshes_done", "skipped", "validation_loss"):
        assert scalars(tmp_path, tag) == [
            (row["step"], pytest.approx(float(row[tag]))) for row in rows if tag in row
        ]


def test_tensorboard_of_a_resumed_run_has_every_step_once(
    tmp_path: Path, step_row: MakeRow
) -> None:
    write(tmp_path, [step_row(step) for step in (1, 2, 3, 4)], tensorboard=True)
    write(
        tmp_path,
        [step_row(step, loss=9.0, grad_norm=math.nan) for step in (3, 4, 5)],
        resume_step=2,
        tensorboard=True,
    )
    assert scalars(tmp_path, "loss") == [(1, 5.0), (2, 2.5), (3, 9.0), (4, 9.0), (5, 9.0)]


def test_every_held_out_set_reaches_tensorboard(tmp_path: Path, step_row: MakeRow) -> None:
    row = {**validation(0), "validation_losses": {"books": 2.5, "code": math.inf}}
    write(
        tmp_path,
        [row, step_row(1), {"step": 1, "expert_load": [[0.5, 1.5], [2.0, 0.0]]}],
        tensorboard=True,
    )
    assert scalars(tmp_path, "validation_losses/books") == [(0, 2.5)]
    assert scalars(tmp_path, "expert_load/1/0") == [(1, 2.0)]
    assert scalars(tmp_path, "loss") == [(1, 5.0)]
    with pytest.raises(KeyError):
        scalars(tmp_path, "validation_losses/code")
    first = json.loads(
        (tmp_path / "metrics.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail
    )
    assert first["validation_losses"] == {"books": 2.5, "code": None}


class FakeWandb(SimpleNamespace):
    """Stands for the module, with the interface of version 0.31; `runs` has its calls of `init`,
    each with what was logged, and `failing` names a function that raises."""

    def __init__(self, failing: str = "") -> None:
        super().__init__(runs=[], failing=failing)

    def login(self, *, prompt: bool) -> bool:
        assert not prompt, "a run must not wait for a key"
        return self.failing != "login"

    def init(self, **options: Any) -> SimpleNamespace:
        is_offline = options.get("mode") == "offline"
        if self.failing == "init" or (self.failing == "network" and not is_offline):
            raise ConnectionError("no network\nand more lines")
        run = SimpleNamespace(options=options, logged=[], finished=False, url="https://wandb/run")

        def log(values: dict[str, Any], step: int) -> None:
            if self.failing == "log" and step == 2:
                raise BrokenPipeError("the service has died")
            run.logged.append((step, values))

        run.log = log
        run.finish = lambda: setattr(run, "finished", True)
        self.runs.append(run)
        return run


@pytest.fixture(autouse=True)
def _no_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def test_wandb_gets_every_row_and_goes_on_in_the_same_run(
    tmp_path: Path, step_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, notes = FakeWandb(), list[str]()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    options: dict[str, Any] = {"wandb_project": "soaps", "note": notes.append}
    write(tmp_path, [validation(0), step_row(1)], **options)
    write(tmp_path, [step_row(2, loss=math.nan)], resume_step=1, **options)
    first, second = wandb.runs
    row = {k: v for k, v in asdict(step_row(1)).items() if k not in ("step", "skip_reason")}
    assert first.logged == [(0, {"seconds": 0.0, "validation_loss": 5.0}), (1, row)]
    assert [(step, values["loss"]) for step, values in second.logged] == [(2, None)]
    assert first.options["id"] == second.options["id"] == (tmp_path / "wandb_id").read_text()
    assert re.fullmatch("[a-z0-9]{8}", first.options["id"])
    expected = {"project": "soaps", "name": tmp_path.name, "config": {"optim.lr": 0.5}}
    assert expected.items() <= second.options.items()
    assert second.options["resume"] == "allow"
    assert first.finished
    assert second.finished
    assert notes == ["note: Weights & Biases shows the run at https://wandb/run"] * 2


@pytest.mark.parametrize(
    ("failing", "logged", "words"),
    [
        ("login", [1, 2, 3], ["is offline (PermissionError: not logged in: wandb login); later: "]),
        ("network", [1, 2, 3], ["is offline (ConnectionError: no network); later: wandb sync "]),
        ("init", [], ["failed (ConnectionError: no network): training goes on without it"]),
        ("log", [1], ["at https", "failed (BrokenPipeError: the service has died): training"]),
    ],
)
def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(
    tmp_path: Path,
    step_row: MakeRow,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    logged: list[int],
    words: list[str],
) -> None:
    wandb = FakeWandb(failing)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    notes: list[str] = []
    write(
        tmp_path, [step_row(step) for step in (1, 2, 3)], wandb_project="soaps", note=notes.append
    )
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [step for run in wandb.runs for step, _ in run.logged] == logged
    assert len(notes) == len(words)
    for note, part in zip(notes, words, strict=True):
        assert note.startswith("note: Weights & Biases ")
        assert part in note
        assert "\n" not in note


def test_a_tracker_that_hangs_does_not_delay_a_run(
    tmp_path: Path, step_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, wandb = threading.Event(), FakeWandb()
    wandb.init = lambda **options: is_over.wait(60)  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "MOST_ROWS", 5)
    notes: list[str] = []
    start = time.monotonic()
    write(
        tmp_path, [step_row(step) for step in range(1, 9)], wandb_project="soaps", note=notes.append
    )
    is_over.set()
    assert time.monotonic() - start < 30
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 8
    assert notes == [
        "note: Weights & Biases is 5 rows behind: training goes on without it; metrics.jsonl has "
        "every row"
    ]


@pytest.mark.parametrize(
    ("module", "field"), [("wandb", "wandb_project"), ("mlflow", "mlflow_experiment")]
)
def test_a_missing_tracker_names_field_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, field: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        RunError, match=rf"log\.{field} .* is not installed: pip install 'lather\[{module}\]'"
    ):
        write(tmp_path, [], **{field: "soaps"})


def test_rows_are_on_disk_before_they_replace_the_old_ones_and_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss right after a replacement, or after a checkpoint, must not cost rows."""
    events: list[str] = []
    replace, fsync = Path.replace, os.fsync
    for module in (files, metrics):
        monkeypatch.setattr(module, "sync", lambda path: events.append(f"sync {path.name}"))
    monkeypatch.setattr(
        Path,
        "replace",
        lambda path, to: (events.append(f"replace {path.name}"), replace(path, to))[1],
    )
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (events.append("fsync rows"), fsync(descriptor))[1]
    )
    writer = MetricsWriter(tmp_path, None)
    aside, folder = ".tmp-metrics.jsonl", f"sync {tmp_path.name}"
    assert events == [f"sync {aside}", f"replace {aside}", folder]
    writer.sync()
    writer.close()
    assert events[3:] == ["fsync rows", folder]


def test_trackers_end_their_records_when_the_file_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    closed: list[str] = []
    writer = MetricsWriter(tmp_path, None)
    writer.file.close()
    record = SimpleNamespace(close=lambda: closed.append("record"))
    writer.file, writer.trackers = cast(Any, SimpleNamespace(close=full)), cast(Any, [record])
    with pytest.raises(OSError, match="space"):
        writer.close()
    assert closed == ["record"]
