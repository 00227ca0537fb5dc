"""`lather plot RUN [RUN ...]`, `lather plot --schedule RUN` and `lather plot --schedule --pp P
--micro-batches N`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lather.argument import Argument
from lather.commands.parsing import parse_arguments
from lather.config.run_folder import check_format, run_folder
from lather.errors import UserError


@dataclass(frozen=True)
class PlotArguments:
    """Draw one picture: of one or more runs, of a run's pipeline timeline, or of the DualPipeV
    schedule."""

    runs: Annotated[tuple[Path, ...], Argument(positional=True)] = ()
    """Run directories."""
    out: Path | None = None
    """PNG file to write; left out: loss.png in the run's folder for one run, comparison.png here
    for several; with --schedule timeline.png in the run's folder, or schedule.png here."""
    schedule: bool = False
    """Draw the timeline of the newest step in a run's timeline.jsonl; without a run, the schedule
    for --pp and --micro-batches."""
    pp: int | None = None
    """Pipeline ranks of the schedule."""
    micro_batches: int | None = None
    """Micro-batches of the schedule, at least 2 * pp."""


def plot_command(arguments: list[str]) -> None:
    """Draw the picture and print the name of its file."""
    parsed = parse_arguments(PlotArguments, "lather plot", arguments)
    runs = list(map(run_folder, parsed.runs))
    for run in runs:
        check_format(run)
    print(_draw_schedule(parsed, runs) if parsed.schedule else _draw_runs(parsed, runs))


def _draw_runs(parsed: PlotArguments, runs: list[Path]) -> Path:
    if not runs:
        raise UserError("lather plot needs at least one run: lather plot runs/quickstart")
    if parsed.pp is not None or parsed.micro_batches is not None:
        raise UserError("--pp and --micro-batches apply to the pipeline schedule: add --schedule")
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise UserError(
                f"{run}: not a run (it has no metrics.jsonl): give the run_dir of a training run"
            )

    from lather.train.plot import draw  # matplotlib takes a second to import

    out = parsed.out or (runs[0] / "loss.png" if len(runs) == 1 else Path("comparison.png"))
    draw(runs, out)
    return out


def _draw_schedule(parsed: PlotArguments, runs: list[Path]) -> Path:
    """Draw the timeline of the run, or without a run the schedule with equal durations."""
    from lather.pipeline.picture import draw_timeline, read_timeline
    from lather.pipeline.replay import Durations, replay
    from lather.pipeline.schedule import Kind, dualpipev
    from lather.pipeline.transfer_queues import queue_per_neighbor

    pp, micro_batches = parsed.pp, parsed.micro_batches
    if len(runs) == 1 and pp is None and micro_batches is None:
        (run,) = runs
        file, out = run / "timeline.jsonl", parsed.out or run / "timeline.png"
        if not file.is_file():
            raise UserError(
                f"{run}: no timeline (it has no timeline.jsonl): give the run_dir of a run with "
                "--log.timeline-every N"
            )
        step, events = read_timeline(file)
        draw_timeline(events, out, f"{run.name or run.resolve().name}, step {step}")
        return out
    if runs or pp is None or micro_batches is None:
        raise UserError(
            "lather plot --schedule needs one run, or the size of a schedule: "
            "lather plot --schedule runs/quickstart, or lather plot --schedule --pp 4 "
            "--micro-batches 16"
        )
    durations = Durations(
        dict.fromkeys((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), 1.0)
    )
    schedule = replay(dualpipev(pp, micro_batches), durations, queue_per_neighbor)
    out, title = parsed.out or Path("schedule.png"), f"DualPipeV, {pp} ranks"
    title = f"{title}, {micro_batches} micro-batches"
    draw_timeline(schedule.events, out, title, unit="equal durations of chunks")
    return out
