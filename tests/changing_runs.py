"""Runs that start again with another configuration, and the training in one process that they have
to equal."""

from collections.abc import Callable
from pathlib import Path

from lather.config.config import Config
from lather.data.order import MixturePhase
from lather.engine.engine import build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep, learning_rates, pick_device
from lather.files import read_rows
from lather.parallel.mesh import Mesh
from lather.train.loop import train
from lather.train.metrics import StepRow
from lather.train.requests import RunRequests
from lather.train.run_dir import open_run_data

MakeConfig = Callable[..., Config]
CHANGED_AT = 4


class Shown:
    """A display that keeps its lines."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, row: StepRow, num_steps: int) -> None:
        pass


def run(config: Config, stop_after: int = 10**9) -> list[str]:
    """Train until the end, or for so many steps; return the notes."""
    shown, steps = Shown(), iter(range(stop_after))
    train(config, shown, RunRequests(lambda: next(steps, None) is None))
    return shown.notes


def losses(run_dir: str | Path) -> list[float]:
    return [row["loss"] for row in read_rows(Path(run_dir) / "metrics.jsonl") if "loss" in row]


def uninterrupted(
    before: Config,
    after: Config,
    phases: list[MixturePhase] | None = None,
    changed_at: int = CHANGED_AT,
) -> list[float]:
    """Train in one process whose optimizer gets the new options after `changed_at` steps; nothing
    is saved or loaded. Returns the losses."""
    before, after = before.resolved(), after.resolved()
    engine = build_engine(before, Mesh.single(pick_device("cpu")))
    optimizer = build_optimizer(before.optim, engine.parameters)
    step = TrainStep(engine, optimizer, before.train.max_grad_norm)
    batches = open_run_data(after, lambda text: None, phases=phases or ()).batches
    found = []
    for number in range(1, after.train.steps + 1):
        config = before if number <= changed_at else after
        if number == changed_at + 1:
            step.max_grad_norm = after.train.max_grad_norm
            for group, new in zip(
                optimizer.param_groups,
                build_optimizer(after.optim, engine.parameters).param_groups,
                strict=True,
            ):
                group.update({key: value for key, value in new.items() if key != "params"})
        found.append(
            step(
                batches.batch(number), learning_rates(number, config.optim, config.train.steps)
            ).loss
        )
    return found
