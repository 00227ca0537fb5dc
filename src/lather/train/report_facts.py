"""Facts about a run for its report: model, rule, data, hardware, and a table of its starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lather.config.toml_file import load_run
from lather.engine.trained_parameters import active_parameters, trained_parameters
from lather.files import read_text
from lather.train.run_dir import data_sets_of

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


def facts(run_dir: Path) -> list[list[str]]:
    """Return names and values of what a run's configuration says of it. Raises UserError if it
    cannot be read."""
    config = load_run(run_dir).resolved()
    trained, active = trained_parameters(config), active_parameters(config)
    parameters = (
        f"{_millions(trained.num_parameters)} parameters, of "
        f"which a token meets {_millions(active)}"
    )
    train = config.train
    batch = f"{train.batch_size:,} sequences of {train.sequence_length:,} tokens"
    found = [["model", f"{config.model.model_type}, {parameters}"]]
    if trained.num_trained < trained.num_parameters:
        found.append(["trained", trained.describe()])
    if start := config.fork_from or config.init_from:
        found.append(["started from", start])
    return [
        *found,
        ["rule and peak rates", config.optim.describe_rates()],
        ["schedule", f"{config.optim.schedule}, {config.optim.warmup_steps:,} steps of warm-up"],
        ["data", ", ".join(config.data.path) or config.data.source],
        [
            "step",
            f"{batch}, {train.batch_size * train.sequence_length:,} tokens, in {train.precision}",
        ],
    ]


def losses(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The last loss of each held-out set, where there are several."""
    of_sets = [row["validation_losses"] for row in rows if row.get("validation_losses")]
    last: dict[str, float | None] = of_sets[-1] if of_sets else {}
    texts = (
        f"{name} {'none' if loss is None else format(loss, '.4f')}" for name, loss in last.items()
    )
    return [["held-out losses", ", ".join(texts)]] if len(last) > 1 else []


def machine(path: Path) -> list[list[str]]:
    """The record of what the run was begun with: names and values, data sets with their
    identities."""
    record = json.loads(read_text(path))
    del record["starts"]
    record["data"] = ", ".join(
        f"{folder} ({identity})" for folder, identity in data_sets_of(record)
    )
    return [[str(name), _text(value)] for name, value in record.items()]


def starts(path: Path) -> list[list[str]]:
    """The table of a run's starts, the head first."""
    rows = json.loads(read_text(path))["starts"]
    different = [name for name in VERSIONS if len({_text(row.get(name)) for row in rows}) > 1]
    head = [*STARTS.values(), *different]
    return [head, *([_text(row.get(name)) for name in (*STARTS, *different)] for row in rows)]


def _text(value: object) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _millions(number: int) -> str:
    return f"{number / 1e6:,.2f} M" if number < 1e9 else f"{number / 1e9:,.2f} B"
