"""Pictures of runs: loss over steps, loss over time, and time per step."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lather.config.changes import History
from lather.durations import unit_of_axis
from lather.errors import RunError
from lather.files import whole_file
from lather.train.metrics import read_metrics, training_rows

Array = npt.NDArray[np.float64]

LEAST_REACH, SHARE = 10, 0.02
"""The smoothed line takes in so many steps, or so great a share of the run, to either side."""
AVERAGE = "average_validation_loss"
"""Name of the losses of averaged weights in rows."""
COLORS = 10
"""Colors that differ clearly; further runs have them again, with other lines."""
LINES = ("-", "--", ":", "-.")
FEW = 4
"""Runs whose raw losses are drawn, too, and whose changes are described."""
BEGINNING = 0.1
"""Share of each run before which its loss may lie above the frame of a picture of several runs."""
LONGEST_NAME = 48
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
    def has_average(self) -> bool:
        """Whether losses of averaged weights are known."""
        return bool(np.isfinite(self.validation[AVERAGE]).any())

    @property
    def final_loss(self) -> float:
        """The last validation loss, or the last smoothed training loss if there is none."""
        losses = self.validation["validation_loss"]
        return float(losses[-1] if len(losses) else smoothed(self.training["loss"])[-1])


def read_curves(run_dir: Path, name: str = "") -> Curves:
    """Read a run's metrics. Raises RunError if it has no training steps, or a damaged row."""
    file = run_dir / "metrics.jsonl"
    rows, history = read_metrics(run_dir), History.read(run_dir, {})
    steps = list(training_rows(rows))
    if not steps:
        raise RunError(
            f"{file}: no training steps to draw: give the folder of a run that has trained"
        )
    validations = [row for row in rows if row.get("validation_loss") is not None]
    fields = ("step", "seconds", "loss", "step_seconds", "optimizer_seconds")
    training = _columns(steps, *fields)
    validation = _columns(validations, "step", "seconds", "validation_loss")
    of_average = [row.get(AVERAGE) for row in validations]
    validation[AVERAGE] = np.array(of_average, np.float64)  # None becomes NaN
    changes = tuple((row.step, row.brief()) for row in history.rows)
    return Curves(name or run_dir.resolve().name, training, validation, changes)


def _columns(rows: Sequence[Mapping[str, float]], *names: str) -> dict[str, Array]:
    return {name: np.array([row[name] for row in rows], np.float64) for name in names}


def short_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the paths of runs below the folder that all have in common; of a long path, only the
    end."""
    paths = [path.resolve() for path in run_dirs]
    common = os.path.commonpath([path.parent for path in paths])
    names = [os.path.relpath(path, common) for path in paths]
    return [
        name if len(name) <= LONGEST_NAME else f"\N{HORIZONTAL ELLIPSIS}{name[-LONGEST_NAME:]}"
        for name in names
    ]


def draw(run_dirs: Sequence[Path], out: Path) -> None:
    """Draw all runs in one picture: training loss (raw, with a smoothed line over it), validation
    losses, and a bar of the time per step. Several runs are in the order of their final losses, the
    greatest first, as the ends of their curves are. Raises UserError if `out` cannot be written."""
    names = [name.replace("$", r"\$") for name in short_names(run_dirs)]
    runs = [read_curves(path, name) for path, name in zip(run_dirs, names, strict=True)]
    runs.sort(key=lambda run: run.final_loss, reverse=True)
    labels = [_label(run) for run in runs]
    columns = max(1, LEGEND_CHARACTERS // (max(map(len, labels)) + 8))
    height = max(4.1, 1.3 + 0.22 * len(runs)) + 0.18 * (1 + math.ceil(len(labels) / columns))
    figure = Figure(figsize=(13, height), layout="constrained")
    over_steps, over_time, time_share = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    unit, size = unit_of_axis(max(float(run.training["seconds"][-1]) for run in runs))
    lines = []
    for index, run in enumerate(runs):
        style: dict[str, Any] = {
            "color": f"C{index % COLORS}",
            "linestyle": LINES[index // COLORS % len(LINES)],
        }
        lines.append(_draw_loss(over_steps, run, "step", 1, style, len(runs) <= FEW))
        _draw_loss(over_time, run, "seconds", size, style, len(runs) <= FEW)
        _draw_changes(over_steps, run, style["color"], len(runs) <= FEW)
    over_steps.set(xlabel="step", ylabel="loss (nats per token)", title="loss over steps")
    over_time.set(xlabel=f"time of training, {unit}", title="loss over time")
    has_average = any(run.has_average for run in runs)
    title = "dots: validation" + "; circles: averaged weights" * has_average
    title += "; greatest final loss first" * (len(runs) > 1)
    figure.legend(lines, labels, title=title, loc="outside lower center", ncols=columns, **LEGEND)
    if len(runs) > 1:
        _zoom((over_steps, over_time), runs)
    _draw_time(time_share, runs)
    for axes in (over_steps, over_time):
        axes.grid(alpha=0.25)
    for axes in (over_steps, over_time, time_share):
        axes.spines[["top", "right"]].set_visible(False)
    with whole_file(out, "--out") as aside:
        figure.savefig(aside, dpi=110, format="png")


def _label(run: Curves) -> str:
    """Return the name of a run with its final validation loss."""
    losses = run.validation["validation_loss"]
    return f"{run.name}  {losses[-1]:.4f}" if len(losses) else run.name


def _zoom(panels: Sequence[Axes], runs: Sequence[Curves]) -> None:
    """Let the steep beginnings of the curves leave the frame, so that their ends are clear."""
    ends = [run.final_loss for run in runs]
    smooth = [smoothed(run.training["loss"]) for run in runs]
    ends += [float(losses[int(BEGINNING * len(losses)) :].max()) for losses in smooth]
    for axes in panels:
        axes.set_ylim(top=max(ends) + 0.05 * (max(ends) - axes.get_ylim()[0]))


def _draw_loss(
    axes: Axes, run: Curves, over: str, unit: float, style: dict[str, Any], is_raw_drawn: bool
) -> Any:
    """Draw the losses over the column `over`, in units of its values; return the smoothed line."""
    x, loss, color = run.training[over] / unit, run.training["loss"], style["color"]
    if is_raw_drawn:
        axes.plot(x, loss, color=color, alpha=0.2, linewidth=0.8)
    (line,) = axes.plot(x, smoothed(loss), linewidth=1.4, **style)
    x = run.validation[over] / unit
    axes.plot(x, run.validation["validation_loss"], "o", color=color, markersize=5)
    if run.has_average:
        axes.plot(x, run.validation[AVERAGE], "o", color=color, markersize=5, fillstyle="none")
    return line


def _draw_changes(axes: Axes, run: Curves, color: str, is_described: bool) -> None:
    """Draw a line at each step after which the run was changed, with a description along it."""
    for step, text in run.changes:
        axes.axvline(step, color=color, linestyle=":", linewidth=1)
        if is_described:
            label = axes.annotate(
                text.replace("$", r"\$"),
                (step, 0.97),
                xycoords=axes.get_xaxis_transform(),
                xytext=(-2, 0),
                textcoords="offset points",
                color=color,
                rotation=90,
                horizontalalignment="right",
                verticalalignment="top",
                fontsize=7,
            )
            label.set_in_layout(False)


def smoothed(values: Array) -> Array:
    """Return the course of noisy values without a lag: at each place the straight line through the
    values around it, fitted with tricube weights (W. S. Cleveland, 1979)."""
    if len(values) < 2:
        return values
    reach = max(LEAST_REACH, int(SHARE * len(values)))
    distances = np.arange(-reach, reach + 1, dtype=np.float64)
    weights = (1 - (np.abs(distances) / (reach + 1)) ** 3) ** 3

    def moment(y: Array, power: int) -> Array:
        """Sum y_j w(j - i) (j - i)^power over j, for each i."""
        kernel = (weights * distances**power)[::-1]
        return np.convolve(y, kernel)[reach : reach + len(y)]

    w0, w1, w2 = (moment(np.ones_like(values), power) for power in range(3))
    line: Array = (w2 * moment(values, 0) - w1 * moment(values, 1)) / (w2 * w0 - w1**2)
    return line


def _draw_time(axes: Axes, runs: Sequence[Curves]) -> None:
    places = range(len(runs))
    medians = [1000 * float(np.median(run.training["step_seconds"])) for run in runs]
    optimizer = [median * run.optimizer_share for median, run in zip(medians, runs, strict=True)]
    rest = [median - part for median, part in zip(medians, optimizer, strict=True)]
    size = 10 if len(runs) <= FEW else 8
    axes.barh(places, rest, color="0.75", height=0.6, label="forward and backward")
    colors = [f"C{index % COLORS}" for index in places]
    bars = axes.barh(places, optimizer, left=rest, color=colors, height=0.6, label="optimizer")
    axes.bar_label(bars, [f"{run.optimizer_share:.0%}" for run in runs], padding=4, fontsize=size)
    axes.set_yticks(places, [run.name for run in runs], fontsize=size)
    axes.invert_yaxis()
    axes.set(xlabel="ms (median); in color: optimizer", title="time of a step")
    axes.margins(x=0.15)
    axes.set_ylim(len(runs) - 0.25, -0.75)
