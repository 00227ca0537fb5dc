"""Trains in processes that may have only so many bytes more than the interpreter has:

    python limited_run.py BYTES...

A process for each number takes two steps of `limited_config()`; its exit status, which is printed,
is 0, or 3 if memory was not enough. The bytes of the address space count, after a tiny run of the
same kind, so that libraries have loaded what they load."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

import torch
from planned_configs import SIZES, config_of

from lather.config.config import Config
from lather.data.batches import Batch
from lather.engine.engine import build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.memory.dry_run import refresh_at_every_step
from lather.models.families import FAMILIES
from lather.parallel.mesh import Mesh

NOT_ENOUGH = 3


def limited_config() -> Config:
    """Make most tensors so large that the C library gives each its own pages, which go back when it
    is freed."""
    large = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    config = config_of("soap")
    return replace(
        config,
        model=FAMILIES["qwen3_moe"].config(**SIZES | large),
        train=replace(config.train, batch_size=4, micro_batch_size=2, sequence_length=256),
    )


def train(config: Config, steps: int) -> None:
    mesh = Mesh.single(torch.device("cpu"))
    engine = build_engine(config, mesh)
    optimizer = build_optimizer(config.optim, engine.parameters)
    refresh_at_every_step(optimizer)
    step = TrainStep(engine, optimizer, config.train.max_grad_norm)
    tokens = torch.randint(
        0, config.model.vocab_size, (config.train.batch_size, config.train.sequence_length + 1)
    )
    for _ in range(steps):
        step(Batch.of_tokens(tokens), 1e-3)


def limited(size: int) -> int:
    """Train in this process; returns its exit status."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train(config_of("soap"), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        train(limited_config(), 2)
    except (MemoryError, RuntimeError) as error:
        if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        return NOT_ENOUGH
    return 0


def status_of_a_child(size: int) -> int:
    """Train in a child; returns its exit status."""
    pid = os.fork()
    if not pid:
        os._exit(limited(size))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    print(*[status_of_a_child(int(size)) for size in sys.argv[1:]])
