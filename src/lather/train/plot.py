"""Pictures of runs: loss over steps, loss over time, and time per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lather.config.changes import History
from lather.durations import unit_of_axis
from lather.errors import RunError
from lather.files import read_rows, whole_file
from lather.train.metrics import training_rows
from lather.train.run_names import short_names

Array = npt.NDArray[np.float64]

LEAST_REACH, SHARE = 10, 0.02
"""The smoothed line takes in so many steps, or so great a share of the run, to either side."""
COLORS = 10
"""Colors that can be told apart; further runs have them again, with other lines and markers."""
LINES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")
FEW = 4
"""Runs of which the raw loss is drawn, too."""
BEGINNING = 0.1
"""Share of each run before which its loss may lie above the frame of a picture of several runs."""
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "title_fontsize": 8}
LEGEND_CHARACTERS = 190
"""Characters of a line of the legend below the picture."""


@dataclass(frozen=True)
class Curves:
    """The rows of one run as arrays."""

    name: str
    training: dict[str, Array]
    """Fields of the training steps' rows, by name."""
    validation: dict[str, Array]
    """Fields of the validations' rows, by name."""
    changes: tuple[tuple[int, str], ...]
    """Steps after which the run was changed or forked, each with a short description."""

    @property
    def optimizer_share(self) -> float:
        """Fraction of the time of all steps that the optimizer takes."""
        return float(self.training["optimizer_seconds"].sum() / self.training["step_seconds"].sum())

    @property
    def final_loss(self) -> float:
        """The last validation loss, or the last smoothed training loss if there is none."""
        losses = self.validation["validation_loss"]
        return float(losses[-1] if len(losses) else smoothed(self.training["loss"])[-1])


@dataclass(frozen=True)
class Look:
    """The look of a run among others: a color, and a line and a marker that change when the colors
    begin again."""

    color: str
    line: str
    marker: str
    is_alone: bool
    has_raw: bool
    """Few runs are drawn: each with the loss that is not smoothed, and its changes in words."""

    @classmethod
    def of(cls, index: int, number: int) -> Look:
        turn = index // COLORS
        return cls(
            f"C{index % COLORS}",
            LINES[turn % len(LINES)],
            MARKERS[turn % len(MARKERS)],
            number == 1,
            number <= FEW,
        )


def read_curves(run_dir: Path) -> Curves:
    """Read a run's metrics. Raises RunError if the run has no training steps."""
    file = run_dir / "metrics.jsonl"
    rows, history = read_rows(file), History.read(run_dir, {})
    steps = list(training_rows(rows))
    if not steps:
        raise RunError(
            f"{file}: no training steps to draw: give the folder of a run that has trained"
        )
    try:
        training = _columns(steps, "step", "seconds", "loss", "step_seconds", "optimizer_seconds")
        validation = _columns(
            [row for row in rows if row.get("validation_loss") is not None],
            "step",
            "seconds",
            "validation_loss",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file}: not the metrics of a run ({error!r}): restore the file") from None
    name = run_dir.name or str(run_dir.resolve())
    return Curves(
        name, training, validation, tuple((row.step, row.brief()) for row in history.rows)
    )


def _columns(rows: Sequence[Mapping[str, float]], *names: str) -> dict[str, Array]:
    return {name: np.array([row[name] for row in rows], np.float64) for name in names}


def draw(run_dirs: Sequence[Path], out: Path) -> None:
    """Draw all runs in one picture: training loss (raw, with a smoothed line over it), validation
    losses, and a bar of the time per step. Several runs are in the order of their final losses, the
    greatest first, as the ends of their curves are. Raises UserError if `out` cannot be written."""
    names, common = short_names(run_dirs)
    runs = [read_curves(run_dir) for run_dir in run_dirs]
    runs = [
        replace(run, name=name.replace("$", r"\$")) for run, name in zip(runs, names, strict=True)
    ]
    runs.sort(key=lambda run: run.final_loss, reverse=True)
    labels = [_label(run) for run in runs] if len(runs) > 1 else []
    columns = max(1, int(LEGEND_CHARACTERS // (max(map(len, labels)) + 8))) if labels else 1
    height = max(4.1, 1.3 + 0.22 * len(runs)) + 0.18 * (1 + math.ceil(len(labels) / columns))
    figure = Figure(figsize=(13, height), layout="constrained")
    over_steps, over_time, time_share = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    unit, size = unit_of_axis(max(float(run.training["seconds"][-1]) for run in runs))
    for index, run in enumerate(runs):
        look = Look.of(index, len(runs))
        _draw_loss(over_steps, run, look, "step", 1)
        _draw_changes(over_steps, run, look)
        _draw_loss(over_time, run, look, "seconds", size)
    over_steps.set(xlabel="step", ylabel="loss (nats per token)", title="loss over steps")
    over_time.set(xlabel=f"time of training, {unit}", title="loss over time")
    if labels:
        _zoom((over_steps, over_time), runs)
        handles = [line for line in over_steps.lines if not str(line.get_label()).startswith("_")]
        title = (
            "greatest final loss first; dots: "
            f"validation{f'; all names begin with {common}' * bool(common)}"
        )
        figure.legend(
            handles,
            labels,
            title=title.replace("$", r"\$"),
            loc="outside lower center",
            ncols=columns,
            **LEGEND,
        )
    else:
        figure.legend(
            *over_steps.get_legend_handles_labels(), loc="outside lower center", ncols=2, **LEGEND
        )
    _draw_time(time_share, runs)
    for axes in (over_steps, over_time):
        axes.grid(alpha=0.25)
    for axes in (over_steps, over_time, time_share):
        axes.spines[["top", "right"]].set_visible(False)
    with whole_file(out, "--out") as aside:
        figure.savefig(aside, dpi=110, format="png")


def _label(run: Curves) -> str:
    """The name of a run and its final validation loss."""
    losses = run.validation["validation_loss"]
    return f"{run.name}  {losses[-1]:.4f}" if len(losses) else run.name


def _zoom(panels: Sequence[Axes], runs: Sequence[Curves]) -> None:
    """Let the curves' steep beginnings leave the frame, so that their ends are apart."""
    smooth = [smoothed(run.training["loss"]) for run in runs]
    values = [*(float(losses.min()) for losses in smooth), *(run.final_loss for run in runs)]
    least, most = (
        min(values),
        max(float(losses[int(BEGINNING * len(losses)) :].max()) for losses in smooth),
    )
    margin = 0.05 * (max(most, *values) - least) or 0.1
    for axes in panels:
        axes.set_ylim(least - margin, max(most, *values) + margin)


def _draw_loss(axes: Axes, run: Curves, look: Look, over: str, unit: float) -> None:
    """Draw the losses over the column `over`, in units of its values."""
    x, loss, validation_loss = (
        run.training[over] / unit,
        run.training["loss"],
        run.validation["validation_loss"],
    )
    if look.has_raw:
        axes.plot(x, loss, color=look.color, alpha=0.2, linewidth=0.8)
    label = f"training: {run.name}"
    axes.plot(x, smoothed(loss), look.line, color=look.color, linewidth=1.4, label=label)
    if len(validation_loss):
        label = f"validation: {run.name} ({validation_loss[-1]:.3f})" if look.is_alone else "_"
        x = run.validation[over] / unit
        axes.plot(
            x,
            validation_loss,
            look.marker,
            color=look.color,
            label=label,
            markersize=6 if look.has_raw else 4,
        )


def _draw_changes(axes: Axes, run: Curves, look: Look) -> None:
    """Draw a line at each step after which the run was changed, with a short description along
    it."""
    for step, text in run.changes:
        axes.axvline(step, color=look.color, linestyle=":", linewidth=1)
        if not look.has_raw:
            continue
        label = axes.annotate(
            text.replace("$", r"\$"),
            (step, 0.97),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-2, 0),
            textcoords="offset points",
        )
        label.set_in_layout(False)
        label.set(
            rotation=90,
            horizontalalignment="right",
            verticalalignment="top",
            fontsize=7,
            color=look.color,
        )


def smoothed(values: Array) -> Array:
    """The course of noisy values without a lag: weighted means (tricube) over as many values before
    as after.

    Towards the start fewer and fewer are taken in, because losses fall steeply there. At the end,
    where there are none to come, it is a straight line through the last ones, fitted with the same
    weights (W. S. Cleveland, 1979): a mean would lag again.
    """
    reach, number = max(LEAST_REACH, int(SHARE * len(values))), len(values)
    result = np.array(values)
    if number > 2 * reach:
        weights = _tricube(np.arange(-reach, reach + 1, dtype=np.float64), reach)
        result[reach : number - reach] = np.convolve(values, weights / weights.sum(), "valid")
    for index in [
        *range(1, min(2 * reach, number)),
        *range(max(2 * reach, number - reach), number),
    ]:
        own = min(reach, (index + 1) // 2)
        distances = np.arange(-own, min(own, number - 1 - index) + 1, dtype=np.float64)
        weights, near = _tricube(distances, own), values[index - own : index - own + len(distances)]
        _, result[index] = np.polyfit(distances, near, 1, w=np.sqrt(weights))
    return result


def _tricube(distances: Array, reach: int) -> Array:
    return (1 - (np.abs(distances) / (reach + 1)) ** 3) ** 3


def _draw_time(axes: Axes, runs: Sequence[Curves]) -> None:
    rows = range(len(runs))
    medians = [1000 * float(np.median(run.training["step_seconds"])) for run in runs]
    optimizer = [median * run.optimizer_share for median, run in zip(medians, runs, strict=True)]
    rest = [median - own for median, own in zip(medians, optimizer, strict=True)]
    height, size = (0.5, 10) if len(runs) <= FEW else (0.7, 8)
    axes.barh(rows, rest, color="0.75", height=height, label="forward and backward")
    colors = [Look.of(index, len(runs)).color for index in rows]
    bars = axes.barh(rows, optimizer, left=rest, color=colors, height=height, label="optimizer")
    axes.bar_label(bars, [f"{run.optimizer_share:.0%}" for run in runs], padding=4, fontsize=size)
    axes.set_yticks(rows, [run.name for run in runs], fontsize=size)
    axes.invert_yaxis()
    axes.set(xlabel="ms (median); in color: optimizer", title="time of a step")
    axes.margins(x=0.15)
    axes.set_ylim(len(runs) - 0.25, -0.75)
