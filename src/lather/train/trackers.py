"""Writes the rows of a run to programs that show them: TensorBoard, Weights & Biases and MLflow.

A tracker never stops or delays a run. Its calls run in a thread of its own, since a server may be
far away or gone; the first that fails ends the tracker, and a note says so. `metrics.jsonl` has
every row in any case. Modules are imported before the thread starts: two threads that import at the
same time may see modules that are not complete.

A run's identifier is kept in its directory, so that a run that is resumed continues its record.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import posixpath
import queue
import re
import secrets
import shlex
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lather.errors import RunError

Numbers = Mapping[str, float | None]
"""Numbers of a row by name; None for one that is not finite."""
Values = Mapping[str, Any]
"""Values of a configuration by dotted key."""
Note = Callable[[str], None]
"""Shows a line."""

CLOSE_SECONDS = 30.0
"""Time that the end of a run waits for a tracker."""
MOST_ROWS = 20_000
"""Rows that wait for a tracker at most; a tracker that is further behind is given up."""
START_SECONDS = 60
"""Time in which Weights & Biases has to answer when a run starts."""
MLFLOW_STORE = "mlruns"


class Tracker(Protocol):
    """Shows the rows of a run."""

    remark: str
    """A sentence for the user about the place of the record; empty: none."""

    def write(self, step: int, numbers: Numbers) -> None:
        """Record a row; the steps of later rows are not smaller."""

    def close(self) -> None:
        """Complete the record."""


def numbers_of(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return all numbers of a row but its step, by name.

    Entries of sections and lists get names with a slash: `validation_losses/books`, and
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


class InBackground:
    """Calls a tracker in a thread, and gives it up when it fails."""

    def __init__(self, name: str, begin: Callable[[], Tracker], note: Note) -> None:
        """`begin` makes the tracker, in the thread; `note` shows a line and is called only by the
        methods of this object."""
        self.name, self._note = name, note
        self._rows: queue.SimpleQueue[tuple[int, Numbers] | None] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, args=(begin,), daemon=True)
        self._thread.start()

    def write(self, step: int, numbers: Numbers) -> None:
        """Hand over a row, and return at once."""
        self._report()
        if not self._is_given_up:
            self._rows.put((step, numbers))
            if self._rows.qsize() > MOST_ROWS:
                self._give_up(f"is {MOST_ROWS:,} rows behind")

    def close(self) -> None:
        """Complete the record, or give up after `CLOSE_SECONDS`."""
        self._rows.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._report()
        if self._thread.is_alive() and not self._is_given_up:
            self._give_up(f"did not end within {CLOSE_SECONDS:g} s")

    def _work(self, begin: Callable[[], Tracker]) -> None:
        try:
            tracker = begin()
            if tracker.remark:
                self._messages.put(("", tracker.remark))
            while (row := self._rows.get()) is not None:
                tracker.write(*row)
            tracker.close()
        except (Exception, SystemExit) as error:
            self._messages.put((f"failed ({_brief(error)})", ""))

    def _report(self) -> None:
        while not self._messages.empty():
            failure, remark = self._messages.get()
            if failure:
                self._give_up(failure)
            else:
                self._note(f"note: {self.name} {remark}")

    def _give_up(self, why: str) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            self._note(_farewell(self.name, why))


def beginnings(
    run_dir: Path,
    resume_step: int | None,
    tensorboard: bool,
    names: tuple[str, str],
    configuration: Values,
    note: Note,
) -> dict[str, Callable[[], Tracker]]:
    """Import the trackers that are wanted; return a function that begins each, by its name.

    `names`: project of Weights & Biases and experiment of MLflow; empty: not wanted. Raises
    RunError if a new run wants one that is not installed; for a run that is resumed, and for one
    that cannot be imported, `note` gets a sentence.
    """
    found: dict[str, Callable[[], Tracker]] = {}
    if tensorboard:
        with _told("TensorBoard", note):
            from torch.utils.tensorboard import SummaryWriter

            folder = run_dir / "tensorboard"
            found["TensorBoard"] = partial(TensorBoard, SummaryWriter, folder, resume_step)
    makers: tuple[tuple[str, str, str, Callable[..., Tracker]], ...] = (
        ("Weights & Biases", "wandb", "wandb_project", Wandb),
        ("MLflow", "mlflow", "mlflow_experiment", MLflow),
    )
    for (title, module, field, maker), name in zip(makers, names, strict=True):
        if not name:
            continue
        with _told(title, note):
            try:
                imported = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module or resume_step is not None:
                    raise
                remedy = f"pip install 'lather[{module}]'"
                missing = f"log.{field} is set, but {module} is not installed: {remedy}"
                raise RunError(missing) from None
            found[title] = partial(maker, imported, run_dir, name, configuration)
    return found


@contextlib.contextmanager
def _told(title: str, note: Note) -> Iterator[None]:
    """Show a note if the module of a tracker cannot be imported."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        note(_farewell(title, f"cannot be imported ({_brief(error)})"))


def _farewell(title: str, why: str) -> str:
    return f"note: {title} {why}: training goes on without it; metrics.jsonl has every row"


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


class TensorBoard:
    """Writes TensorBoard events into a folder; those of steps after `resume_step` are replaced."""

    remark = ""

    def __init__(self, writer: Callable[..., Any], folder: Path, resume_step: int | None) -> None:
        """`writer`: torch's SummaryWriter."""
        purge = None if resume_step is None else resume_step + 1
        self.writer = writer(str(folder), purge_step=purge)

    def write(self, step: int, numbers: Numbers) -> None:
        for name, number in numbers.items():
            if number is not None:
                self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases. Without a login or a network it is recorded offline, below the run
    directory, from where `wandb sync` sends it later."""

    def __init__(self, wandb: Any, run_dir: Path, project: str, configuration: Values) -> None:
        options: dict[str, Any] = {
            "project": project,
            "id": _kept_id(run_dir / "wandb_id", _random_id),
            "name": run_dir.resolve().name,
            "dir": str(run_dir),
            "config": dict(configuration),
            "resume": "allow",
            "settings": {"console": "off", "silent": True, "init_timeout": START_SECONDS},
        }
        later = f"wandb sync {shlex.quote(str(run_dir / 'wandb'))}/offline-run-*"
        mode = os.environ.get("WANDB_MODE", "online")
        if mode != "online":  # the user has chosen
            self.run, self.remark = wandb.init(**options), f"is {mode}"
            if mode == "offline":
                self.remark += f"; later: {later}"
            return
        try:
            if _lacks_login(wandb):
                raise PermissionError("not logged in: wandb login")
            self.run = wandb.init(**options)
            self.remark = f"shows the run at {self.run.url}"
        except Exception as error:
            self.run = wandb.init(**options, mode="offline")
            self.remark = f"records offline ({_brief(error)}); later: {later}"

    def write(self, step: int, numbers: Numbers) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        self.run.finish()


def _lacks_login(wandb: Any) -> bool:
    """Tell whether `wandb.init` would ask for a key. Versions before 0.31 cannot be asked."""
    try:
        return not wandb.login(prompt=False)
    except (AttributeError, TypeError):
        return False


class MLflow:
    """A run of MLflow, at the place that MLFLOW_TRACKING_URI names or in the folder `mlruns` beside
    the run directory. Repeated steps of a resumed run are recorded a second time."""

    remark = ""

    def __init__(self, mlflow: Any, run_dir: Path, experiment: str, configuration: Values) -> None:
        self.mlflow, self.run_dir = mlflow, run_dir
        folder = run_dir.resolve().parent / MLFLOW_STORE
        place = os.environ.get("MLFLOW_TRACKING_URI") or str(folder)
        with _folders_allowed(place):
            self.client = mlflow.MlflowClient(tracking_uri=place)
            self.id = _kept_id(run_dir / "mlflow_run_id", lambda: self._new_run(experiment))
            before = self.client.get_run(self.id).data.params
        values = {name: _text(value) for name, value in configuration.items()}
        new = [mlflow.entities.Param(name, values[name]) for name in values if name not in before]
        self.client.update_run(self.id, status="RUNNING")
        for first in range(0, len(new), 100):
            self.client.log_batch(self.id, params=new[first : first + 100])
        for name, value in values.items():
            if before.get(name, value) != value:  # a parameter cannot be changed
                self.client.set_tag(self.id, f"changed.{name}", value)

    def _new_run(self, experiment: str) -> str:
        known = self.client.get_experiment_by_name(experiment)
        number = self.client.create_experiment(experiment) if known is None else known.experiment_id
        return str(self.client.create_run(number, run_name=self.run_dir.resolve().name).info.run_id)

    def write(self, step: int, numbers: Numbers) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self.mlflow.entities.Metric(_metric_name(name), float(number), now, step)
            for name, number in numbers.items()
            if number is not None
        ]
        for first in range(0, len(metrics), 500):
            self.client.log_batch(self.id, metrics=metrics[first : first + 500])

    def close(self) -> None:
        self.client.set_terminated(self.id)


@contextlib.contextmanager
def _folders_allowed(place: str) -> Iterator[None]:
    """Allow a folder as store, which MLflow refuses from version 3.7 on unless it is told so."""
    name = "MLFLOW_ALLOW_FILE_STORE"
    if name in os.environ or ("://" in place and not place.startswith("file:")):
        yield
        return
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _text(value: Any) -> str:
    """Return a value as text within the length that MLflow allows in all versions."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 500 else f"{text[:497]}..."


def _metric_name(name: str) -> str:
    """Replace what MLflow does not allow in a name."""
    name = re.sub(r"[^\w\-./: ]", "_", name)
    return name if posixpath.normpath(name) == name else re.sub(r"[/.]", "_", name)


def _kept_id(file: Path, new: Callable[[], str]) -> str:
    """Return the identifier in a file, which is written if it is not there."""
    if not file.exists() or not file.read_text().strip():
        file.write_text(new())
    return file.read_text().strip()


def _random_id() -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
