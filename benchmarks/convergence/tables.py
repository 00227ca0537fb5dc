"""Makes Markdown tables of a study's findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.convergence.analysis import Findings
from benchmarks.convergence.study import Row, Study, final_loss
from lather.sweep.intervals import Mean


def markdown_table(findings: Findings, setting: str, baselines: Sequence[str]) -> str:
    """Make the table of a setting: a row for each contestant, best first, compared with each
    baseline in steps, seconds and costs if known."""
    has_curves = any(len(row["validation"]) > 2 for row in findings.rows)
    head = ["rule", "rates", "validation loss"]
    for other in baselines:
        head += [f"less {other}'s", f"steps to {other}'s loss", "seconds to it"][
            : 3 if has_curves else 1
        ]
    has_costs = any(row["setting"] == setting for row in findings.costs)
    head += ["optimizer, ms", "state, bytes per parameter"] if has_costs else []
    contestants = findings.contestants(setting)
    has_agreement = any(findings.agreement(setting, name) for name in contestants)
    head += ["choices as in bf16"] if has_agreement else []
    lines = [_line(head), _line(["---"] * len(head))]
    for name in contestants:
        rates = next(iter(findings.of(setting, name).values()))["rates"]
        cells = [
            f"`{name}`",
            " / ".join(f"{rate:.2g}" for rate in rates),
            findings.final(setting, name).text(3),
        ]
        for other in baselines:
            cells += _against(findings, setting, name, other)[: 3 if has_curves else 1]
        cost = findings.cost(setting, name)
        if has_costs:
            cells += (
                [
                    f"{cost['optimizer_ms']['median']:.1f}",
                    f"{cost['state_bytes'] / cost['parameters']:.1f}",
                ]
                if cost
                else ["", ""]
            )
        if has_agreement:
            cells.append(_cell(findings.agreement(setting, name), 4, signed=False))
        lines.append(_line(cells))
    return "\n".join(lines)


def _against(findings: Findings, setting: str, name: str, other: str) -> list[str]:
    if name == other:
        return ["", "", ""]
    means = (
        findings.difference(setting, name, other),
        findings.steps_ratio(setting, name, other),
        findings.seconds_ratio(setting, name, other),
    )
    return [
        _cell(mean, digits, signed)
        for mean, digits, signed in zip(means, (3, 2, 2), (True, False, False), strict=True)
    ]


def _cell(mean: Mean | None, digits: int, signed: bool) -> str:
    if mean is None:
        return ""
    if math.isinf(mean.value):
        return f"in {mean.finite} of {mean.count} seeds" if mean.finite else "never"
    return mean.text(digits, signed)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def rates_table(study: Study, rows: Mapping[str, Row]) -> str:
    """Make the table of the best rates and losses of a search so far; it marks searches
    that have not ended."""
    assert study.tuning is not None
    lines = [
        _line(("setting", "rule", "rates", "validation loss, seed of the search")),
        _line(["---"] * 4),
    ]
    for setting, contestant in study.pairs():
        best, missing = study.search(contestant, setting, rows)
        row = rows.get(study.trial(contestant, setting, study.tuning.seed, best).key)
        loss = "" if row is None else f"{final_loss(contestant.judged(row)):.4f}"
        still = " (search goes on)" if missing else ""
        lines.append(
            _line(
                (
                    setting,
                    f"`{contestant.name}`",
                    " / ".join(f"{rate:.3g}" for rate in best) + still,
                    loss,
                )
            )
        )
    return "\n".join(lines)
