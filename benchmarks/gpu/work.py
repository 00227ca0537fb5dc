"""Does the work of a part: `python -m benchmarks.gpu.work PART --device cuda --out FOLDER`."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.check import CheckError
from benchmarks.report import RowFile, environment

MODULES = {
    "kernels": "benchmarks.kernels",
    "refresh": "benchmarks.gpu.refresh",
    "block": "benchmarks.gpu.block",
    "fp8": "benchmarks.gpu.fp8",
    "training": "benchmarks.gpu.training",
}
"""The module of each part. It has `rows(settings, contestant)`, which yields rows and raises
CheckError; `contestant` is what follows the part's name, or ""."""


@dataclass(frozen=True)
class Settings:
    """Where a part runs, and how large it is."""

    device: torch.device
    small: bool
    """Whether sizes are tiny, for a rehearsal."""
    seconds: float = math.inf
    """Seconds after which a part that can stop early returns what it has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the part; returns its exit status, 1 if a check failed. Rows of the cases before that are
    kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args(arguments)
    if options.part == "optimizer":
        return _optimizer(options.device, options.out, small=options.small)
    settings = Settings(torch.device(options.device), options.small, options.seconds)
    name, _, contestant = options.part.partition("-")
    common, file, status = (
        environment(settings.device, ("triton",)),
        RowFile(options.out / f"{options.part}.jsonl"),
        0,
    )
    try:
        for row in importlib.import_module(MODULES[name]).rows(settings, contestant):
            file.write([{**common, **row}])
            print({key: value for key, value in row.items() if key != "losses"}, flush=True)
    except CheckError as error:
        print(f"check failed, not measured: {error}", file=sys.stderr)
        status = 1
    file.finish()
    return status


def _optimizer(device: str, out: Path, *, small: bool) -> int:
    from benchmarks import optimizer
    from benchmarks.gpu.needs import installed
    from benchmarks.gpu.parts import PEERS

    peers = (*(peer for peer in PEERS if installed(peer)), "torch")
    sets, frequencies = (
        (("tiny", "tiny_3d"), (3,)) if small else (("experts", "experts_3d", "wide", "big"), (10,))
    )
    options = optimizer.OptimizerBenchmark(
        sets=sets,
        frequencies=frequencies,
        rounds=5,
        out=out,
        device=device,  # type: ignore[arg-type]
        peers=peers,
    )
    return optimizer.run(options)


if __name__ == "__main__":
    raise SystemExit(main())
