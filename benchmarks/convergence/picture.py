"""Draws the validation loss over steps, over seconds and against the optimizer's bytes: a row of
three panels for each setting."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.convergence.analysis import Findings
from benchmarks.convergence.study import Row

COLORS = ("C0", "C3", "C2", "C1", "C4", "C5", "C6", "C7", "C8", "C9", "0.3", "0.6")


def draw(findings: Findings, contestants: Sequence[str], out: Path) -> None:
    """Draw these contestants, each as a line with a band from the best seed to the worst."""
    settings = [
        setting
        for setting in findings.settings()
        if set(contestants) & set(findings.contestants(setting))
    ]
    figure = Figure(figsize=(13, 3.6 * len(settings)), layout="constrained")
    all_axes = figure.subplots(len(settings), 3, squeeze=False)
    for setting, axes in zip(settings, all_axes, strict=True):
        _draw_setting(findings, setting, contestants, axes)
    all_axes[0][0].legend(frameon=False, fontsize=8)
    aside = out.with_suffix(".partial.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(aside, dpi=90, format="png")
    os.replace(aside, out)


def _draw_setting(
    findings: Findings, setting: str, contestants: Sequence[str], axes: Sequence[Axes]
) -> None:
    over_steps, over_seconds, over_bytes = axes
    finals = []
    for color, name in zip(COLORS, contestants, strict=False):
        rows = list(findings.of(setting, name).values())
        if not rows:
            continue
        cost = findings.cost(setting, name)
        points = _band(rows)
        finals.append(points[-1][1])
        _line(over_steps, [(step, *losses) for step, *losses in points], color, name)
        if cost is not None:
            ms = cost["gradient_ms"]["median"] + cost["optimizer_ms"]["median"]
            _line(
                over_seconds, [(step * ms / 1e3, *losses) for step, *losses in points], color, name
            )
            final = findings.final(setting, name)
            place = cost["state_bytes"] / cost["parameters"], final.value
            over_bytes.errorbar(
                place[0],
                place[1],
                yerr=[[max(0.0, final.half_width)]] * 2,
                fmt="o",
                color=color,
                elinewidth=0.8,
            )
            over_bytes.annotate(name, place, xytext=(5, 3), textcoords="offset points", fontsize=7)
    top = max(finals) + 3 * (max(finals) - min(finals)) + 0.05
    for panel, label in (
        (over_steps, "steps"),
        (over_seconds, "seconds, gradient and optimizer measured apart"),
    ):
        panel.set(xlabel=label, ylabel="validation loss, nats", ylim=(min(finals) - 0.05, top))
    over_bytes.set(
        xlabel="optimizer state, bytes per parameter", ylabel="validation loss at the end"
    )
    over_steps.set_title(setting, loc="left")
    for panel in axes:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)


def _band(rows: Sequence[Row]) -> list[tuple[float, float, float, float]]:
    """Yield (step, mean, least, most) over seeds, at the steps that all seeds have."""
    curves = [dict(row["validation"]) for row in rows]
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    losses = [[curve[step] for curve in curves] for step in common]
    return [
        (step, statistics.fmean(each), min(each), max(each))
        for step, each in zip(common, losses, strict=True)
    ]


def _line(axes: Axes, points: Sequence[tuple[float, ...]], color: str, name: str) -> None:
    x, mean, least, most = zip(*points, strict=True)
    axes.plot(x, mean, color=color, linewidth=1.2, label=name)
    axes.fill_between(x, least, most, color=color, alpha=0.15, linewidth=0)
