"""Summarizes all parts: a line for each part, and the rows of all parts in a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu.parts import ROOT, MeasuredPart
from benchmarks.gpu.predicted import beside, measured_ms
from benchmarks.gpu.runner import PartOutcome, Runner
from benchmarks.report import Row

RESULTS = ROOT / "benchmarks/results/gpu"
"""It has a folder for each kind of device."""
HEAD = ("part", "status", "seconds", "result")


def collect(parts: Sequence[MeasuredPart], runner: Runner, out: Path, *, publish: bool) -> str:
    """Return the table; write it, all rows and logs to `out`, and with `publish` table and rows to
    the device's folder in benchmarks/results/gpu."""
    out.mkdir(parents=True, exist_ok=True)
    table = markdown([(part.name, *_line(part, runner)) for part in parts])
    (out / "summary.md").write_text(table + "\n")
    rows = [row for part in parts for row in rows_of(part.name, runner)]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "logs.txt").write_text(
        "".join(f"=== {part.name}\n{tail(runner, part.name, 200)}\n" for part in parts)
    )
    if publish and rows:
        folder = RESULTS / rows[0]["hardware"]["gpu"].lower().replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("rows.jsonl", "summary.md"):
            shutil.copy(out / name, folder / name)
    return table


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table that is also readable as plain text."""
    cells = [HEAD, ["---"] * len(HEAD), *lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD) - 1)]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, (*widths, 0), strict=True))
        + " |"
        for line in cells
    )


def _line(part: MeasuredPart, runner: Runner) -> tuple[str, str, str]:
    outcome = runner.last(part.name)
    if outcome is None:
        return "not run", "", ""
    status = outcome.status if runner.is_tried(part) else f"{outcome.status}, by other code"
    return status, f"{outcome.seconds:.0f}", result(part.name, outcome, runner)


def result(name: str, outcome: PartOutcome, runner: Runner) -> str:
    """Return the line of a part: its numbers, and the error if it failed."""
    describe = DESCRIBE.get(name.partition("-")[0])
    rows = rows_of(name, runner)
    numbers = describe(rows) if describe and rows else ""
    if numbers and outcome.status == "done":
        return numbers
    lines = [line.strip() for line in tail(runner, name, 30).splitlines() if line.strip()]
    last = lines[-1].replace("|", "/")[:160] if lines else ""
    return "; ".join(text for text in (numbers, last) if text)


def tail(runner: Runner, name: str, num_lines: int) -> str:
    log = runner.log(name)
    return (
        "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) if log.exists() else ""
    )


def rows_of(name: str, runner: Runner) -> list[Row]:
    """Read a part's rows; if it was ended early, those that it had written."""
    stems = [f"optimizer-{device}" for device in ("cuda", "cpu")] if name == "optimizer" else [name]
    for path in (
        runner.folder / f"{stem}{end}" for end in (".jsonl", ".partial.jsonl") for stem in stems
    ):
        if path.exists():
            return [json.loads(line) for line in path.read_text().splitlines()]
    return []


def _kernels(rows: Sequence[Row]) -> str:
    shares = {row["config"]["kernel"]: row["share"] for row in rows}
    least = min(shares, key=lambda name: shares[name])
    rates = rows[0]["rates"]
    reached = f"copy {rates['bytes'] / 1e9:,.0f} GB/s, product {rates['flops'] / 1e12:,.1f} Tflop/s"
    return (
        f"{len(rows)} right; {min(shares.values()):.0%} ({least}) to "
        f"{max(shares.values()):.0%} of the device's rates ({reached})"
    )


def _refresh(rows: Sequence[Row]) -> str:
    return ", ".join(
        f"{row['config']['hidden']} / {row['config']['mlp']}: {row['share']:.0%} of the rate of "
        f"products (goal {row['goal']:.0%}), {row['times_as_fast']:.1f} x as fast, "
        f"{measured_ms(row):.1f} ms{beside(row)}"
        for row in rows
    )


def _block(rows: Sequence[Row]) -> str:
    return "; ".join(
        f"{row['config']['contestant']}: {row['times_of_plain']:.2f} of the time and "
        f"{row['peak_of_plain']:.2f} of the bytes of plain, "
        f"{measured_ms(row):.1f} ms{beside(row)}"
        for row in rows[1:]
    )


def _fp8(rows: Sequence[Row]) -> str:
    products: dict[str, list[str]] = {}
    for row in rows:
        config = row["config"]
        if config["contestant"] == row["baseline"]:
            rate = f"{row['flops_per_second'] / 1e12:,.1f} Tflop/s"
            text = f"{config['contestant']} in bf16 {measured_ms(row):.1f} ms ({rate})"
        elif "absent" in row:
            text = f"without {config['contestant']}: {row['absent']}"
        else:
            text = f"{config['contestant']} {row['times_of_bf16']:.2f} of its time"
        products.setdefault(config["product"], []).append(text)
    return "; ".join(f"{name}: {', '.join(texts)}" for name, texts in products.items())


def _optimizer(rows: Sequence[Row]) -> str:
    times: dict[str, list[float]] = {}
    for row in rows:
        if row["benchmark"] == "optimizer" and row["config"]["contestant"] != "lather":
            times.setdefault(
                f"{row['config']['rule']} of {row['config']['contestant']}", []
            ).append(row["times_of_lather"])
    return ", ".join(
        f"{name}: {min(ratios):.2f} to {max(ratios):.2f} times ours"
        for name, ratios in times.items()
    )


def _training(rows: Sequence[Row]) -> str:
    row = rows[-1]
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.1f} GiB"
    return (
        f"{row['tokens_per_second']:,.0f} tokens/s, MFU "
        f"{row['mfu']:.1%}{memory}, {1e3 * row['step_seconds']:.0f} ms a step{beside(row)}"
    )


DESCRIBE: dict[str, Callable[[Sequence[Row]], str]] = {
    "kernels": _kernels,
    "refresh": _refresh,
    "block": _block,
    "fp8": _fp8,
    "optimizer": _optimizer,
    "training": _training,
}
