"""A run as one HTML page: what it is, curves, experts' loads, memory, schedule, sample, changes,
versions and configuration.

The page (`report_page.html`) draws what `report_data` says. A file of the run that is missing
leaves its part out; one that is damaged leaves a note in its place. A run may be writing meanwhile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from lather import page
from lather.checkpoint.folder import list_checkpoints, step_of
from lather.config.changes import History
from lather.config.toml_file import load_run
from lather.durations import duration, unit_of_axis
from lather.errors import UserError
from lather.files import optional_file, read_rows, read_text, whole_file
from lather.pipeline import picture
from lather.pipeline.replay import Timeline
from lather.pipeline.timeline import FILE as TIMELINE
from lather.train.expert_watch import SETTLED, collapsed_blocks, describe, remedy
from lather.train.memory_check import FILE as MEMORY
from lather.train.memory_check import differences, sizes_of
from lather.train.metrics import training_rows
from lather.train.plot import draw, smoothed
from lather.train.report_facts import facts, losses, machine, starts
from lather.train.trained_model import SAMPLE

REPORT = "report.html"
CURVES = (
    *(
        "loss",
        "balance_loss",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "step_seconds",
        "optimizer_seconds",
        "peak_memory_bytes",
    ),
    *("expert_load_min", "expert_load_max", "expert_load_entropy"),
)
"""Fields of a step's row that are drawn."""
POINTS = 1000
"""Steps of a longer run are divided into so many groups, and of each the rows with the least and
greatest loss and gradient are kept."""
MOST_LOADS = 300_000
"""Loads of experts on a page; of more, later records are passed over evenly."""


def draw_run(run: Path, note: Callable[[str], None]) -> None:
    """Write the picture and the page of a run that has ended."""
    with optional_file(run / "loss.png", note):
        draw([run], run / "loss.png")
    with optional_file(run / REPORT, note):
        write_report(run, run / REPORT)


def write_report(run_dir: Path, out: Path) -> None:
    """Write the page. Raises UserError if `out` cannot be written."""
    notes: list[str] = []
    files = {"configuration": run_dir / "config.toml", "sample": run_dir / SAMPLE}
    read = partial(read_text, errors="replace")
    texts = {name: _part(notes, file, read, "") for name, file in files.items()}
    data = {**report_data(run_dir, notes), "notes": list(dict.fromkeys(notes))}
    title, time = run_dir.name or run_dir.resolve().name, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    with whole_file(out, "--out") as aside:
        page.write_page(
            aside, ("lather.train", "report_page.html"), data, title=title, time=time, **texts
        )


def report_data(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """Plain values, in which numbers that are not finite are None; `notes` gets a sentence for each
    file that cannot be read."""
    rows: list[dict[str, Any]] = _part(notes, run_dir / "metrics.jsonl", read_rows, [])
    steps = [row for row in rows if "loss" in row]
    history = _part(
        notes, run_dir / "changes.jsonl", lambda path: History.read(path.parent, {}), History()
    )
    planned = _part(
        notes, run_dir / "config.toml", lambda path: load_run(path.parent).train.steps, None
    )
    checkpoints = _part(
        notes,
        run_dir / "checkpoints",
        lambda path: [step_of(one) for one in list_checkpoints(path)],
        [],
    )
    data = {
        "tiles": _part(notes, run_dir / "metrics.jsonl", lambda _: tiles(rows, planned), []),
        "facts": [
            *_part(notes, run_dir / "config.toml", lambda path: facts(path.parent), []),
            *_part(notes, run_dir / "metrics.jsonl", lambda _: losses(rows), []),
        ],
        "unit": unit_of_axis(max((row["seconds"] for row in steps), default=0.0)),
        "finished": bool(steps) and planned is not None and steps[-1]["step"] >= planned,
        "curves": _part(notes, run_dir / "metrics.jsonl", lambda _: curves(rows), {}),
        "validation": [row for row in rows if "validation_loss" in row],
        "marks": [[row.step, row.brief()] for row in history.rows],
        "loads": _part(notes, run_dir / "metrics.jsonl", lambda _: loads(rows), None),
        "memory": _part(notes, run_dir / MEMORY, memory, None),
        "schedule": _part(notes, run_dir / TIMELINE, schedule, None),
        "happened": [
            *(
                [
                    row.time,
                    f"forked from {row.forked_from}" * bool(row.forked_from) or row.describe(),
                ]
                for row in history.rows
            ),
            *(["", _why_skipped(row)] for row in steps if row.get("skipped")),
            *_part(notes, run_dir / "config.toml", lambda path: collapses(rows, path.parent), []),
            *(
                [["checkpoints", f"steps {', '.join(map(str, checkpoints))}"]]
                if checkpoints
                else []
            ),
        ],
        "machine": _part(notes, run_dir / "provenance.json", machine, []),
        "starts": _part(notes, run_dir / "provenance.json", starts, []),
    }
    return json.loads(json.dumps(data), parse_constant=lambda _: None)


def _why_skipped(row: dict[str, Any]) -> str:
    cause = "its loss or gradient was not finite" if row["tokens"] else "it had no token to learn"
    return f"step {row['step']} was skipped: {cause}"


def tiles(rows: Sequence[dict[str, Any]], planned: int | None) -> list[list[str]]:
    """The run in a few numbers: names and values."""
    steps = [row for row in rows if "loss" in row]
    validation = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    if not steps:
        return []
    last, seconds = steps[-1], sum(row["step_seconds"] for row in steps)
    found = [["steps", f"{last['step']:,}" + (f" of {planned:,}" if planned else "")]]
    if validation:
        ends = [f"{loss:.4f}" for loss in (validation[0], validation[-1])]
        found.append(
            [
                "validation loss",
                " \N{RIGHTWARDS ARROW} ".join(ends if len(validation) > 1 else ends[:1]),
            ]
        )
    if good := [row["loss"] for row in training_rows(list(rows))]:
        found.append(["training loss", f"{good[-1]:.4f}"])
    return [
        *found,
        ["tokens", f"{sum(row['tokens'] for row in steps):,}"],
        ["tokens per second", f"{median(row['tokens_per_second'] for row in steps):,.0f} (median)"],
        ["time", duration(last["seconds"])],
        [
            "optimizer",
            f"{sum(row['optimizer_seconds'] for row in steps) / max(seconds, 1e-9):.0%} of the "
            "time",
        ],
        ["peak memory", f"{max(row['peak_memory_bytes'] for row in steps) / 2**30:,.2f} GiB"],
    ]


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Columns of the steps' rows; `smoothed` is the loss without its noise, `tokens` counts all up
    to a step."""
    steps = [row for row in rows if "loss" in row]
    good = list(training_rows(list(rows)))
    smooth = dict(
        zip(
            (row["step"] for row in good),
            smoothed(np.array([row["loss"] for row in good], np.float64)).tolist(),
            strict=True,
        )
    )
    tokens = list(accumulate(row["tokens"] for row in steps))
    kept = kept_rows(steps)
    columns = {
        name: [steps[index].get(name) for index in kept] for name in ("step", "seconds", *CURVES)
    }
    return {
        **columns,
        "tokens": [tokens[index] for index in kept],
        "smoothed": [smooth.get(steps[index]["step"]) for index in kept],
    }


def kept_rows(steps: Sequence[dict[str, Any]]) -> list[int]:
    """Indices of the rows that are drawn, in order: all, or those that stand out in each group, and
    the first and last."""
    if len(steps) <= 4 * POINTS:
        return list(range(len(steps)))

    def value(name: str, index: int) -> float:
        number = steps[index].get(name)
        return math.inf if number is None else float(number)

    kept = {0, len(steps) - 1}
    for group in range(POINTS):
        indices = range(group * len(steps) // POINTS, (group + 1) * len(steps) // POINTS)
        for name in ("loss", "grad_norm"):
            kept |= {choose(indices, key=partial(value, name)) for choose in (min, max)}
    return sorted(kept)


def loads(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The load of each expert as a share of the even load: by MoE block, record and expert."""
    records = [row for row in rows if row.get("expert_load")]
    if not records:
        return None
    size = sum(map(len, records[0]["expert_load"]))
    records = records[:: math.ceil(len(records) * size / MOST_LOADS)]
    blocks = [
        [[round(load, 3) for load in row["expert_load"][block]] for row in records]
        for block in range(len(records[0]["expert_load"]))
    ]
    return {"steps": [row["step"] for row in records], "blocks": blocks}


def collapses(rows: Sequence[dict[str, Any]], run_dir: Path) -> list[list[str]]:
    """A sentence for each block whose experts have collapsed by its last records, with the
    remedy."""
    config = load_run(run_dir)
    start = 0 if config.init_from else min(SETTLED, config.train.steps // 2)
    records = [row for row in rows if row.get("expert_load") and row["step"] > start]
    chosen = config.model.num_experts_per_tok
    loads_LE = [torch.tensor(row["expert_load"], dtype=torch.float64) for row in records]
    uneven = [set(collapsed_blocks(load_LE, chosen)) for load_LE in loads_LE]
    lasting = set.intersection(*uneven[-2:]) if uneven else set()
    if config.init_from:
        lasting -= uneven[0]
    advice = remedy(config.resolved_moe().balance_coefficient or 0.0)
    sentences = []
    for block in sorted(lasting):
        load_E, step = loads_LE[-1][block], records[-1]["step"]
        sentences.append(describe(block, [step], float(load_E.min()), float(load_E.max())))
    return [["", f"{sentence}; {advice}"] for sentence in sentences]


def memory(path: Path) -> dict[str, Any]:
    """Bytes planned and seen, by rank and kind, and a sentence for each that differs."""
    ranks = json.loads(read_text(path))["ranks"]
    return {
        "ranks": [
            [
                row["rank"],
                [[name, size["planned"], size["seen"]] for name, size in sizes_of(row).items()],
            ]
            for row in ranks
        ],
        "notes": [text for row in ranks for text in differences(row)],
    }


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


def _part(notes: list[str], path: Path, read: Callable[[Path], Any], otherwise: Any) -> Any:
    """Return what `read` makes of a file; `otherwise` if it is not there, or if it is damaged,
    which is noted."""
    if not path.exists():
        return otherwise
    try:
        return read(path)
    except UserError as error:
        notes.append(str(error))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        notes.append(f"{path}: cannot be read ({error!r})")
    return otherwise
