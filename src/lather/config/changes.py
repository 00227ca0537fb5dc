"""Which fields may change when a run is resumed, and the history of changes.

Every field of the configuration belongs to one of three classes:

free         affects at most the rounding of results: devices, meshes, micro-batches, logging,
             the place of the data
changeable   takes effect at the step at which the run resumes, and is recorded: steps, rates,
             schedule, decay, data mixture
fixed        all other fields: the model, the seed, the batch and its growth, the rules

`changes.jsonl` has a row for each step at which fields changed: {"step": 300, "time": ...,
"changes": {"train.steps": [300, 600]}}, with the old and the new value. The history of a forked run
begins with {"step": 300, "forked_from": "runs/a@300"}. The last line of the file is the current
configuration, so that one atomic write replaces both; undoing rows, newest first
(`History.values_at`), gives the configuration at any earlier step.
"""

from __future__ import annotations

import datetime
import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lather.config.config import Config
from lather.config.rate_schedule import SCHEDULE_OPTIONS
from lather.data.batch_sizes import BatchSizes
from lather.data.order import MixturePhase
from lather.errors import RunError, as_toml
from lather.files import read_text
from lather.models.families import ModelConfig

CHANGES = "changes.jsonl"

FREE = {
    *("checkpoint", "data", "debug", "fork_from", "ignore_fields", "init_from", "init_weights"),
    *("log", "moe.memory", "parallel", "profile", "run_dir"),
    *(
        "train.compile",
        "train.cuda_graph",
        "train.deterministic",
        "train.device",
        "train.max_skipped_steps",
    ),
    *("train.micro_batch_size", "train.minutes", "train.offload_frozen"),
    *("train.patience", "train.patience_on", "train.recompute", "train.rounded_weights"),
    *("train.validation_every", "train.validation_sequences"),
}
"""Sections and keys. Those of `data` only say where the tokens are; checksums verify that the
tokens are the same."""
FREE_OPTIONS = ("batched", "bucket_bytes", "num_streams", "offload", "max_state_bytes")
"""Options of rules."""
CHANGEABLE = (
    *("data.path", "data.weights", "train.max_grad_norm", "train.qk_clip"),
    *("train.epochs", "train.steps"),
    *("train.skip_steps", "train.spikes", "train.spike_deviations", "train.spike_window"),
    *("moe.balance_coefficient", "moe.z_loss_coefficient"),
    *("train.average_timescale", "train.gradient_dtype", "train.mtp_loss_weight"),
    *("train.dpo_beta", "train.fp8", "train.weight_dtype"),
)
"""Keys. For `data.path` only the number of data sets counts: the same data sets may move to other
places."""
CHANGEABLE_OPTIONS = (
    *("eps", "lr", "lr_factor", "momentum", "weight_decay", "weight_decay_method"),
    *("cautious_decay", "radial_brake", "row_floor", "weight_rms"),
    *("precondition_frequency", "stagger_refresh", "state_dtype", "weight_rounding"),
    *("slow_momentum_start", "fast_momentum", "slow_momentum", "slow_share"),
    *SCHEDULE_OPTIONS,
)
"""Options of rules and schedules, of `[optim]` and of its kinds, on which the optimizer state does
not depend, or to which it is converted.
Betas are fixed: bias correction assumes that they were the same at every step."""
FIXED = ("data.packing", "data.packed_attention")
"""Keys that are fixed although their section is free."""

LABEL = 60
"""Maximal length of a label in a picture, in characters."""

Values = Mapping[str, Any]
"""Values of a configuration by dotted key, as JSON stores them."""
Change = tuple[Any, Any]
"""Old value and new value."""


def class_of(key: str, model: type[ModelConfig] = ModelConfig) -> str:
    """Return the class of a field: "free", "changeable" or "fixed". A field of the load-balancing
    loss of a `model` has the class of the key of `[moe]` that says the same."""
    section, _, option = key.rpartition(".")
    if section == "model" and option in model.balance_fields:
        return class_of(f"moe.{model.balance_fields[option]}")
    option = option if section.partition(".")[0] == "optim" else ""
    if key in CHANGEABLE or option in CHANGEABLE_OPTIONS:
        return "changeable"
    is_free = {key, key.partition(".")[0]} & FREE or option in FREE_OPTIONS
    return "free" if is_free and key not in FIXED else "fixed"


def values_of(config: Config) -> dict[str, Any]:
    """Flatten the configuration to dotted keys and JSON values."""
    return json.loads(json.dumps(_flat(asdict(config))))


def differences(before: Values, after: Values) -> dict[str, Change]:
    """Return the old and the new value of every field that differs and is not free; a missing field
    counts as None."""
    changes = {}
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        differs = old != new
        if key == "data.path":
            differs = max(1, len(old or ())) != max(1, len(new or ()))
        if differs and class_of(key) != "free":
            changes[key] = (old, new)
    return changes


@dataclass(frozen=True)
class Row:
    """Changes that took effect at one step."""

    step: int
    """Completed steps; the changes apply from the next step on."""
    changes: dict[str, Change]
    time: str = field(default="", compare=False)
    """Time of the change, ISO 8601."""
    forked_from: str = ""
    """The run and step from which this run was forked; empty if it was not, or if the row is not
    the first."""

    def describe(self) -> str:
        """Describe the changes in one line."""
        changes = (
            f"{key} {_shown(old)} -> {_shown(new)}" for key, (old, new) in self.changes.items()
        )
        return f"from step {self.step + 1} on: {', '.join(changes)}"

    def brief(self) -> str:
        """Describe the changes, without section names, in a label for a picture."""
        changes = [
            f"{key.rpartition('.')[2]} {_shown(old)} \N{RIGHTWARDS ARROW} {_shown(new)}"
            for key, (old, new) in self.changes.items()
        ]
        text = ", ".join([*(["fork"] if self.forked_from else []), *changes])
        return textwrap.shorten(text, LABEL, placeholder="...")


@dataclass(frozen=True)
class History:
    """The changes of a run in order, and its current configuration."""

    rows: tuple[Row, ...] = ()
    values: Values = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path, unchanged: Values) -> History:
        """Read `changes.jsonl`. A run without this file has the configuration `unchanged`. Raises
        RunError if the file is damaged."""
        file = run_dir / CHANGES
        if not file.exists():
            return cls((), unchanged)
        try:
            *rows, last = [json.loads(line) for line in read_text(file).splitlines()]
            return cls(tuple(_row(mapping) for mapping in rows), dict(last["configuration"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RunError(
                f"{file}: damaged: restore it, or start again in another run directory"
            ) from None

    def to_jsonl(self) -> str:
        return "".join(
            f"{line}\n"
            for line in [
                *(_as_json(row) for row in self.rows),
                json.dumps({"configuration": self.values}),
            ]
        )

    @property
    def forked_from(self) -> str:
        """The run and step from which this run was forked; empty if it was not."""
        return next((row.forked_from for row in reversed(self.rows) if row.forked_from), "")

    def values_at(self, step: int) -> dict[str, Any]:
        """Return the configuration after `step` completed steps, before the changes that were made
        at that step or later."""
        before = dict(self.values)
        for row in reversed([row for row in self.rows if row.step >= step]):
            before.update({key: old for key, (old, _) in row.changes.items()})
        return before

    def resumed(self, step: int, changes: dict[str, Change], values: Values) -> History:
        """Return the history of a run that resumes after `step` steps with these changes and these
        values. The changes replace those recorded at that step or later."""
        fork = History(tuple(row for row in self.rows if row.step >= step)).forked_from
        row = Row(step, changes, _now(), fork)
        return History((*self._before(step), *([row] if changes or fork else [])), values)

    def forked(self, name: str, step: int, values: Values) -> History:
        """Return the history of a fork after `step` steps with these values, from the run and step
        `name`."""
        return History((*self._before(step), Row(step, {}, _now(), name)), values)

    def _before(self, step: int) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.step < step)

    def phases(self, sizes: BatchSizes) -> list[MixturePhase]:
        """Return the data mixtures of the run, the current one included, each with the first sample
        to which it applies."""
        steps = [
            row.step for row in self.rows if {"data.weights", "data.path"} & row.changes.keys()
        ]
        values = [*(self.values_at(step) for step in steps), self.values]
        return [
            MixturePhase(
                sizes.before(step + 1),
                tuple(mixture["data.weights"]),
                max(1, len(mixture["data.path"])),
            )
            for step, mixture in zip([0, *steps], values, strict=True)
        ]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _row(mapping: Mapping[str, Any]) -> Row:
    changes = {key: (old, new) for key, (old, new) in mapping.get("changes", {}).items()}
    return Row(**{**mapping, "changes": changes})


def _as_json(row: Row) -> str:
    values = asdict(row).items()
    return json.dumps({key: value for key, value in values if value or key == "step"})


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else as_toml(value)


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat.update(
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
