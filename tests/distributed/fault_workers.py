"""The ranks of test_faults.py: a tiny training run in which rank 1 fails at a chosen place of step
3. Ranks import this module by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fault_workers
import torch
from tiny_training import EVERY_STEP, Silent, make_config

from lather.checkpoint.folder import step_of
from lather.checkpoint.save import CheckpointWriter
from lather.config.config import Config
from lather.data.batches import Batch
from lather.engine.engine import Engine
from lather.parallel.expert_exchange import ExpertExchange
from lather.parallel.launch.start import GroupOptions, launch
from lather.parallel.launch.world import World
from lather.parallel.mesh import Mesh
from lather.pipeline.segments import Segments
from lather.pipeline.tape import Cut
from lather.train.loop import train

PLACES: dict[str, tuple[type, str]] = {
    "forward": (Segments, "_attend"),
    "exchange": (ExpertExchange, "start_combine"),
    "backward": (Cut, "backward"),
    "raise": (Segments, "_attend"),
    "shape": (Engine, "launch_gradients"),
    "save": (CheckpointWriter, "write_file"),
    "save beside": (CheckpointWriter, "write_file"),
    "kill in save": (CheckpointWriter, "write_file"),
    "stuck": (Segments, "_attend"),
    "paused": (Segments, "_attend"),
    "standstill": (Segments, "_attend"),
}
"""The function in which rank 1 fails, for each place."""
WAIT = 20.0
"""Seconds that ranks wait for one that is stuck."""
PATIENCE = 15.0
"""Seconds of a standstill that is reported before the timeout of operations, as on a GPU."""
SAVES = ("save", "save beside", "kill in save")
"""Places in the save of step 3; the second is written while step 4 runs."""


NAMES = {
    "exchange": "muon",
    "shape": "soap_muon",
    "backward": "soap",
    "save": "muon",
    "kill in save": "soap",
}
"""The rules of the places that do not use AdamW for everything."""


def config_of(folder: Path, place: str) -> Config:
    """Configure two data ranks or two pipeline ranks, with a checkpoint after every step."""
    return make_config(
        folder,
        "run",
        EVERY_STEP,
        {
            "optim": {"name": NAMES.get(place, "adamw")},
            "parallel": {
                **({"ep": 2} if place in ("exchange", "shape") else {"pp": 2}),
                **({"timeout": WAIT} if place in ("stuck", "paused") else {}),
            },
            "checkpoint": {"asynchronous": place == "save beside"},
        },
    )


def work(folder: str, place: str, world: World) -> int:
    """Train. In step 3 rank 1 writes down the time and dies or raises at the second call of the
    place's function, or gets a cut batch.

    A checkpoint's files are written once a step: in the save of step 3 rank 1 fails when its own
    file is on disk.
    """
    config = config_of(Path(folder), place)
    mesh = Mesh.build(config.parallel, torch.device("cpu"))
    if world.rank == 1:
        _fail_in_step(3, Path(folder), place)
    (Path(folder) / f"part{world.rank}").write_text(str(os.getpid()))
    (Path(folder) / f"part{world.rank}").rename(Path(folder) / f"rank{world.rank}")
    train(config, Silent(), mesh=mesh)
    return 0


def _fail_in_step(number: int, folder: Path, place: str) -> None:
    steps, calls = 0, 0
    gradients: Callable[..., Any] = Engine.launch_gradients
    owner, name = PLACES[place]
    original = getattr(owner, name)

    def counting(self: Engine, batch: Batch, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if place == "shape" and steps == number:
            (folder / "failed").write_text(str(time.time()))
            batch = replace(batch, inputs_BS=batch.inputs_BS[:, :-1])
        return gradients(self, batch, **options)

    def fail() -> None:
        (folder / "failed").write_text(str(time.time()))
        if place in ("stuck", "standstill"):
            time.sleep(1000)
        if place == "paused":
            os.kill(os.getpid(), signal.SIGSTOP)
        if place in ("raise", "save", "save beside"):
            raise ArithmeticError("rank one has lost count")
        os.kill(os.getpid(), signal.SIGKILL)

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += steps == number
        result = original(*args, **kwargs)
        if (step_of(args[0].target) == number) if place in SAVES else calls == 2:
            fail()
        return result

    Engine.launch_gradients = counting  # type: ignore[method-assign, assignment]
    if place != "shape":
        setattr(owner, name, failing)


if __name__ == "__main__":
    folder, place, nproc = sys.argv[1:]
    timeout = WAIT if place in ("stuck", "paused") else 600.0
    patience = PATIENCE if place == "standstill" else None
    options = GroupOptions(timeout=timeout, patience=patience)
    status = launch(fault_workers.work, (folder, place), int(nproc), options)
    (Path(folder) / "ended").write_text(str(time.time()))
    sys.exit(status)
