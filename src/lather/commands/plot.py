"""`lather plot RUN [RUN ...]`, `lather plot --schedule RUN` and `lather plot --schedule --pp P
--micro-batches N`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from lather.argument import Argument
from lather.commands.parsing import parse_arguments
from lather.config.run_folder import check_format, run_folder
from lather.errors import UserError, require


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
    forward: float = 1.0
    """Duration of a stage's forward chunk in the schedule, in any unit."""
    backward_input: float = 1.0
    """Duration of the gradient of a stage's input; a full backward chunk takes this plus the
    duration of the weight gradients."""
    backward_weight: float = 1.0
    """Duration of the weight gradients of a stage."""
    overlap: float | None = None
    """Duration of an overlapped forward and backward chunk; left out: the sum of both."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "overlap"):
            value = getattr(self, name)
            require(
                value is None or 0 < value < float("inf"),
                f"--{name.replace('_', '-')}",
                value,
                "a time above 0",
            )


def plot_command(arguments: list[str]) -> None:
    """Draw the picture and print the name of its file."""
    parsed = parse_arguments(PlotArguments, "lather plot", arguments)
    parsed = replace(parsed, runs=tuple(map(run_folder, parsed.runs)))
    for run in parsed.runs:
        check_format(run)
    print(_draw_schedule(parsed) if parsed.schedule else _draw_runs(parsed))


def _draw_runs(parsed: PlotArguments) -> Path:
    if not parsed.runs:
        raise UserError("lather plot needs at least one run: lather plot runs/quickstart")
    if parsed.pp is not None or parsed.micro_batches is not None:
        raise UserError("--pp and --micro-batches apply to the pipeline schedule: add --schedule")
    for run in parsed.runs:
        if not (run / "metrics.jsonl").is_file():
            raise UserError(
                f"{run}: not a run (it has no metrics.jsonl): give the run_dir of a training run"
            )

    from lather.train.plot import draw  # matplotlib takes a second to import

    out = parsed.out or (
        parsed.runs[0] / "loss.png" if len(parsed.runs) == 1 else Path("comparison.png")
    )
    draw(parsed.runs, out)
    return out


def _draw_schedule(parsed: PlotArguments) -> Path:
    """Draw the timeline of a run if one is given, else the schedule."""
    if len(parsed.runs) == 1 and parsed.pp is None and parsed.micro_batches is None:
        return _draw_run_timeline(parsed.runs[0], parsed.out)
    if parsed.runs or parsed.pp is None or parsed.micro_batches is None:
        raise UserError(
            "lather plot --schedule needs one run, or the size of a schedule: "
            "lather plot --schedule runs/quickstart, or lather plot --schedule --pp 4 "
            "--micro-batches 16"
        )
    return _draw_table(parsed, parsed.pp, parsed.micro_batches)


def _draw_run_timeline(run: Path, out: Path | None) -> Path:
    file = run / "timeline.jsonl"
    if not file.is_file():
        raise UserError(
            f"{run}: no timeline (it has no timeline.jsonl): give the run_dir of a run with "
            "--log.timeline-every N"
        )

    from lather.pipeline.picture import draw_timeline, read_timeline

    step, events = read_timeline(file)
    out = out or run / "timeline.png"
    draw_timeline(events, out, f"{run.name or run.resolve().name}, step {step}")
    return out


def _draw_table(parsed: PlotArguments, pp: int, micro_batches: int) -> Path:
    from lather.pipeline.picture import draw_timeline
    from lather.pipeline.replay import Durations, replay
    from lather.pipeline.schedule import Kind, dualpipev
    from lather.pipeline.transfer_queues import queue_per_neighbor

    durations = {
        Kind.FORWARD: parsed.forward,
        Kind.BACKWARD_INPUT: parsed.backward_input,
        Kind.BACKWARD_WEIGHT: parsed.backward_weight,
    }
    if parsed.overlap is not None:
        durations[Kind.OVERLAP] = parsed.overlap
    events = replay(dualpipev(pp, micro_batches), Durations(durations), queue_per_neighbor).events
    out = parsed.out or Path("schedule.png")
    draw_timeline(
        events,
        out,
        f"DualPipeV, {pp} ranks, {micro_batches} micro-batches",
        unit="durations as given",
    )
    return out
