"""`lather bench optimizer`: compares our SOAP, Muon and AdamW with other libraries' optimizers of
the same rule, on the same gradients.

For each rule, set of matrices and frequency the case is checked first (`benchmarks.check`). Then
all contestants, alive in the same process, do their first step (not timed, as it differs in SOAP)
and an interval of warm-up in which temporary memory is measured. Then rounds are timed, in each of
which every contestant does whole intervals. `--runs 3` does all of it three times.

Trade-off: interleaved rounds keep every contestant's state in memory at once, but all contestants
meet the same noise of a shared machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from benchmarks import optimizer_report, report
from benchmarks.check import CheckError, check_case
from benchmarks.contestants import (
    DEFAULT_SETS,
    OPTIONS,
    OURS,
    PEERS,
    SETS,
    Contestant,
    OptimizerCase,
    check_installed,
    gradient_pool,
    lather_options,
)
from benchmarks.measure import (
    peak_temporary_bytes,
    percentiles,
    run_steps,
    state_bytes,
    time_rounds,
)
from benchmarks.report import Row
from lather.console import command_console
from lather.errors import UserError, require

MIN_ROUNDS = 5
ALL_PEERS = tuple(dict.fromkeys(peer for peers in PEERS.values() for peer in peers))


@dataclass(frozen=True)
class OptimizerBenchmark:
    """Compares time and memory of SOAP, Muon and AdamW with heavyball, pytorch_optimizer and torch,
    set to the same rules."""

    rules: tuple[str, ...] = tuple(OPTIONS)
    """Rules to measure: soap (peers: heavyball, pytorch_optimizer), muon and adamw (peer:
    torch)."""
    sets: tuple[str, ...] = DEFAULT_SETS
    """Sets of matrices: many_small (128 of 64x128), experts (8 x 16 of 128x256, 2-D), experts_3d
    (the same, ours in 3-D parameters), wide (24 of 256x512), big (4 of 768x2048)."""
    frequencies: tuple[int, ...] = (1, 10)
    """Steps between refreshes of SOAP."""
    rounds: int = 7
    """Timed rounds, each of whole intervals per contestant."""
    runs: int = 1
    """How often everything is done; three or more runs give a range."""
    out: Path = Path("benchmarks/results")
    """Folder for optimizer-DEVICE.jsonl; a run replaces that of the same device."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to run on."""
    peers: tuple[str, ...] = ALL_PEERS
    """Libraries to compare with: heavyball, pytorch_optimizer, torch, or none."""

    def __post_init__(self) -> None:
        for option, names, known in (("--rules", self.rules, OPTIONS), ("--sets", self.sets, SETS)):
            unknown = [name for name in names if name not in known]
            offered = DEFAULT_SETS if known is SETS else tuple(known)
            if unknown or not names:
                raise UserError(
                    f"{option} {' '.join(unknown)} is not valid: use some of {', '.join(offered)}"
                )
        require(
            bool(self.frequencies) and min(self.frequencies) >= 1,
            "--frequencies",
            self.frequencies,
            "numbers of at least 1",
        )
        require(self.rounds >= MIN_ROUNDS, "--rounds", self.rounds, f"at least {MIN_ROUNDS}")
        require(self.runs >= 1, "--runs", self.runs, "at least 1")
        right = self.peers == ("none",) or (bool(self.peers) and set(self.peers) <= set(ALL_PEERS))
        require(right, "--peers", " ".join(self.peers), f"some of {', '.join(ALL_PEERS)}, or none")

    def peers_of(self, rule: str) -> tuple[str, ...]:
        return tuple(peer for peer in PEERS[rule] if peer in self.peers)

    @property
    def chosen_peers(self) -> tuple[str, ...]:
        return tuple(
            peer for peer in ALL_PEERS if any(peer in self.peers_of(rule) for rule in self.rules)
        )


def run(options: OptimizerBenchmark) -> int:
    """Run the benchmark; returns the exit status, 1 if a case failed its check."""
    check_installed(options.chosen_peers)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this torch sees no CUDA device: use --device cpu")
    device, console = torch.device(options.device), command_console()
    common = report.environment(device, options.chosen_peers)
    file = report.RowFile(options.out / f"optimizer-{device.type}.jsonl")
    rows: list[Row] = []
    failures = 0
    for number in range(1, options.runs + 1):
        for measured in _cases(options, device, console):
            failures += measured is None
            new = [{**common, "run": number, **row} for row in measured or []]
            file.write(new)
            rows += new
    if not rows:
        file.discard()
        console.print("no case passed its check: nothing was measured", style="red")
        return 1
    file.finish()
    optimizer_report.print_table(rows, console)
    for line in optimizer_report.summary(rows):
        console.print(line, highlight=False)
    console.print(f"rows {file.path}", highlight=False)
    return 1 if failures else 0


def _cases(
    options: OptimizerBenchmark, device: torch.device, console: Console
) -> Iterator[list[Row] | None]:
    """Measure case after case; yields its rows, or None for a case whose check failed."""
    for rule in options.rules:
        for name in options.sets:
            for frequency in options.frequencies if rule == "soap" else (1,):
                case = OptimizerCase(rule, SETS[name], frequency)
                yield _checked_and_measured(case, options, device, console)


def _checked_and_measured(
    case: OptimizerCase,
    options: OptimizerBenchmark,
    device: torch.device,
    console: Console,
) -> list[Row] | None:
    start = time.perf_counter()
    try:
        rows = measure_case(case, options, device)
    except CheckError as error:
        console.print(f"{case}: check failed, not measured: {error}", style="red", highlight=False)
        return None
    shown = "  ".join(
        f"{row['config']['contestant']} {row['step_ms']['median']:.2f} ms" for row in rows
    )
    console.print(
        f"{case}: checked  {shown}  ({time.perf_counter() - start:.0f} s)", highlight=False
    )
    return rows


def measure_case(
    case: OptimizerCase, options: OptimizerBenchmark, device: torch.device
) -> list[Row]:
    """Measure a case; returns a row for each contestant, ours first. Raises CheckError."""
    peers = options.peers_of(case.rule)
    checked = check_case(case, peers, device)
    pool = gradient_pool(case.matrices, device)
    contestants = [case.contestant(name, pool) for name in (OURS, *peers)]
    peaks = {
        contestant.name: _warm_up(contestant, case.frequency, device) for contestant in contestants
    }
    times = time_rounds(contestants, case.steps_per_round, options.rounds, device)
    rows = []
    for contestant in contestants:
        rows.append(
            {
                "benchmark": "optimizer",
                "config": _config(case, contestant.name, options, device),
                "baseline": list(peers) if contestant.name == OURS else OURS,
                "check": checked,
                "step_ms": percentiles(times[contestant.name]),
                "round_ms": times[contestant.name],
                "state_bytes": state_bytes(contestant),
                "state_bound_bytes": case.state_bound_bytes(),
                "peak_temporary_bytes": peaks[contestant.name],
            }
        )
    for row in rows:
        row["times_of_lather"] = optimizer_report.ratio(row, rows[0])
    return rows


def _warm_up(contestant: Contestant, frequency: int, device: torch.device) -> int:
    """Do the first step and an interval; returns the most temporary bytes of that interval."""
    run_steps(contestant, 1)
    return peak_temporary_bytes(lambda: run_steps(contestant, frequency), device)


def _config(
    case: OptimizerCase, contestant: str, options: OptimizerBenchmark, device: torch.device
) -> dict[str, Any]:
    ours, matrices = contestant == OURS, case.matrices
    return {
        "rule": case.rule,
        "set": matrices.name,
        "num_matrices": matrices.num_matrices,
        "shape": list(matrices.shape),
        "experts": matrices.experts if ours else 1,
        "matrix_layout": matrices.matrix_layout if ours else None,
        "contestant": contestant,
        "frequency": case.frequency,
        "rounds": options.rounds,
        "steps_per_round": case.steps_per_round,
        "device": device.type,
        "options": {
            **OPTIONS[case.rule],
            **(lather_options(case.rule, case.frequency) if ours else {}),
        },
    }
