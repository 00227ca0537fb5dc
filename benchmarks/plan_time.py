"""How long `lather plan` says that a step takes, beside what it took.

    python -m benchmarks.plan_time cpu [--out FILE]    a configuration is measured and corrects the
                                                       rates of a core; five others are predicted
    python -m benchmarks.plan_time gpu [--out FILE]    the trainings that `make gpu` has measured,
                                                       at the rates as they are

On a CPU the steps of all configurations take turns, each on one thread, and count the processor's
time, so that other processes on the machine do not count; the time is a median, as `--rates RUN`
takes it. Exit status 1: a prediction on a CPU is off by more than 25 %.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.gpu.training import LEARNING_RATE
from benchmarks.report import Row, environment
from lather.config.config import Config
from lather.config.optim import optim_config
from lather.config.toml_file import load_config
from lather.data.batches import Batch
from lather.engine.engine import build_engine
from lather.engine.optimizer import build_optimizer, head_rows
from lather.engine.step import TrainStep
from lather.memory.plan import plan
from lather.memory.step_time import StepTime, step_time, typical_seconds
from lather.memory.workers import Assumed, worker_processes
from lather.parallel.mesh import Mesh

ROOT = Path(__file__).parents[1]
WIDER: dict[str, Any] = {"hidden_size": 240, "intermediate_size": 576, "moe_intermediate_size": 144}
MEASURED = "quickstart, batch 4"
ROUNDS = 12
"""Steps of each configuration; more than an interval between refreshes."""
MOST_ERROR = 0.25
GPUS = {"h100": "nvidia-h100-80gb-hbm3", "h200": "nvidia-h200"}


def configurations() -> dict[str, Config]:
    """The measured configuration, and the five that are predicted."""
    config = load_config(ROOT / "configs/quickstart.toml")
    base = replace(config, train=replace(config.train, batch_size=4))

    def with_model(**sizes: Any) -> Config:
        return replace(base, model=replace(base.model, **sizes))

    return {
        MEASURED: base,
        "batch 12": replace(base, train=replace(base.train, batch_size=12)),
        "length 512": replace(base, train=replace(base.train, sequence_length=512)),
        "2 layers": with_model(num_hidden_layers=2),
        "width 240": with_model(**WIDER),
        "soap_muon": replace(base, optim=optim_config("soap_muon", lr=1e-3)),
    }


class MeasuredSteps:
    """The steps of a configuration, one by one."""

    def __init__(self, config: Config) -> None:
        self.config = config = config.resolved()
        engine = build_engine(config, Mesh.single(torch.device("cpu")))
        optimizer = build_optimizer(config.optim, engine.parameters, head_rows(config))
        clips = config.train.max_grad_norm, config.train.qk_clip
        self.step = TrainStep(engine, optimizer, *clips)
        self.rows: list[dict[str, Any]] = []

    def run(self, generator: torch.Generator) -> None:
        """Run a step on random tokens, and note its time."""
        train, vocabulary = self.config.train, self.config.model.vocab_size
        shape = (train.batch_size, train.sequence_length + 1)
        batch = Batch.of_tokens(torch.randint(vocabulary, shape, generator=generator))
        start = time.process_time()
        result = self.step(batch, 1e-3)
        seconds = time.process_time() - start
        self.rows.append({"step_seconds": seconds, "refreshes_done": result.refreshes_done})


def predict(config: Config, assumed: Assumed, pool: ProcessPoolExecutor) -> StepTime:
    """Plan a run of one rank, and return the time of its step."""
    return step_time(plan(config.resolved(), 1, assumed, pool=pool))


def cpu_rows(pool: ProcessPoolExecutor) -> Iterator[Row]:
    """Measure all configurations, and predict each from the first one's measured step."""
    torch.set_num_threads(1)
    configs, generator = configurations(), torch.Generator().manual_seed(0)
    measured = {name: MeasuredSteps(config) for name, config in configs.items()}
    for _ in range(ROUNDS):
        for steps in measured.values():
            steps.run(generator)
    seconds = {name: typical_seconds(steps.rows) for name, steps in measured.items()}
    predicted = {name: predict(config, Assumed("cpu"), pool) for name, config in configs.items()}
    scale = seconds[MEASURED] / predicted[MEASURED].seconds
    for name, steps in measured.items():
        times = [row["step_seconds"] for row in steps.rows[1:]]
        fifths = quantiles(times, n=5)
        spread = {"median": median(times), "p20": fifths[0], "p80": fifths[-1]}
        row = row_of(name, seconds[name], replace(predicted[name], scale=scale), "cpu")
        yield row | {"scale": scale, "step_seconds": spread}


def gpu_rows(pool: ProcessPoolExecutor) -> Iterator[Row]:
    """Predict the trainings of `make gpu` on each device that has measured them."""
    config = load_config(ROOT / "benchmarks/gpu/moe-1.7b.toml")
    for rates, folder in GPUS.items():
        lines = (ROOT / f"benchmarks/results/gpu/{folder}/rows.jsonl").read_text().splitlines()
        trainings = [row for row in map(json.loads, lines) if row["benchmark"] == "training"]
        for rule, rate in LEARNING_RATE.items():
            optim = optim_config(rule, lr=rate)
            planned = plan(
                replace(config, optim=optim).resolved(), 1, Assumed(rates=rates), pool=pool
            )
            for row in trainings:
                if row["config"]["optimizer"] == rule:
                    train = replace(config.train, cuda_graph=row["config"].get("cuda_graph", False))
                    time = step_time(replace(planned, config=replace(planned.config, train=train)))
                    name = f"{rule}{', graph' if train.cuda_graph else ''}, {rates}"
                    mfu = {"mfu": row["mfu"], "predicted_mfu": time.mfu}
                    yield row_of(name, row["step_seconds"], time, rates) | mfu


def row_of(name: str, measured: float, predicted: StepTime, rates: str) -> Row:
    """Return the row of a configuration."""
    return {
        "benchmark": "plan time",
        "config": {"name": name, "rates": rates},
        "baseline": "measured",
        "measured_seconds": measured,
        "predicted_seconds": predicted.seconds,
        "error": predicted.seconds / measured - 1,
    }


def show(row: Mapping[str, Any]) -> None:
    """Print a line of a row."""
    texts = [f"{1e3 * row[key]:8.1f} ms" for key in ("measured_seconds", "predicted_seconds")]
    if "mfu" in row:
        texts.append(f"MFU {row['mfu']:.1%} {row['predicted_mfu']:.1%}")
    if "step_seconds" in row:
        spread = [f"{1e3 * row['step_seconds'][key]:.1f}" for key in ("p20", "median", "p80")]
        texts.append(f"p20 / median / p80 of a step {' / '.join(spread)}")
    print(f"{row['config']['name']:24}", f"{row['error']:+7.1%}", *texts, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares predicted with measured step times.")
    parser.add_argument("part", choices=["cpu", "gpu"])
    parser.add_argument("--out", type=Path, help="JSON lines file to write the rows to")
    options = parser.parse_args()
    print("configuration, error, measured, predicted")
    with worker_processes() as pool:
        rows = []
        for row in (cpu_rows if options.part == "cpu" else gpu_rows)(pool):
            show(row)
            rows.append(row)
    if options.out:
        common = environment(torch.device("cpu"), ())
        options.out.write_text("".join(json.dumps({**common, **row}) + "\n" for row in rows))
    is_off = options.part == "cpu" and any(abs(row["error"]) > MOST_ERROR for row in rows)
    return int(is_off)


if __name__ == "__main__":
    raise SystemExit(main())
