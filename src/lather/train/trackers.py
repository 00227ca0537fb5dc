"""Writes the rows of a run to programs that show them: TensorBoard, Weights & Biases and MLflow.

A tracker never stops or delays a run. It works in a thread, since a server may be far away or gone;
the first call that fails ends the tracker, and a note says so. Modules are imported
before the thread starts: two threads that import at the same time may see incomplete modules.

The run directory stores the identifier that a tracker has for the run, so that a resumed run
continues the same record there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lather.config.records import LogConfig
from lather.errors import RunError

Numbers = Mapping[str, float | None]
"""Numbers of a row by name; None for a number that is not finite."""
Values = Mapping[str, Any]
"""Values of a configuration by dotted key."""
Note = Callable[[str], None]
"""Shows a line."""
MakeTracker = Callable[[], "TensorBoard | Wandb | MLflow"]

CLOSE_SECONDS = 30.0
"""Time that the end of a run waits for a tracker."""
MOST_ROWS = 20_000
"""Rows that may wait for a tracker; with more it is abandoned."""
START_SECONDS = 60
"""Time in which Weights & Biases has to answer when a run starts."""


def numbers_of(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return all numbers of a row but its step, by name.

    Entries of mappings and lists get names with a slash: `validation_losses/books`, and
    `expert_load/block/expert`. Texts are left out.
    """
    return dict(_flat("", {name: value for name, value in row.items() if name != "step"}))


def _flat(name: str, value: Any) -> Iterator[tuple[str, float | None]]:
    if isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from _flat(f"{name}/{key}" if name else str(key), entry)
    elif value is None or isinstance(value, int | float):
        yield name, value


class BackgroundTracker:
    """Calls a tracker in a thread, and abandons it when it fails."""

    def __init__(self, name: str, make: MakeTracker, note: Note) -> None:
        """`make` is called in the thread."""
        self._name, self._note, self._is_abandoned = name, note, False
        self._rows: queue.Queue[tuple[int, Numbers] | None] = queue.Queue(MOST_ROWS)
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._thread.start()

    def write(self, step: int, numbers: Numbers) -> None:
        """Hand over a row, and return at once."""
        if self._is_abandoned:
            return
        try:
            self._rows.put_nowait((step, numbers))
        except queue.Full:
            self._abandon(f"is {MOST_ROWS:,} rows behind")

    def close(self) -> None:
        """Complete the record; abandon the tracker if that takes more than `CLOSE_SECONDS`."""
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._abandon(f"did not end within {CLOSE_SECONDS:g} s")

    def _run(self, make: MakeTracker) -> None:
        try:
            tracker = make()
            if tracker.remark and not self._is_abandoned:
                self._note(f"note: {self._name} {tracker.remark}")
            while (row := self._rows.get()) is not None:
                tracker.write(*row)
            tracker.close()
        except (Exception, SystemExit) as error:
            self._abandon(f"failed ({_brief(error)})")

    def _abandon(self, why: str) -> None:
        if not self._is_abandoned:
            self._is_abandoned = True
            self._note(
                f"note: {self._name} {why}: training goes on without it; metrics.jsonl has every "
                "row"
            )


def start_trackers(
    log: LogConfig, run_dir: Path, resume_step: int | None, configuration: Values, note: Note
) -> list[BackgroundTracker]:
    """Start the trackers that `[log]` names. Raises RunError if a module is not installed."""
    makers: dict[str, MakeTracker] = {}
    if log.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / "tensorboard"
        makers["TensorBoard"] = partial(TensorBoard, SummaryWriter, folder, resume_step)
    if log.wandb_project:
        wandb = _imported("wandb", "wandb_project")
        makers["Weights & Biases"] = partial(
            Wandb, wandb, run_dir, log.wandb_project, configuration
        )
    if log.mlflow_experiment:
        mlflow = _imported("mlflow", "mlflow_experiment")
        makers["MLflow"] = partial(MLflow, mlflow, run_dir, log.mlflow_experiment, configuration)
    return [BackgroundTracker(name, make, note) for name, make in makers.items()]


def _imported(module: str, field: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = "is not installed" if error.name == module else f"cannot be imported ({error})"
        raise RunError(
            f"log.{field} is set, but {module} {why}: pip install 'lather[{module}]'"
        ) from None


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


class TensorBoard:
    """Writes TensorBoard events into a folder; those of steps after `resume_step` are replaced."""

    remark = ""
    """A sentence for the user about the place of the record; empty: none."""

    def __init__(self, writer: Callable[..., Any], folder: Path, resume_step: int | None) -> None:
        """`writer`: torch's SummaryWriter."""
        purge = None if resume_step is None else resume_step + 1
        self._writer = writer(str(folder), purge_step=purge)

    def write(self, step: int, numbers: Numbers) -> None:
        for name, number in numbers.items():
            if number is not None:
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. Without a login or a network it is recorded offline, below the run
    directory, from where `wandb sync` sends it later."""

    def __init__(self, wandb: Any, run_dir: Path, project: str, configuration: Values) -> None:
        start = partial(
            wandb.init,
            project=project,
            id=_saved_id(run_dir / "wandb_id", lambda: secrets.token_hex(4)),
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=dict(configuration),
            resume="allow",
            settings={"console": "off", "silent": True, "init_timeout": START_SECONDS},
        )
        mode, why = os.environ.get("WANDB_MODE", "online"), ""
        if mode == "online":
            try:
                if _lacks_login(wandb):
                    raise PermissionError("not logged in: wandb login")
                self._run = start()
                self.remark = f"shows the run at {self._run.url}"
                return
            except Exception as error:
                mode, why = "offline", f" ({_brief(error)})"
        self._run = start(mode=mode)
        self.remark = f"is {mode}{why}"
        if mode == "offline":
            folder = shlex.quote(str(run_dir / "wandb"))
            self.remark += f"; later: wandb sync {folder}/offline-run-*"

    def write(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _lacks_login(wandb: Any) -> bool:
    """Return whether `wandb.init` would ask for a key, as far as this version can tell."""
    try:
        return not wandb.login(prompt=False)
    except (AttributeError, TypeError):
        return False


class MLflow:
    """A run of MLflow, at the place that MLFLOW_TRACKING_URI names or in the folder `mlruns` beside
    the run directory. Steps that a resumed run repeats are recorded a second time."""

    remark = ""

    def __init__(self, mlflow: Any, run_dir: Path, experiment: str, configuration: Values) -> None:
        self._entities, self._name = mlflow.entities, run_dir.resolve().name
        # MLflow refuses a folder as its store from version 3.7 on unless it is told otherwise
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        folder = run_dir.resolve().parent / "mlruns"
        self._client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or str(folder))
        self._id = _saved_id(run_dir / "mlflow_run_id", lambda: self._new_run(experiment))
        self._client.update_run(self._id, status="RUNNING")
        recorded = self._client.get_run(self._id).data.params  # these cannot change
        texts = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in configuration.items()
            if name not in recorded
        }
        params = [self._entities.Param(name, text[:500]) for name, text in texts.items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[first : first + 100])

    def _new_run(self, experiment: str) -> str:
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        return str(self._client.create_run(number, run_name=self._name).info.run_id)

    def write(self, step: int, numbers: Numbers) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(re.sub(r"[^\w\-./: ]", "_", name), float(number), now, step)
            for name, number in numbers.items()
            if number is not None
        ]
        for first in range(0, len(metrics), 500):
            self._client.log_batch(self._id, metrics=metrics[first : first + 500])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _saved_id(file: Path, make: Callable[[], str]) -> str:
    """Return the identifier in a file, which is made and written if it is not there."""
    if not file.exists() or not file.read_text().strip():
        file.write_text(make())
    return file.read_text().strip()
