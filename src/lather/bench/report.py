"""What a benchmark leaves: JSON rows in a file that appears whole, a table, a bar picture, a summary against the targets."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import lather
from lather.bench.contestants import OURS
from lather.errors import UserError

Row = dict[str, Any]


def environment(device: torch.device, peers: Sequence[str]) -> Row:
    """The part of a row that is the same in the whole run: commit, hardware, versions."""
    return {
        **_commit(),
        "hardware": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lather": lather.__version__,
            **{peer: _version(peer) for peer in peers},
        },
    }


def _commit() -> Row:
    """`dirty`: the code that is measured is not the commit's. Both are null outside a repository."""
    source = Path(lather.__file__).parent
    try:
        commit = _git(source, "rev-parse", "HEAD")
        tracked = _git(source, "ls-files", "__init__.py")
        return (
            {"commit": commit, "dirty": bool(_git(source, "status", "--porcelain", "--", "."))}
            if tracked
            else {"commit": None, "dirty": None}
        )
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class RowFile:
    """Rows are written aside as they come, and take the place of the last run's file at the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.aside = path, path.with_suffix(".partial.jsonl")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.aside.write_text("")
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written ({error.strerror}): give another --out") from None

    def write(self, rows: Iterable[Row]) -> None:
        with self.aside.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def finish(self) -> None:
        os.replace(self.aside, self.path)

    def discard(self) -> None:
        self.aside.unlink()


def case_name(row: Row) -> str:
    return f"{row['config']['set']} f={row['config']['frequency']}"


def ratio(row: Row, ours: Row) -> float:
    """How many times our time a contestant takes: the median of the rounds' ratios, as neighbours in time share the machine's noise."""
    return float(np.median(np.divide(row["round_ms"], ours["round_ms"])))


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Rows of steps as {case: {contestant: row}}, in order."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["benchmark"] == "optimizer":
            cases.setdefault(case_name(row), {})[row["config"]["contestant"]] = row
    return cases


def print_table(rows: Sequence[Row], console: Console) -> None:
    table = Table("set", "f", "optimizer", "ms/step", "p20-p80", "against ours", "roofline", "state", "temporary")
    for case in by_case(rows).values():
        for name, row in case.items():
            config, ms = row["config"], row["step_ms"]
            table.add_row(
                config["set"],
                str(config["frequency"]),
                name,
                f"{ms['median']:.2f}",
                f"{ms['p20']:.2f}-{ms['p80']:.2f}",
                f"{ratio(row, case[OURS]):.2f} x",
                f"{row['roofline_fraction']:.0%}",
                _mib(row["state_bytes"]),
                _mib(row["peak_temporary_bytes"]),
            )
        table.add_section()
    console.print(table)
    for row in rows:
        if row["benchmark"] == "refresh":
            config, ms = row["config"], row["ms"]["median"]
            console.print(f"refresh of {config['factors']} {config['contestant']}: {ms:.1f} ms, {_mib(row['peak_temporary_bytes'])}")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def summary(rows: Sequence[Row]) -> list[str]:
    """A line per target: what was asked for and what was measured."""
    cases = by_case(rows)
    lines = []
    for peer in sorted({name for case in cases.values() for name in case} - {OURS}):
        ratios = {name: ratio(case[peer], case[OURS]) for name, case in cases.items() if peer in case}
        worst = min(ratios, key=lambda name: ratios[name])
        lines.append(
            f"against {peer}: geometric mean {np.exp(np.mean(np.log(list(ratios.values())))):.2f} x faster (target 1.5), "
            f"slowest row {worst}: {ratios[worst]:.2f} x (target 1)"
        )
    ours = {name: case[OURS] for name, case in cases.items()}
    fractions = {name: row["roofline_fraction"] for name, row in ours.items()}
    if fractions:
        worst = min(fractions, key=lambda name: fractions[name])
        lines.append(f"against the roofline: at most {1 / fractions[worst]:.2f} x its time, {worst} (target 1.5)")
    for name in ("experts", "experts_3d"):
        if f"{name} f=1" in ours and f"{name} f=10" in ours:
            gain = ours[f"{name} f=1"]["step_ms"]["median"] / ours[f"{name} f=10"]["step_ms"]["median"]
            lines.append(f"{name}: frequency 10 is {gain:.2f} x faster than frequency 1 (target 3, on experts)")
    if ours:
        worst = max(ours, key=lambda name: ours[name]["state_bytes"] / ours[name]["state_bound_bytes"])
        share = ours[worst]["state_bytes"] / ours[worst]["state_bound_bytes"]
        lines.append(f"state: at most {share:.1%} of 2mn + 2m^2 + 2n^2 + m + n floats per matrix, {worst} (target 100%)")
    lines.extend(_refresh_lines(rows))
    return lines


def _refresh_lines(rows: Sequence[Row]) -> list[str]:
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["benchmark"] == "refresh":
            times.setdefault(row["config"]["factors"], {})[row["config"]["contestant"]] = row["ms"]["median"]
    return [
        f"refresh of {name}: {case['one_by_one'] / case[OURS]:.2f} x faster than one by one"
        for name, case in times.items()
        if case.keys() >= {OURS, "one_by_one"}
    ]


def draw(rows: Sequence[Row], out: Path) -> None:
    """Grouped bars per set and frequency, milliseconds on a log axis, and a line at each case's roofline."""
    cases = by_case(rows)
    names = list(dict.fromkeys(name for case in cases.values() for name in case))
    figure = Figure(figsize=(max(7.0, 1.1 * len(cases) + 1), 4.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        _draw_bars(axes, cases, name, (index - (len(names) - 1) / 2) * width, width)
    rooflines = [case[OURS]["roofline_ms"] for case in cases.values()]
    axes.hlines(rooflines, np.arange(len(cases)) - 0.45, np.arange(len(cases)) + 0.45, color="black", linestyles="--", label="roofline")
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [name.replace(" ", "\n") for name in cases])
    any_row = rows[0]["hardware"]
    axes.set(ylabel="ms per step (median, p20 to p80)", title=f"SOAP at the same rule, {any_row['gpu'] or any_row['cpu']}")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    aside = out.with_suffix(".partial.png")
    figure.savefig(aside, dpi=110, format="png")
    os.replace(aside, out)


def _draw_bars(axes: Axes, cases: Mapping[str, Mapping[str, Row]], name: str, offset: float, width: float) -> None:
    shown = [(index, case[name]) for index, case in enumerate(cases.values()) if name in case]
    medians = np.array([row["step_ms"]["median"] for _, row in shown])
    spread = [medians - [row["step_ms"]["p20"] for _, row in shown], [row["step_ms"]["p80"] for _, row in shown] - medians]
    axes.bar(
        [index + offset for index, _ in shown],
        medians,
        width,
        yerr=np.clip(spread, 0, None),
        error_kw={"elinewidth": 0.8},
        color="C0" if name == OURS else {"heavyball": "0.55", "pytorch_optimizer": "0.75"}.get(name),
        label=name,
    )
