"""`lather bench pipeline`: compares bytes and time of a pipeline rank with torch's own DualPipeV
runtime on the same model and table.

    bytes     the most saved bytes of each rank, counted, so exact on any machine: 2 pipeline x 2
              expert ranks; 8, 16 and 32 micro-batches, in which they should not grow
    time      milliseconds of a step, 2 pipeline ranks, medians over interleaved rounds, ratios to
              torch's
    bubble    idle time: DualPipeV's table replayed for 2 to 16 ranks with the durations of actions
              measured in our executor on 2

The model has 8 layers of DeepSeek-V2-Lite's proportions in fp32, its widths divided by 16, the
first layer dense as in the published model. It has 16 routed experts instead of 64 (their number
changes nothing that is kept), 6 per token and 2 shared, as published. `pipeline_ranks` has the
contestants. Every case is checked first: on each rank loss and gradients of all contestants agree.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from benchmarks.check import CheckError
from benchmarks.measure import percentiles
from benchmarks.pipeline_bubble import bubble_rows
from benchmarks.pipeline_measure import TOLERANCE, BytesJob, TimeJob, largest, measure
from benchmarks.pipeline_ranks import PipelineCase
from benchmarks.pipeline_report import print_table, summary
from benchmarks.report import Row, RowFile, environment, gather
from lather.console import command_console
from lather.errors import require
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.parallel.launch.start import launch

MIN_ROUNDS = 5
MODEL = DeepseekV2Config(
    vocab_size=6400,
    hidden_size=128,
    intermediate_size=684,
    moe_intermediate_size=88,
    num_hidden_layers=8,
    num_attention_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=16,
    n_shared_experts=2,
    num_experts_per_tok=6,
)
"""A quarter as many heads as the published model, each of a quarter of the width."""
CASE = PipelineCase(MODEL, batch=1, length=256, num_micro_batches=8)

TIMED = TimeJob(2, 1, CASE, ("torch", "held", "attention", "ours"))


@dataclass(frozen=True)
class PipelineJobs:
    """The measurements, and the ranks and micro-batches that they need."""

    bytes: tuple[BytesJob, ...] = (
        BytesJob(2, 2, CASE, ("torch", "held", "experts", "attention", "ours")),
        BytesJob(2, 2, replace(CASE, num_micro_batches=16), ("torch", "attention", "ours")),
        BytesJob(2, 2, replace(CASE, num_micro_batches=32), ("torch", "attention", "ours")),
    )
    """The jobs that count bytes; torch comes first, because the others are checked against it."""
    time: TimeJob = TIMED
    bubble_ranks: tuple[int, ...] = (2, 4, 8, 16)


@dataclass(frozen=True)
class PipelineBenchmark:
    """Measures bytes, time and bubble of the pipeline, against torch's own runtime. On CPU, with
    gloo."""

    parts: tuple[Literal["bytes", "time", "bubble"], ...] = ("bytes", "time", "bubble")
    """Parts to measure; bubble needs the durations that time measures."""
    rounds: int = 9
    """Timed rounds, each of a step per contestant."""
    out: Path = Path("benchmarks/results")
    """Folder for pipeline-cpu.jsonl; a run replaces it."""

    def __post_init__(self) -> None:
        require(self.rounds >= MIN_ROUNDS, "--rounds", self.rounds, f"at least {MIN_ROUNDS}")
        require(bool(self.parts), "--parts", self.parts, "some of bytes, time, bubble")


def run(options: PipelineBenchmark, measurements: PipelineJobs | None = None) -> int:
    """Run the benchmark; returns the exit status, 1 if a case failed its check."""
    measurements, console = measurements or PipelineJobs(), command_console()
    common = environment(torch.device("cpu"), ())
    file = RowFile(options.out / "pipeline-cpu.jsonl")
    rows = gather(_rows(options, measurements), common, file, console)
    if not rows:
        return 1
    print_table(rows, console)
    for line in summary(rows):
        console.print(line, highlight=False)
    console.print(f"rows {file.path}", highlight=False)
    return 0


def _rows(options: PipelineBenchmark, measurements: PipelineJobs) -> Iterator[Row]:
    jobs: list[BytesJob | TimeJob] = list(measurements.bytes) if "bytes" in options.parts else []
    if {"time", "bubble"} & set(options.parts):
        jobs.append(replace(measurements.time, rounds=options.rounds))
    for _, together in itertools.groupby(jobs, key=lambda job: (job.pp, job.ep)):
        for job, ranks in _in_ranks(list(together)):
            if isinstance(job, BytesJob):
                yield from bytes_rows(job, ranks)
                continue
            yield from time_rows(job, ranks)
            if "bubble" in options.parts:
                yield from bubble_rows(ranks, measurements.bubble_ranks)


def _in_ranks(jobs: Sequence[BytesJob | TimeJob]) -> Iterator[tuple[BytesJob | TimeJob, list[Row]]]:
    """Launch ranks that run the jobs, which all want the same mesh; yields each job and the results
    of every rank."""
    with tempfile.TemporaryDirectory() as folder:
        if launch(measure, (tuple(jobs), folder), jobs[0].pp * jobs[0].ep):
            raise CheckError("a rank failed, see above")
        for number, job in enumerate(jobs):
            yield job, json.loads((Path(folder) / f"{number}.json").read_text("utf-8"))


def _checked(name: str, ranks: list[Row]) -> dict[str, float]:
    """Return the largest differences over the ranks. Raises CheckError if they are too large."""
    errors = {
        key: largest(rank[name]["check"][key] for rank in ranks)
        for key in ("error_of_loss", "error_of_gradients")
    }
    if not (error := largest(errors.values())) <= TOLERANCE:
        raise CheckError(
            f"{name}: differs from torch's runtime by {error:.1e}, more than {TOLERANCE:.0e}"
        )
    return errors


def _config(job: BytesJob | TimeJob, contestant: str) -> Row:
    case = job.case
    sizes = {
        "batch": case.batch,
        "length": case.length,
        "micro_batches": case.num_micro_batches,
        "dtype": str(case.dtype)[6:],
    }
    return {
        "contestant": contestant,
        "pp": job.pp,
        "ep": job.ep,
        **sizes,
        "model": asdict(case.model),
    }


def bytes_rows(job: BytesJob, ranks: list[Row]) -> Iterator[Row]:
    """Make a row for each contestant. Raises CheckError."""
    for name in job.contestants:
        counts = [rank[name]["counts"] for rank in ranks]
        yield {
            "benchmark": "bytes",
            "config": _config(job, name),
            "baseline": "held, torch",
            "check": _checked(name, ranks),
            "peak_bytes": max(count["saved"] for count in counts),
            "by_rank": counts,
        }


def time_rows(job: TimeJob, ranks: list[Row]) -> Iterator[Row]:
    """Make a row for each contestant; a step takes as long as its slowest rank."""
    times = {
        name: [max(steps) for steps in zip(*(rank[name]["ms"] for rank in ranks), strict=True)]
        for name in job.contestants
    }
    for name in job.contestants:
        yield {
            "benchmark": "time",
            "config": {**_config(job, name), "rounds": job.rounds},
            "baseline": "torch",
            "check": _checked(name, ranks),
            "step_ms": percentiles(times[name]),
            "round_ms": times[name],
            "times_of_torch": percentiles(
                [ours / theirs for ours, theirs in zip(times[name], times["torch"], strict=True)]
            )["median"],
        }
