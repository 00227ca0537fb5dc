"""`python -m benchmarks.gpu`: runs all parts that are not done yet. It uses the standard library
alone until it knows that torch is installed."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu import needs
from benchmarks.gpu.parts import MeasuredPart, all_parts, first_use
from benchmarks.gpu.runner import Runner

FOLDER = Path("runs/gpu")
"""Folder in which the parts work, and which remembers what is done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit status: 1 if a part was not done, 2 if nothing can be
    done."""
    start_time, options = time.monotonic(), _parser().parse_args(arguments)
    folder = FOLDER / options.device / ("small" if options.small else "full")
    parts = all_parts(options.device, folder.resolve(), small=options.small)
    chosen = [
        part
        for part in parts
        if not options.only or any(part.name.startswith(name) for name in options.only)
    ]
    if not chosen:
        print(
            f"--only {' '.join(options.only)} fits no part: "
            f"{', '.join(part.name for part in parts)}",
            file=sys.stderr,
        )
        return 2
    if options.list:
        print("\n".join(f"{part.name:20} {part.seconds:4.0f} s  {part.title}" for part in chosen))
        return 0
    start = first_use(options.device)
    least = math.ceil((start.seconds + max(part.seconds for part in chosen)) / 60)
    if options.minutes < least:
        print(
            f"--minutes {options.minutes:g}: there must be time for the longest part: give "
            f"{least} or more",
            file=sys.stderr,
        )
        return 2
    if not _possible(chosen, options.device):
        return 2
    from benchmarks.gpu.summary import collect

    runner = Runner(folder)
    collected = partial(
        collect, parts, runner, options.out, publish=options.device == "cuda" and not options.small
    )
    if options.fresh or not all(map(runner.earlier, chosen)):
        runner.run_once(start)
    # `after` each part, so that an interruption loses nothing
    outcomes = runner.run(
        chosen, fresh=options.fresh, end=start_time + 60 * options.minutes, after=collected
    )
    print(f"\n{collected()}\n\nsummary, rows and logs in {options.out}")
    if left := [part for part in chosen if part.name not in outcomes]:
        print(
            f"not started, for want of time: {', '.join(part.name for part in left)} (at most "
            f"{sum(part.seconds for part in left):.0f} s): run the same command again"
        )
    done = [outcome for outcome in outcomes.values() if outcome.status == "done"]
    return int(len(done) < len(chosen))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make gpu ARGS=",
        description="All that a GPU has to measure; goes on where it stopped.",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a rehearsal")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="the parts whose names begin so"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="start no part that might last longer; the same command again runs what is left",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="do again what is done; with --minutes in the first call alone",
    )
    parser.add_argument("--list", action="store_true", help="the parts, and how long each may take")
    parser.add_argument(
        "--out",
        type=Path,
        default=FOLDER,
        help="folder for all rows, logs and summary, in a file each",
    )
    return parser


def _possible(parts: Sequence[MeasuredPart], device: str) -> bool:
    """Return whether anything can be done here, and print which wheels are missing."""
    stopped = {part.name: needs.missing(part.needs) for part in parts}
    stopped = {name: lacks for name, lacks in stopped.items() if lacks}
    if stopped:
        print(
            f"{', '.join(stopped)}: not possible "
            f"without\n{needs.describe(wheel for lacks in stopped.values() for wheel in lacks)}"
        )
    if lacks := needs.missing(
        {"torch": needs.TORCH, **({"triton": needs.TRITON} if device == "cuda" else {})}
    ):
        print(f"nothing can be run without\n{needs.describe(lacks)}", file=sys.stderr)
        return False
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("this torch sees no CUDA device: rehearse with DEVICE=cpu", file=sys.stderr)
        return False
    return len(stopped) < len(parts)


if __name__ == "__main__":
    raise SystemExit(main())
