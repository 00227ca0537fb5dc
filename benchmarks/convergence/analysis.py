"""Draws conclusions from a study's rows: means with intervals over seeds, differences in pairs,
steps and seconds to another rule's loss.

Runs of one seed share the first weights and every batch, so contestants are compared seed by seed.
The interval is that of the differences: their mean, plus and minus Student's 97.5 % quantile times
the standard error. Seconds are steps times the milliseconds of a gradient and an optimizer step,
which are measured separately with nothing else running (`benchmarks.convergence.cost`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.convergence.study import Row, final_loss
from lather.sweep.intervals import Mean


def steps_to(row: Row, loss: float) -> float:
    """Return the steps until the validation curve, drawn straight between its points, first reaches
    `loss`; infinite if it never does."""
    for (step_0, loss_0), (step_1, loss_1) in itertools.pairwise(row["validation"]):
        if loss_1 <= loss:
            share = (loss_0 - loss) / (loss_0 - loss_1) if loss_0 > loss else 0.0
            return float(step_0 + share * (step_1 - step_0))
    return math.inf


@dataclass(frozen=True)
class Findings:
    """The rows of compared runs and of costs, and the questions that they answer."""

    rows: Sequence[Row]
    costs: Sequence[Row] = ()

    def of(self, setting: str, contestant: str) -> dict[int, Row]:
        """Return the rows of a contestant, by seed."""
        return {
            row["seed"]: row
            for row in self.rows
            if (row["setting"], row["contestant"]) == (setting, contestant)
        }

    def settings(self) -> list[str]:
        return list(dict.fromkeys(row["setting"] for row in self.rows))

    def contestants(self, setting: str) -> list[str]:
        """Return the contestants of a setting, the best mean loss first."""
        names = dict.fromkeys(row["contestant"] for row in self.rows if row["setting"] == setting)
        return sorted(names, key=lambda name: self.final(setting, name).value)

    def final(self, setting: str, contestant: str) -> Mean:
        """Return the validation loss at the end."""
        return Mean.of([final_loss(row) for row in self.of(setting, contestant).values()])

    def difference(self, setting: str, contestant: str, other: str) -> Mean | None:
        """Return the final loss less the other contestant's, seed by seed; None without a common
        seed."""
        return self._paired(
            setting, contestant, other, lambda mine, theirs: final_loss(mine) - final_loss(theirs)
        )

    def percent_above(self, setting: str, contestant: str, other: str) -> Mean | None:
        """Return by how many percent the final loss is above the other contestant's, seed by
        seed."""
        return self._paired(
            setting,
            contestant,
            other,
            lambda mine, theirs: 100 * (final_loss(mine) / final_loss(theirs) - 1),
        )

    def agreement(self, setting: str, contestant: str) -> Mean | None:
        """Return the share of the routers' choices, over the layers, that experts in bf16 with the
        same weights make, too, at the end of a run with experts in FP8; None for others."""
        rows = self.of(setting, contestant).values()
        shares = [row["routing_agreement"][-1][1] for row in rows if "routing_agreement" in row]
        return Mean.of(list(map(statistics.fmean, shares))) if shares else None

    def steps_ratio(self, setting: str, contestant: str, other: str) -> Mean | None:
        """Return the steps to the other contestant's final loss, as a share of the other's steps,
        seed by seed."""
        return self._paired(
            setting,
            contestant,
            other,
            lambda mine, theirs: steps_to(mine, final_loss(theirs)) / theirs["steps"],
        )

    def seconds_ratio(self, setting: str, contestant: str, other: str) -> Mean | None:
        """Return the seconds to the other contestant's final loss, as a share of the other's
        seconds; None, too, where a cost is not known."""
        steps = self.steps_ratio(setting, contestant, other)
        costs = [self.cost(setting, name) for name in (contestant, other)]
        if steps is None or None in costs:
            return None
        mine, theirs = (
            cost["gradient_ms"]["median"] + cost["optimizer_ms"]["median"]
            for cost in costs
            if cost is not None
        )
        return replace(
            steps, value=steps.value * mine / theirs, half_width=steps.half_width * mine / theirs
        )

    def cost(self, setting: str, contestant: str) -> Row | None:
        """Return the row of the contestant's milliseconds and bytes."""
        return next(
            (
                row
                for row in self.costs
                if (row["setting"], row["contestant"]) == (setting, contestant)
            ),
            None,
        )

    def _paired(
        self, setting: str, contestant: str, other: str, compare: Callable[[Row, Row], float]
    ) -> Mean | None:
        mine, theirs = self.of(setting, contestant), self.of(setting, other)
        values = [compare(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]
        return Mean.of(values) if values else None
