"""`lather doctor [--nproc N] [--run-dir DIR]`: checks what a training run needs, also under
torchrun or srun."""

from __future__ import annotations

import collections
import contextlib
import datetime
import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from rich.console import Console
from rich.markup import escape

from lather.commands.parsing import parse_arguments
from lather.console import command_console, titled_table
from lather.doctor.checks import CHECKS, Finding, check_links
from lather.doctor.facts import RankFacts, find_facts, probe_file
from lather.doctor.links import measure_links
from lather.engine.step import pick_device
from lather.files import nearest_folder, write_numbers
from lather.parallel.launch.start import GroupOptions, run_ranks, take_nproc
from lather.parallel.launch.world import World

STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}
TIMEOUT = 120.0
"""Seconds that ranks wait for each other."""


@dataclass(frozen=True)
class DoctorArguments:
    """Check versions, devices and their rates, memory, the disk of the run directory, and
    with --nproc N (or under torchrun or srun) the links between ranks. The exit status is 1 if
    something is wrong."""

    run_dir: Path = Path("runs")
    """Where runs are written; it is not made."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of each rank."""
    json: Path | None = None
    """File to write every number to; `lather plan --rates FILE` predicts times from it."""


def doctor_command(arguments: list[str]) -> int:
    """Examine the machine, in this process or in several, and print the findings."""
    world = World.of_environment(os.environ)
    rest, nproc = take_nproc(arguments, world)
    parsed = parse_arguments(DoctorArguments, "lather doctor [--nproc N]", rest)
    return run_ranks(
        examine, (parsed,), world, nproc, GroupOptions(pick_device(parsed.device), TIMEOUT)
    )


def examine(parsed: DoctorArguments, world: World) -> int:
    """Examine the machine of one rank; the first rank shows the findings of all. Return the exit
    status, the same in every rank."""
    device = world.device(pick_device(parsed.device))
    facts, links = [find_facts(world, device, parsed.run_dir)], []
    if world.size > 1:
        facts = _gather(facts[0], parsed.run_dir, world)
        links = measure_links(device)
    findings = [finding for check in CHECKS for finding in check(facts)] + list(check_links(links))
    if world.rank == 0:
        if parsed.json:
            lists: dict[str, Sequence[Any]] = {"findings": findings, "ranks": facts, "links": links}
            numbers = {name: [*map(asdict, lists[name])] for name in lists}
            write_numbers(parsed.json, {"day": datetime.date.today().isoformat(), **numbers})
        show(findings, world.size, command_console())
    return int(any(finding.verdict == "wrong" for finding in findings))


def _gather(facts: RankFacts, run_dir: Path, world: World) -> list[RankFacts]:
    """Return the facts of all ranks, and whether they see the same run directory. Every rank calls
    this."""
    file = probe_file(nearest_folder(run_dir), "shared")
    with contextlib.suppress(OSError):
        if world.rank == 0:
            file.touch()
    dist.barrier()
    facts = replace(facts, sees_run_dir=file.exists())
    everybody: list[RankFacts] = [facts] * world.size
    dist.all_gather_object(everybody, facts)
    with contextlib.suppress(OSError):
        if world.rank == 0:
            file.unlink()
    return everybody


def show(findings: Sequence[Finding], num_ranks: int, console: Console) -> None:
    """Print a line for each finding, the remedy below it, and how many are wrong."""
    table = titled_table(left=("", "check"))
    table.add_column("found")
    for topic, group in itertools.groupby(findings, lambda finding: finding.topic):
        table.add_row("", f"[bold]{topic}")
        for finding in group:
            remedy = escape(finding.remedy)
            remedy = f"\n[bold]\N{RIGHTWARDS ARROW} {remedy}[/]" if remedy else ""
            verdict = f"[{STYLES[finding.verdict]}]{finding.verdict}"
            name, value = escape(finding.name), escape(finding.found)
            table.add_row(verdict, f"  {name}", f"{value}{remedy}")
    console.print(table, highlight=False)
    counts = collections.Counter(finding.verdict for finding in findings)
    wrong = {0: "nothing is wrong", 1: "1 thing is wrong"}.get(
        counts["wrong"], f"{counts['wrong']} things are wrong"
    )
    style = STYLES["wrong" if counts["wrong"] else "ok"]
    console.print(f"{wrong}; warnings: {counts['warning']}", style=style, highlight=False)
    if num_ranks == 1:
        console.print(
            "links between ranks are measured with --nproc 2 or more, or under torchrun",
            style="dim",
        )
