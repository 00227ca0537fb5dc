"""The ranks of test_launch.py, and a command that starts or joins them. It is a module of its own
because ranks import it by name."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import launch_workers
import torch
import torch.distributed as dist

from lather.errors import ConfigError, UserError
from lather.parallel.launch.start import join, launch
from lather.parallel.launch.world import World


def work(folder: str, task: str, world: World) -> int:
    """Tell in `folder` that the task has begun, and then do it."""
    x = torch.ones(())
    dist.all_reduce(x)
    assert x.item() == world.size == dist.get_world_size()
    (Path(folder) / f"part{world.rank}").write_text(str(os.getpid()))
    (Path(folder) / f"part{world.rank}").rename(Path(folder) / f"rank{world.rank}")
    status: int = globals()[task](world)
    return status


def raise_on_one(world: World) -> int:
    """Raise on rank 1 while the others are blocked in a collective."""
    if world.rank == 1:
        time.sleep(0.5)
        raise ValueError("rank one is unwell")
    dist.all_reduce(torch.zeros(()))
    return 0


def refuse(world: World) -> int:
    raise ConfigError("parallel.pp = 3 is not valid:\nit must be 2")


def block(world: World) -> int:
    """Block rank 2 in C++: it waits for rank 0, which sleeps. Neither would notice by itself that
    rank 1 is gone."""
    if world.rank == 2:
        dist.recv(torch.zeros(()), src=0)
    time.sleep(1000)
    return 0


def until_stopped(world: World) -> int:
    """Take steps with a collective each, until all ranks have agreed to stop after the same
    step."""
    assert world.requests is not None
    steps = 0
    asked = torch.zeros(())
    while not asked:
        steps += 1
        time.sleep(0.01)
        asked = torch.tensor(float(world.requests.stop is not None))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
    most = torch.tensor(steps)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert most == steps
    # in one write, because all ranks share the pipe
    os.write(sys.stdout.fileno(), f"rank {world.rank} stopped\n".encode())
    return 37 if world.rank == 0 else 0


if __name__ == "__main__":
    folder, task, nproc = sys.argv[1:]
    world = World.of_environment(os.environ)
    try:
        if world is None:
            sys.exit(launch(launch_workers.work, (folder, task), int(nproc)))
        sys.exit(join(launch_workers.work, (folder, task), world))
    except UserError as error:
        print(f"refused: {error!r}")
        sys.exit(2)
