"""Pictures of runs: loss over steps, loss over seconds, and time per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lather.config.changes import History
from lather.errors import RunError
from lather.files import read_rows, whole_file
from lather.train.metrics import training_rows

Array = npt.NDArray[np.float64]

LEAST_REACH, SHARE = 10, 0.02
"""The smoothed line takes in so many steps, or so great a share of the run, to either side."""


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


def read_curves(run_dir: Path) -> Curves:
    """Read a run's metrics. Raises RunError if the run has no training steps."""
    file = run_dir / "metrics.jsonl"
    rows, history = read_rows(file), History.read(run_dir, {})
    steps = list(training_rows(rows))
    if not steps:
        raise RunError(f"{file}: no training steps to draw: give the folder of a run that has trained")
    try:
        training = _columns(steps, "step", "seconds", "loss", "step_seconds", "optimizer_seconds")
        validation = _columns([row for row in rows if row.get("validation_loss") is not None], "step", "seconds", "validation_loss")
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file}: not the metrics of a run ({error!r}): restore the file") from None
    name = (run_dir.name or str(run_dir.resolve())).replace("$", r"\$")
    return Curves(name, training, validation, tuple((row.step, row.brief()) for row in history.rows))


def _columns(rows: Sequence[Mapping[str, float]], *names: str) -> dict[str, Array]:
    return {name: np.array([row[name] for row in rows], np.float64) for name in names}


def draw(run_dirs: Sequence[Path], out: Path) -> None:
    """Draw all runs in one picture: training loss (raw, with a smoothed line over it), validation losses, and a bar of the time per
    step. Raises UserError if `out` cannot be written."""
    runs = [read_curves(run_dir) for run_dir in run_dirs]
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    over_steps, over_seconds, time_share = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    for index, run in enumerate(runs):
        _draw_loss(over_steps, run, f"C{index}", "step")
        _draw_changes(over_steps, run, f"C{index}")
        _draw_loss(over_seconds, run, f"C{index}", "seconds")
    over_steps.set(xlabel="step", ylabel="loss (nats per token)", title="loss over steps")
    over_seconds.set(xlabel="seconds of training", title="loss over seconds")
    over_steps.legend(frameon=False, fontsize=8)
    _draw_time(time_share, runs)
    for axes in (over_steps, over_seconds):
        axes.grid(alpha=0.25)
    for axes in (over_steps, over_seconds, time_share):
        axes.spines[["top", "right"]].set_visible(False)
    with whole_file(out, "--out") as aside:
        figure.savefig(aside, dpi=110, format="png")


def _draw_loss(axes: Axes, run: Curves, color: str, over: str) -> None:
    """Draw the losses over the column `over`."""
    x, loss, validation_loss = run.training[over], run.training["loss"], run.validation["validation_loss"]
    axes.plot(x, loss, color=color, alpha=0.2, linewidth=0.8)
    axes.plot(x, smoothed(loss), color=color, linewidth=1.4, label=f"training: {run.name}")
    if len(validation_loss):
        label = f"validation: {run.name} ({validation_loss[-1]:.3f})"
        axes.plot(run.validation[over], validation_loss, "o", color=color, label=label)


def _draw_changes(axes: Axes, run: Curves, color: str) -> None:
    """Draw a line at each step after which the run was changed, with a short description along it."""
    for step, text in run.changes:
        axes.axvline(step, color=color, linestyle=":", linewidth=1)
        label = axes.annotate(
            text.replace("$", r"\$"), (step, 0.97), xycoords=axes.get_xaxis_transform(), xytext=(-2, 0), textcoords="offset points"
        )
        label.set_in_layout(False)
        label.set(rotation=90, horizontalalignment="right", verticalalignment="top", fontsize=7, color=color)


def smoothed(values: Array) -> Array:
    """The course of noisy values without a lag: weighted means (tricube) over as many values before as after.

    Towards the start fewer and fewer are taken in, because losses fall steeply there. At the end, where there are none to come, it is a
    straight line through the last ones, fitted with the same weights (W. S. Cleveland, 1979): a mean would lag again.
    """
    reach, number = max(LEAST_REACH, int(SHARE * len(values))), len(values)
    result = np.array(values)
    if number > 2 * reach:
        weights = _tricube(np.arange(-reach, reach + 1, dtype=np.float64), reach)
        result[reach : number - reach] = np.convolve(values, weights / weights.sum(), "valid")
    for index in [*range(1, min(2 * reach, number)), *range(max(2 * reach, number - reach), number)]:
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
    axes.barh(rows, rest, color="0.75", height=0.5, label="forward and backward")
    bars = axes.barh(rows, optimizer, left=rest, color=[f"C{index}" for index in range(len(runs))], height=0.5, label="optimizer")
    axes.bar_label(bars, [f"{run.optimizer_share:.0%}" for run in runs], padding=4)
    axes.set_yticks(rows, [run.name for run in runs])
    axes.invert_yaxis()
    axes.set(xlabel="ms per step (median)", title="time of a step, optimizer in color")
    axes.margins(x=0.15)
    axes.set_ylim(len(runs) - 0.25, -0.75)
