"""`lather bench gaps`: measures what is gained by doing the optimizer's refreshes while ranks of a
pipeline wait for each other anyway.

Two ranks on this machine train the same model with `async_refresh`: *filled* does the refreshes in
pieces inside the next step's gaps, *at once* does all of them at the end of the step, as a CPU
otherwise does. After equally many steps the weights must have the same bits, or nothing is
reported. The contestants are timed by turns; then one more step of each is recorded, which says how
much of its idle time is filled.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.check import CheckError
from benchmarks.measure import percentiles
from benchmarks.report import Row, RowFile, environment
from lather.config.config import Config, LoopConfig, ParallelConfig
from lather.config.optim import optim_config
from lather.console import command_console
from lather.data.batches import Batch
from lather.engine.engine import Engine, build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.errors import require
from lather.models.qwen3_moe import Qwen3MoeConfig
from lather.optim import MatrixOptimizer
from lather.parallel.launch.start import launch
from lather.parallel.launch.world import World
from lather.parallel.mesh import Mesh
from lather.pipeline.replay import Event, Timeline
from lather.pipeline.schedule import Action, Kind
from lather.pipeline.timeline import TimelineRecorder

MODEL = Qwen3MoeConfig(
    vocab_size=1024,
    hidden_size=192,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=48,
    num_experts=8,
    num_experts_per_tok=2,
)
SEQUENCES, MICRO_BATCH = 16, 4
"""Sizes that give four micro-batches, the fewest that two ranks take, and so the longest gaps."""
CONTESTANTS = ("filled", "at once")
WARM_UP = 3
MIN_ROUNDS = 5


@dataclass(frozen=True)
class GapsBenchmark:
    """Compares refreshes in the gaps of a pipeline with refreshes at the end of a step, on two
    ranks over gloo."""

    frequency: int = 1
    """Steps between refreshes."""
    hidden_size: int = 192
    """Hidden size of the model: the size of the factors and bases."""
    sequence_length: int = 512
    """Tokens per sequence."""
    rounds: int = 9
    """Timed rounds of a run, each of one step per contestant."""
    runs: int = 3
    """How often the ranks are started."""
    out: Path = Path("benchmarks/results")
    """Folder for gaps-cpu.jsonl; a run replaces it."""

    def __post_init__(self) -> None:
        require(self.rounds >= MIN_ROUNDS, "--rounds", self.rounds, f"at least {MIN_ROUNDS}")
        require(self.frequency >= 1, "--frequency", self.frequency, "at least 1")


def run(options: GapsBenchmark) -> int:
    """Run the benchmark; returns the exit status, 1 if the contestants' weights differ."""
    console = command_console()
    file = RowFile(options.out / "gaps-cpu.jsonl")
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "found.json"
            if launch(measure, (options, str(found)), 2):
                file.discard()
                return 1
            ranks = json.loads(found.read_text("utf-8"))
        try:
            row = {**environment(torch.device("cpu"), ()), **_row(options, ranks)}
        except CheckError as error:
            file.discard()
            console.print(
                f"check failed, nothing is reported: {error}", style="red", highlight=False
            )
            return 1
        file.write([row])
        console.print(row["summary"], highlight=False)
    file.finish()
    return 0


def _row(options: GapsBenchmark, ranks: list[dict[str, Any]]) -> Row:
    sums = [{name: rank[name]["weights"] for name in CONTESTANTS} for rank in ranks]
    if any(own["filled"] != own["at once"] for own in sums):
        raise CheckError(f"the weights of {' and '.join(CONTESTANTS)} differ: {sums}")
    times = {
        name: [max(step) for step in zip(*(rank[name]["ms"] for rank in ranks), strict=True)]
        for name in CONTESTANTS
    }
    ratios = [
        filled / other for filled, other in zip(times["filled"], times["at once"], strict=True)
    ]
    timelines = {name: Timeline(tuple(_events(ranks, name))) for name in CONTESTANTS}
    idle, filled = sum(timelines["filled"].idle().values()), filled_seconds(timelines["filled"])
    median = percentiles(ratios)["median"]
    return {
        "benchmark": "gaps",
        "config": {
            "ranks": 2,
            "optimizer": "soap",
            "frequency": options.frequency,
            "rounds": options.rounds,
            "micro_batches": 4,
            "length": options.sequence_length,
        },
        "baseline": "at once",
        "step_ms": {name: percentiles(times[name]) for name in CONTESTANTS},
        "ratio": percentiles(ratios),
        "idle_ms": 1e3 * idle / 2,
        "filled_ms": 1e3 * filled / 2,
        "filled_share": filled / idle,
        "summary": (
            f"SOAP every {options.frequency}: {filled / idle:.0%} of the idle time "
            f"filled, a step takes {median:.3f} times as long"
        ),
    }


def filled_seconds(timeline: Timeline) -> float:
    """Return the part of all ranks' idle time that is filled with pieces of the optimizer's
    refreshes."""
    pieces = (event for event in timeline.events if event.action.kind is Kind.REFRESH)
    return sum(
        max(0.0, min(piece.end, timeline.end) - max(piece.start, timeline.start))
        for piece in pieces
    )


def _events(ranks: list[dict[str, Any]], name: str) -> Iterator[Event]:
    for rank in ranks:
        yield from (
            Event(number, Action.from_text(action), start, end)
            for number, action, start, end in rank[name]["events"]
        )


@dataclass
class TrainingContestant:
    """A model that is trained on this rank."""

    engine: Engine
    step: TrainStep
    recorder: TimelineRecorder
    length: int

    @classmethod
    def make(cls, name: str, options: GapsBenchmark, mesh: Mesh) -> TrainingContestant:
        config = Config(
            model=replace(MODEL, hidden_size=options.hidden_size),
            train=LoopConfig(
                batch_size=SEQUENCES,
                micro_batch_size=MICRO_BATCH,
                sequence_length=options.sequence_length,
            ),
            optim=optim_config(
                "soap", lr=1e-3, precondition_frequency=options.frequency, async_refresh=True
            ),
            parallel=ParallelConfig(pp=2),
        )
        recorder = TimelineRecorder(mesh.device, mesh.rank, mesh.size)
        engine = build_engine(config, mesh, record=recorder)
        optimizer = build_optimizer(config.optim, engine.parameters)
        step = TrainStep(engine, optimizer, 1.0)
        assert isinstance(optimizer, MatrixOptimizer)
        optimizer.defer_refreshes().deferred = name == "filled"
        return cls(engine, step, recorder, options.sequence_length)

    def timed_step(self, number: int) -> float:
        """Take one step; returns its milliseconds."""
        generator = torch.Generator().manual_seed(number)
        batch = Batch.of_tokens(
            torch.randint(MODEL.vocab_size, (SEQUENCES, self.length + 1), generator=generator)
        )
        dist.barrier()
        start = time.perf_counter()
        self.step(batch, 1e-3)
        return 1e3 * (time.perf_counter() - start)


def measure(options: GapsBenchmark, path: str, world: World) -> int:
    """Measure on one rank, as a worker of `launch`; rank 0 writes what every rank found to
    `path`."""
    torch.set_num_threads(1)
    mesh = Mesh.build(ParallelConfig(pp=2), torch.device("cpu"))
    contestants = {name: TrainingContestant.make(name, options, mesh) for name in CONTESTANTS}
    found: dict[str, Any] = {name: {"ms": []} for name in CONTESTANTS}
    order = list(CONTESTANTS)
    for number in range(WARM_UP + options.rounds):
        for name in order:
            milliseconds = contestants[name].timed_step(number)
            if number >= WARM_UP:
                found[name]["ms"].append(milliseconds)
        order.append(order.pop(0))
    for name, contestant in contestants.items():
        contestant.recorder.begin()
        contestant.timed_step(WARM_UP + options.rounds)
        events = contestant.recorder.end()
        found[name]["events"] = [
            (event.rank, str(event.action), event.start, event.end) for event in events
        ]
        found[name]["weights"] = [
            p.double().sum().item() for p in contestant.engine.part.parameters()
        ]
    everybody: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(found, everybody)
    if everybody is not None:
        Path(path).write_text(json.dumps(everybody), encoding="utf-8")
    return 0
