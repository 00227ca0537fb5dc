"""Configures a model in which every kind of bytes is small and known, for tests of memory plans."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from lather.config.config import Config, MoEConfig, ParallelConfig
from lather.config.loop import LoopConfig
from lather.config.optim import optim_config
from lather.memory.dry_run import RankRun, dry_run
from lather.memory.workers import Assumed
from lather.models.families import FAMILIES
from lather.pipeline import gathering

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def config_of(
    rule: str, *, parallel: dict[str, Any] | None = None, batch_size: int = 8, **loop: Any
) -> Config:
    """Configure two layers for every pipeline rank, one in each of its stages."""
    layers = 2 * (parallel or {}).get("pp", 1)
    return Config(
        model=FAMILIES["qwen3_moe"].config(**SIZES | {"num_hidden_layers": layers}),
        train=LoopConfig(batch_size=batch_size, micro_batch_size=1, sequence_length=32, **loop),
        moe=MoEConfig(),
        parallel=ParallelConfig(**(parallel or {})),
        optim=optim_config(rule),
    )


def dry_run_of_units(
    config: Config, world_size: int, assumed: Assumed, rank: int = 0, small: int = 0
) -> RankRun:
    """Plan a rank, in a process of `worker_processes`, with units of at least `small` bytes; 0: a
    unit for each block."""
    with patch.object(gathering, "SMALL", small):
        return dry_run(config, world_size, assumed, rank)
