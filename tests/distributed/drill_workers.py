"""Runs what test_drills.py tests: a tiny training run of two ranks that saves at every step, is
killed at random moments and started again.

Ranks are forked, so that a start takes no second import of torch. The forking process computes
nothing with torch itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_training import EVERY_STEP, Silent, make_config

from lather.checkpoint.folder import list_checkpoints
from lather.checkpoint.reader import open_checkpoint
from lather.config.config import Config
from lather.config.records import CheckpointConfig
from lather.parallel.mesh import Mesh
from lather.train.loop import train
from lather.train.requests import RunRequests

RANKS = 2
MORE_STEPS = 3
"""Steps that the last start trains, undisturbed."""
LONGEST = 3.0
"""The longest time from the first step to a kill, in steps, each of which saves."""


OPTIM: dict[str, dict[str, Any]] = {
    "synchronous": {"name": "soap", "precondition_frequency": 2, "experts": {"rule": "muon"}},
    "asynchronous": {
        "name": "muon",
        "momentum": 0.9,
        "matrices": {"rule": "soap_muon", "precondition_frequency": 2},
    },
}
"""Options of the optimizer; the rest of the parameters has AdamW in both."""


def config_of(folder: Path, *, asynchronous: bool, parallel: dict[str, int]) -> Config:
    return make_config(
        folder,
        "run",
        EVERY_STEP,
        {
            "optim": {
                **OPTIM["asynchronous" if asynchronous else "synchronous"],
                "schedule": "constant",
            },
            "parallel": parallel,
            "checkpoint": {"keep_last": 3, "asynchronous": asynchronous},
            "log": {"expert_load_every": 0},
        },
    )


def rank_of_a_run(config: Config, folder: Path, rank: int, start: int, until: int) -> None:
    """Do a forked rank's work: train to step `until`, and tell how long the first step and its save
    took."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{start}", rank=rank, world_size=RANKS
    )
    mesh = Mesh.build(config.parallel, torch.device("cpu"))
    first, times = _newest(config), [time.monotonic()]

    def stop() -> bool:
        """Note the time before every step; returns whether to stop."""
        times.append(time.monotonic())
        if len(times) == 3 and rank == 0:
            (folder / f"part{start}").write_text(str(times[2] - times[1]))
            (folder / f"part{start}").rename(folder / f"ready{start}")
        return first + len(times) - 2 >= until

    train(config, Silent(), RunRequests(stop), mesh)
    dist.barrier()


def _newest(config: Config) -> int:
    checkpoints = list_checkpoints(Path(config.run_dir) / "checkpoints")
    return int(checkpoints[-1].name[5:]) if checkpoints else 0


def forked(config: Config, folder: Path, rank: int, start: int, until: int) -> int:
    """Fork a rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with (folder / f"errors{start}.{rank}").open("w") as errors:
            os.dup2(errors.fileno(), 2)
            rank_of_a_run(config, folder, rank, start, until)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def run(
    config: Config, folder: Path, start: int, until: int, kill: tuple[float, list[int]] | None
) -> list[int]:
    """Start the ranks and return their exit statuses. `kill` says after how many steps which ranks
    are killed; then the others are, as a launcher would end them."""
    pids = [forked(config, folder, rank, start, until) for rank in range(RANKS)]
    deadline = time.monotonic() + 60
    if kill is not None:
        ready = folder / f"ready{start}"
        while not ready.exists():
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.005)
        time.sleep(kill[0] * float(ready.read_text()))
        for rank in kill[1]:
            os.kill(pids[rank], signal.SIGKILL)
        time.sleep(0.02)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return [os.waitpid(pid, 0)[1] for pid in pids]


def drills(
    folder: Path, count: int, *, asynchronous: bool, parallel: dict[str, int], seed: int
) -> dict[str, Any]:
    """Kill one run `count` times, then train a few steps more; every checkpoint that is there after
    a kill must open."""
    config, draw = (
        config_of(folder, asynchronous=asynchronous, parallel=parallel),
        random.Random(seed),
    )
    found: list[list[str]] = []
    leftovers = 0
    for number in range(count):
        victims = [[0, 1], [0], [1]][number % 3]
        run(config, folder, number, 10**6, (draw.uniform(0.0, LONGEST), victims))
        checkpoints = Path(config.run_dir) / "checkpoints"
        for path in list_checkpoints(checkpoints):
            open_checkpoint(path)
        found.append([path.name for path in list_checkpoints(checkpoints)])
        leftovers += any(checkpoints.glob(".tmp-*"))
    end = _newest(config) + MORE_STEPS
    statuses = run(config, folder, count, end, None)
    undisturbed = replace(
        config, run_dir=str(folder / "undisturbed"), checkpoint=CheckpointConfig(every=end)
    )
    whole = run(undisturbed, folder, count + 1, end, None)
    return {
        "found": found,
        "leftovers": leftovers,
        "end": end,
        "statuses": statuses,
        "whole": whole,
    }


if __name__ == "__main__":
    place, count, mode, axis, seed = sys.argv[1:]
    result = drills(
        Path(place),
        int(count),
        asynchronous=mode == "asynchronous",
        parallel={axis: 2},
        seed=int(seed),
    )
    (Path(place) / "result.json").write_text(json.dumps(result))
