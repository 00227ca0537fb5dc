"""Makes table and summary of `lather bench pipeline`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from benchmarks.report import Row
from lather.console import titled_table

LABELS = {
    "ours": "ours",
    "attention": "ours, attention again",
    "experts": "ours, gate/up again",
    "held": "(a) no lean block, no early frees",
    "torch": "(b) torch's runtime",
}
MIB = 2**20


def part(rows: Iterable[Row], benchmark: str) -> list[Row]:
    return [row for row in rows if row["benchmark"] == benchmark]


def peaks(rows: Iterable[Row]) -> dict[int, dict[str, Row]]:
    """Return the rows of bytes as {micro-batches: {contestant: row}}, contestants in the order of
    `LABELS`."""
    cases: dict[int, dict[str, Row]] = {}
    for row in part(rows, "bytes"):
        cases.setdefault(row["config"]["micro_batches"], {})[row["config"]["contestant"]] = row
    return {
        number: {name: case[name] for name in LABELS if name in case}
        for number, case in cases.items()
    }


def print_table(rows: Sequence[Row], console: Console) -> None:
    for number, case in peaks(rows).items():
        mesh = next(iter(case.values()))["config"]
        case_name = f"{number} micro-batches, pp {mesh['pp']}, ep {mesh['ep']}"
        table = titled_table(
            "", [case_name], ("saved, MiB", "of (a)", "of (b)", "with temporaries, MiB")
        )
        for name, row in case.items():
            shares = (
                f"{row['peak_bytes'] / case[base]['peak_bytes']:.3f}" if base in case else ""
                for base in ("held", "torch")
            )
            table.add_row(
                LABELS[name],
                f"{row['peak_bytes'] / MIB:.1f}",
                *shares,
                f"{max(rank['with_temporaries'] for rank in row['by_rank']) / MIB:.1f}",
            )
        console.print(table)
    if timed := part(rows, "time"):
        table = titled_table(
            "", ["step on two pipeline ranks"], ("ms", "p20-p80", "times of torch's")
        )
        for row in sorted(timed, key=lambda row: list(LABELS).index(row["config"]["contestant"])):
            ms = row["step_ms"]
            values = (
                f"{ms['median']:.0f}",
                f"{ms['p20']:.0f}-{ms['p80']:.0f}",
                f"{row['times_of_torch']:.3f}",
            )
            table.add_row(LABELS[row["config"]["contestant"]], *values)
        console.print(table)
    if bubbles := part(rows, "bubble"):
        table = titled_table(
            "",
            ["ranks"],
            ("idle at the tip, ms", "bubble"),
        )
        for row in bubbles:
            cells = f"{row['idle_ms']:.1f}", f"{row['bubble_fraction']:.2%}"
            table.add_row(str(row["config"]["pp"]), *cells)
        console.print(table)


def summary(rows: Sequence[Row]) -> list[str]:
    """Make a line for each target: the goal and what was measured."""
    cases, lines = peaks(rows), []
    if cases:
        first, last = min(cases), max(cases)
        size = {
            number: {name: row["peak_bytes"] for name, row in case.items()}
            for number, case in cases.items()
        }
        for name in ("ours", "attention", "experts"):
            if name in size[first]:
                of_held, of_torch = (
                    size[first][name] / size[first][base] for base in ("held", "torch")
                )
                lines.append(
                    f"saved bytes, {LABELS[name]}: {of_held:.3f} of (a) (target 0.5), "
                    f"{of_torch:.3f} of (b) (target 0.4)"
                )
        for name in ("ours", "torch"):
            growth = size[last][name] / size[first][name] - 1
            target = " (target 2%)" if name == "ours" else ""
            lines.append(
                f"growth from {first} to {last} micro-batches, {LABELS[name]}: {growth:.1%}{target}"
            )
    for row in part(rows, "time"):
        if row["config"]["contestant"] == "ours":
            lines.append(
                f"step time, ours: {row['times_of_torch']:.3f} of torch's runtime (target 1.05)"
            )
    return lines
