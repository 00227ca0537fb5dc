"""Counts tensors of a dry run that only Python's garbage collector would free. A process of its own
imports this."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from planned_configs import SIZES, config_of

from lather.config.config import Config
from lather.engine.step import TrainStep
from lather.memory.dry_run import dry_run
from lather.memory.workers import Assumed
from lather.models.families import FAMILIES


def config_with_sinks() -> Config:
    """Return GPT-OSS with sinks and sliding windows, at sizes for which a GPU takes flex
    attention."""
    config = config_of("muon", precision="bf16")
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name not in ("num_experts", "moe_intermediate_size")
    }
    return replace(
        config, model=FAMILIES["gpt_oss"].config(**sizes, num_local_experts=4, sliding_window=16)
    )


def count_left(config: Config) -> int:
    """Return the number of tensors in reference cycles after a step on the stand-in of a GPU."""
    found: list[int] = []
    step = TrainStep.__call__

    def counted(self: TrainStep, *arguments: Any, **options: Any) -> Any:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        result = step(self, *arguments, **options)
        gc.collect()
        found.append(sum(isinstance(one, torch.Tensor) for one in gc.garbage))
        gc.set_debug(0)
        return result

    with patch.object(TrainStep, "__call__", counted):
        dry_run(config, 1, Assumed("gpu"), 0)
    return sum(found)
