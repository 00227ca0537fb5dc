"""`lather bench launches`: counts all cases, writes a row for each, and prints two tables: of the
counts, and of the times that the time model predicts from them (`lather.time_model.rates`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu.block import CONTESTANTS
from benchmarks.gpu.refresh import HIDDEN_AND_MLP
from benchmarks.launches.block_cases import block_case
from benchmarks.launches.cases import (
    PUBLISHED,
    LaunchCase,
    loss_case,
    optimizer_case,
    step_case,
)
from benchmarks.launches.counter import CountedPhase, Counter
from benchmarks.launches.gpu_cases import (
    STEP_RULES,
    gpu_block_case,
    gpu_step_case,
    refresh_case,
)
from benchmarks.report import Row, RowFile, environment
from lather.console import FittedTable, command_console, titled_table
from lather.errors import require
from lather.time_model.rates import H100

RANKS = 8
"""Number of ranks among which the sequence of a block is divided, or its experts, if they are
divided."""
GIB = 2**30
SHOWN_KINDS = 5
"""Kinds of kernels that the table names, those that take longest."""


@dataclass(frozen=True)
class LaunchesBenchmark:
    """Counts kernel launches, bytes, flops and host waits of a GPU, without one, and predicts times
    from them and from measured or assumed rates of an H100."""

    parts: tuple[Literal["optimizer", "block", "loss", "step", "refresh", "gpu"], ...] = (
        "optimizer",
        "block",
        "loss",
        "step",
        "refresh",
        "gpu",
    )
    """Parts to count; gpu: the block and the steps that `make gpu` measures."""
    models: tuple[str, ...] = tuple(PUBLISHED)
    """Models whose sizes are used: DeepSeek-V2-Lite and Qwen3-30B-A3B."""
    rules: tuple[str, ...] = ("soap", "klsoap", "soap_muon", "muon")
    """Rules of the optimizer. All but the first are counted only for the first model on the most
    ranks."""
    ranks: tuple[int, ...] = (8, 16)
    """Numbers of ranks; the optimizer's step of one of them is counted."""
    layers: int = 0
    """How many layers the optimizer's models have, for a quick look; 0: all."""
    out: Path = Path("benchmarks/results")
    """Folder for launches.jsonl; a run replaces it."""

    def __post_init__(self) -> None:
        require(
            all(model in PUBLISHED for model in self.models),
            "--models",
            self.models,
            f"some of {', '.join(PUBLISHED)}",
        )
        require(all(ranks >= 1 for ranks in self.ranks), "--ranks", self.ranks, "at least 1 each")
        require(self.layers >= 0, "--layers", self.layers, "at least 0")


def cases(options: LaunchesBenchmark) -> Iterator[LaunchCase]:
    """All cases that the options ask for."""
    layers = options.layers or None
    if "optimizer" in options.parts:
        for number, rule in enumerate(options.rules):
            for model in options.models[: 1 if number else None]:
                for ranks in options.ranks[-1:] if number else options.ranks:
                    yield optimizer_case(rule, model, ranks, layers)
    for model in options.models if "block" in options.parts else ():
        yield block_case(model)
        yield block_case(model, weight_dtype="bfloat16")
        yield block_case(model, fp8=True)
        yield block_case(model, context_ranks=RANKS)
        yield block_case(model, expert_ranks=RANKS)
    if "loss" in options.parts:
        yield loss_case()
    for model in options.models[:1] if "step" in options.parts else ():
        yield step_case(model)
    for hidden, mlp in HIDDEN_AND_MLP if "refresh" in options.parts else ():
        yield refresh_case(hidden, mlp)
    if "gpu" in options.parts:
        yield from map(gpu_block_case, CONTESTANTS[1:])
        yield from map(gpu_step_case, STEP_RULES)


def run(options: LaunchesBenchmark) -> int:
    """Count all cases; returns the exit status."""
    file, common = RowFile(options.out / "launches.jsonl"), environment(torch.device("cpu"), ())
    console = command_console()
    found = []
    for case in cases(options):
        for row in count(case):
            found.append({**common, "benchmark": "launches", **row})
            file.write(found[-1:])
            counted = f"{row['total']['launches']:,} launches, {row['predicted_ms']:,.1f} ms"
            console.print(f"{row['case']}: {counted} predicted", highlight=False)
            if unknown := row["total"]["unknown"]:
                console.print(f"kernels of unknown kinds: {', '.join(unknown)}", highlight=False)
    file.finish()
    console.print(table(found))
    console.print(predicted_table(found))
    console.print(f"rows {file.path}", highlight=False)
    return 0


def count(case: LaunchCase) -> Iterator[Row]:
    """Count a case; returns its rows."""
    with Counter() as counter:
        for name in case.rows(counter):
            yield {
                "case": f"{case.name}: {name}",
                "config": {**case.config, "row": name},
                "total": _as_row(counter.total),
                "phases": {phase: _as_row(counts) for phase, counts in counter.phases.items()},
                **prediction(counter.total, case.model_flops),
                "waits": [
                    {"what": what, "where": where, "times": times}
                    for (what, where), times in counter.waits.most_common()
                ],
                "notes": dict(counter.notes.most_common()),
            }


def _as_row(phase: CountedPhase) -> Row:
    seconds = sorted(phase.seconds.items(), key=lambda item: -item[1])
    names = {"kernels": dict(phase.kernels.most_common(8)), "unknown": dict(phase.unknown)}
    row = {**asdict(phase), **names}
    of_devices = {name: round(1e3 * time, 4) for name, time in row.pop("of_devices").items()}
    del row["seconds"]
    return row | {
        "predicted_ms": {kind: round(1e3 * time, 4) for kind, time in seconds},
        "of_devices_ms": of_devices,
    }


def prediction(counts: CountedPhase, model_flops: float) -> Row:
    """Predict the time of a row: that of the device or that of the host, whichever is longer."""
    device, host = sum(counts.seconds.values()), counts.launches * H100.host_seconds
    seconds = max(device, host)
    mfu = model_flops / seconds / H100.peak_flops if model_flops else None
    return {
        "of_devices_ms": {name: 1e3 * max(time, host) for name, time in counts.of_devices.items()},
        "predicted_ms": 1e3 * seconds,
        "device_ms": 1e3 * device,
        "host_ms": 1e3 * host,
        "model_flops": model_flops,
        "mfu": mfu,
    }


def table(rows: list[Row]) -> FittedTable:
    """Make a table with a line for each phase of each row, and one for all phases."""
    numbers = (
        "launches",
        "triton",
        "views",
        "GiB read",
        "GiB written",
        "TFLOP",
        "host waits",
        "peak GiB",
    )
    out = titled_table("", ("case", "phase"), numbers)
    for row in rows:
        for phase, counts in [*row["phases"].items(), ("all", row["total"])]:
            sizes = [f"{counts[name] / GIB:.2f}" for name in ("bytes_read", "bytes_written")]
            counted = [f"{counts[name]:,}" for name in ("launches", "triton", "views")]
            last = (
                f"{counts['flops'] / 1e12:.2f}",
                str(counts["host_waits"]),
                f"{counts['peak_bytes'] / GIB:.2f}",
            )
            out.add_row(
                row["case"] if phase == "all" else "",
                phase.removeprefix("lather."),
                *counted,
                *sizes,
                *last,
            )
        out.add_section()
    return out


def predicted_table(rows: list[Row]) -> FittedTable:
    """Make a table of the predicted times of each row, and of the kinds of kernels that take most
    of it."""
    numbers = ("ms", "device", "host", "MFU")
    out = titled_table(f"predicted for an {H100.name}", ("case",), numbers)
    out.add_column("of the device")
    for row in rows:
        most = list(row["total"]["predicted_ms"].items())[:SHOWN_KINDS]
        out.add_row(
            row["case"],
            *(f"{row[key]:,.1f}" for key in ("predicted_ms", "device_ms", "host_ms")),
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            ", ".join(f"{kind} {ms:,.1f}" for kind, ms in most),
        )
    return out
