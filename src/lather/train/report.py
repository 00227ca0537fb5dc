"""A run as one HTML page: model and data, curves, loads of experts, memory, schedule, sample,
changes, versions and configuration.

The page (`report_page.html`) draws the values of `report_data`. A file of the run that is missing
leaves its part out; a damaged file leaves a note in its place. The run may still be training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lather import page
from lather.checkpoint.folder import list_checkpoints, step_of
from lather.config.changes import History
from lather.config.config import Config
from lather.config.toml_file import load_run
from lather.durations import duration, unit_of_axis
from lather.engine.step_reading import NO_LABELS, NOT_FINITE
from lather.engine.trained_parameters import active_parameters, trained_parameters
from lather.errors import UserError
from lather.files import optional_file, read_text, whole_file
from lather.lines import short_number
from lather.pipeline import picture
from lather.pipeline.replay import Timeline
from lather.pipeline.timeline import FILE as TIMELINE
from lather.train.best import has_ended, validations
from lather.train.memory_check import FILE as MEMORY
from lather.train.memory_check import differences, sizes_of
from lather.train.metrics import read_metrics, training_rows
from lather.train.plot import draw, smoothed
from lather.train.run_dir import data_sets_of
from lather.train.trained_model import SAMPLE

REPORT = "report.html"
CURVES = (
    "step",
    "seconds",
    "loss",
    "mtp_loss",
    "balance_loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "step_seconds",
    "optimizer_seconds",
    "peak_memory_bytes",
    "expert_load_min",
    "expert_load_max",
    "expert_load_entropy",
    "max_attention_logit",
)
"""Fields of a step's row that are drawn."""
MOST_STEPS = 10_000
"""Steps on a page; a longer run is drawn with every n-th step."""
MOST_LOADS = 300_000
"""Loads of experts on a page; a longer run is drawn with every n-th record."""
STARTS = {
    "time": "when",
    "step": "from step",
    "ranks": "ranks",
    "device": "device",
    "threads": "threads",
}
"""Columns of the table of starts that are always there, by the key in provenance.json."""
VERSIONS = ("lather", "commit", "python", "torch", "cuda", "machine")
"""Further columns, which are there if the starts differ in them."""

Row = Mapping[str, Any]
Table = list[list[str]]
"""Texts by line and column."""


def draw_run(run: Path, note: Callable[[str], None]) -> None:
    """Write the picture and the page of a run that has ended."""
    with optional_file(run / "loss.png", note):
        draw([run], run / "loss.png")
    with optional_file(run / REPORT, note):
        write_report(run, run / REPORT)


def write_report(run_dir: Path, out: Path) -> list[str]:
    """Write the page; return a sentence for each file that cannot be read. Raises UserError if
    `out` cannot be written."""
    notes: list[str] = []
    data = report_data(run_dir, notes)
    read = partial(read_text, errors="replace")
    texts = {
        "configuration": _part(notes, run_dir / "config.toml", read, ""),
        "sample": _part(notes, run_dir / SAMPLE, read, ""),
        "title": run_dir.resolve().name,
        "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    notes = data["notes"] = list(dict.fromkeys(notes))
    with whole_file(out, "--out") as aside:
        page.write_page(aside, ("lather.train", "report_page.html"), data, **texts)
    return notes


def report_data(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """Return plain values, in which numbers that are not finite are None; `notes` gets a sentence
    for each file that cannot be read."""

    def part(name: str, read: Callable[[Path], Any], otherwise: Any) -> Any:
        return _part(notes, run_dir / name, read, otherwise)

    rows: list[dict[str, Any]] = part("metrics.jsonl", lambda _: read_metrics(run_dir), [])
    steps = [row for row in rows if "loss" in row]
    config: Config | None = part("config.toml", lambda _: load_run(run_dir).resolved(), None)
    planned = config.train.steps if config else None
    history = part("changes.jsonl", lambda _: History.read(run_dir, {}), History())
    data = {
        "tiles": tiles(rows, planned) if steps else [],
        "facts": facts(config) if config else [],
        "unit": unit_of_axis(max((row["seconds"] for row in steps), default=0.0)),
        "finished": bool(steps) and config is not None and is_finished(rows, config),
        "curves": curves(steps),
        "validation": [row for row in rows if "validation_loss" in row],
        "marks": [[row.step, row.brief()] for row in history.rows],
        "loads": loads([row for row in rows if row.get("expert_load")]),
        "memory": part(MEMORY, memory, None),
        "schedule": part(TIMELINE, schedule, None),
        "happened": events(steps, history, list_checkpoints(run_dir / "checkpoints")),
        "machine": part("provenance.json", machine, []),
        "starts": part("provenance.json", starts, []),
    }
    return json.loads(json.dumps(data), parse_constant=lambda _: None)


def is_finished(rows: Sequence[Row], config: Config) -> bool:
    """Return whether a run with these rows, of a step at least, has come to its end: that of its
    steps, or that of `train.patience`."""
    train = config.train
    last = next(row["step"] for row in reversed(rows) if "loss" in row)
    return last >= train.steps or has_ended(validations(rows, train.patience_on), train.patience)


def _part(notes: list[str], path: Path, read: Callable[[Path], Any], otherwise: Any) -> Any:
    """Return what `read` makes of a file; `otherwise` if it is not there, or if it is damaged,
    which is noted."""
    try:
        return read(path) if path.exists() else otherwise
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return otherwise


def tiles(rows: Sequence[Row], planned: int | None) -> Table:
    """Return the run in a few numbers: names and values."""
    steps = [row for row in rows if "loss" in row]
    validation = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    training = [row["loss"] for row in training_rows(rows)]
    last, seconds = steps[-1], sum(row["step_seconds"] for row in steps)
    optimizer = sum(row["optimizer_seconds"] for row in steps) / max(seconds, 1e-9)
    speed = median(row["tokens_per_second"] for row in steps)
    table = [["steps", f"{last['step']:,}" + (f" of {planned:,}" if planned else "")]]
    if validation:
        ends = [f"{loss:.4f}" for loss in (validation[0], validation[-1])]
        texts = ends if len(validation) > 1 else ends[:1]
        table.append(["validation loss", " \N{RIGHTWARDS ARROW} ".join(texts)])
    averaged = [row["average_validation_loss"] for row in rows if "average_validation_loss" in row]
    if averaged and averaged[-1] is not None:
        table.append(["of averaged weights", f"{averaged[-1]:.4f}"])
    if training:
        table.append(["training loss", f"{training[-1]:.4f}"])
    if rates := [row["mfu"] for row in steps if row.get("mfu") is not None]:
        table.append(["MFU", f"{median(rates):.1%} (median)"])
    if "epoch" in last:
        table.append(["epochs", f"{last['epoch']:,.2f}"])
    return [
        *table,
        ["tokens", f"{sum(row['tokens'] for row in steps):,}"],
        ["tokens per second", f"{speed:,.0f} (median)"],
        ["time", duration(last["seconds"])],
        ["optimizer", f"{optimizer:.0%} of the time"],
        ["peak memory", f"{max(row['peak_memory_bytes'] for row in steps) / 2**30:,.2f} GiB"],
    ]


def facts(config: Config) -> Table:
    """Return names and values of what a run's configuration says of it."""
    trained, train, optim = trained_parameters(config), config.train, config.optim
    sizes = [short_number(trained.num_parameters), short_number(active_parameters(config))]
    model = f"{sizes[0]} parameters, of which a token meets {sizes[1]}"
    table = [["model", f"{config.model.model_type}, {model}"]]
    if trained.num_trained < trained.num_parameters:
        table.append(["trained", trained.describe()])
    if source := config.fork_from or config.init_from:
        table.append(["started from", source])
    batch = f"{train.batch_size:,} sequences of {train.sequence_length:,} tokens"
    tokens = f"{train.batch_size * train.sequence_length:,} tokens"
    growth = f"{train.first_batch_size:,} to {train.batch_size:,} sequences"
    if train.first_batch_size:
        table.append(["batch", f"{growth}, in the first {train.batch_growth_steps:,} steps"])
    has_experts = config.model.num_routed_experts > 0
    schedules = {"schedule": optim.schedule_of()} | {
        f"schedule of {kind}": schedule
        for kind, schedule in optim.own_schedules(has_experts=has_experts).items()
    }
    return [
        *table,
        [
            "rule and peak rates",
            optim.describe_rates(has_experts=has_experts),
        ],
        *([name, each.describe(train.steps)] for name, each in schedules.items()),
        ["data", ", ".join(config.data.path) or config.data.source],
        ["step", f"{batch}, {tokens}, in {train.precision}"],
    ]


def curves(steps: Sequence[Row]) -> dict[str, list[Any]]:
    """Return columns of the steps' rows; `smoothed` is the loss without its noise, `tokens` counts
    all up to a step."""
    drawn = slice(None, None, math.ceil(len(steps) / MOST_STEPS) or None)
    good = list(training_rows(steps))
    smooth = smoothed(np.array([row["loss"] for row in good], np.float64)).tolist()
    smooth_of_step = dict(zip((row["step"] for row in good), smooth, strict=True))
    return {
        **{name: [row.get(name) for row in steps[drawn]] for name in CURVES},
        "tokens": list(accumulate(row["tokens"] for row in steps))[drawn],
        "smoothed": [smooth_of_step.get(row["step"]) for row in steps[drawn]],
    }


def loads(records: Sequence[Row]) -> dict[str, Any] | None:
    """Return the load of each expert as a share of the even load: by MoE block, record and
    expert."""
    if not records:
        return None
    size = sum(map(len, records[0]["expert_load"]))
    drawn = records[:: math.ceil(len(records) * size / MOST_LOADS)]
    blocks = zip(*(row["expert_load"] for row in drawn), strict=True)
    rounded = [[[round(load, 3) for load in load_E] for load_E in block] for block in blocks]
    return {"steps": [row["step"] for row in drawn], "blocks": rounded}


def memory(path: Path) -> dict[str, Any]:
    """Return planned and measured bytes, by rank and kind, and a sentence for each difference."""
    ranks = json.loads(read_text(path))["ranks"]
    sizes = [
        [
            row["rank"],
            [[name, size["planned"], size["seen"]] for name, size in sizes_of(row).items()],
        ]
        for row in ranks
    ]
    return {"ranks": sizes, "notes": [text for row in ranks for text in differences(row)]}


def schedule(path: Path) -> dict[str, Any]:
    """The newest step of a timeline: a lane for each rank, and boxes with what was done."""
    step, events = picture.read_timeline(path)
    timeline = Timeline(tuple(events))
    bars = [
        [bar.left, bar.right, bar.top, bar.bottom, bar.color, bar.number, bar.action]
        for bar in picture.bars(timeline)
    ]
    return {
        "step": step,
        "bubble": timeline.bubble_fraction,
        "seconds": timeline.makespan,
        "took": duration(timeline.makespan),
        "lanes": list(timeline.ranks),
        "bars": bars,
        "key": picture.color_key(timeline),
        "dark": sorted(picture.DARK),
    }


def events(steps: Sequence[Row], history: History, checkpoints: Sequence[Path]) -> Table:
    """Return changes and forks, skipped steps, and the checkpoints: when, and a sentence."""
    table = [
        [row.time, f"forked from {row.forked_from}" if row.forked_from else row.describe()]
        for row in history.rows
    ]
    skipped = [row for row in steps if row.get("skipped")]
    places = enumerate(skipped)
    for (reason, _), group in groupby(places, lambda at: (_reason(at[1]), at[1]["step"] - at[0])):
        first, *_, last = [row["step"] for _, row in group] * 2
        which = f"step {first} was" if first == last else f"steps {first} to {last} were"
        table.append(["", f"{which} skipped: {reason}"])
    if checkpoints:
        numbers = ", ".join(str(step_of(path)) for path in checkpoints)
        table.append(["checkpoints", f"steps {numbers}"])
    return table


def _reason(row: Row) -> str:
    """Return why a step was skipped, also from a row without a reason."""
    return row.get("skip_reason") or (NOT_FINITE if row["tokens"] else NO_LABELS)


def machine(path: Path) -> Table:
    """Return names and values of the record of a run, with its data sets and their identities."""
    record = json.loads(read_text(path))
    del record["starts"]
    data_sets = [f"{folder} ({identity})" for folder, identity in data_sets_of(record)]
    record["data"] = ", ".join(data_sets)
    return [[str(name), _text(value)] for name, value in record.items()]


def starts(path: Path) -> Table:
    """Return the table of a run's starts, the head first."""
    rows = json.loads(read_text(path))["starts"]
    different = [name for name in VERSIONS if len({_text(row.get(name)) for row in rows}) > 1]
    head = [*STARTS.values(), *different]
    return [head, *([_text(row.get(name)) for name in (*STARTS, *different)] for row in rows)]


def _text(value: object) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
