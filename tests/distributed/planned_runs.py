"""Counts the bytes of training steps on real ranks, for comparison with a memory plan. Ranks import
it without pytest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.live_bytes import PeakBytes
from lather.config.config import Config, MoEConfig, ParallelConfig
from lather.config.loop import LoopConfig
from lather.config.optim import optim_config
from lather.data.batches import Batch
from lather.data.config import DataConfig
from lather.engine.engine import build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.memory.dry_rank import DOCUMENTS, dry_rank
from lather.memory.dry_run import RankRun, dry_run, refresh_at_every_step
from lather.memory.workers import Assumed
from lather.models.families import FAMILIES
from lather.models.routing import Router
from lather.parallel.mesh import Mesh
from lather.pipeline import gathering
from lather.torch_private import memory_tracker

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
LENGTH, SEQUENCES = 70, 16
PAIRS = torch.tensor(list(combinations(range(8), 2)))
"""Every pair of experts (28, 2). A micro-batch, two sequences of LENGTH or of a multiple of it, has
each pair equally often, so that the load is exactly even."""


def run_config(
    rule: str = "adamw",
    *,
    memory: str = "saved",
    precision: str = "fp32",
    layers: int = 4,
    depths: int = 0,
    length: int = LENGTH,
    recompute: tuple[str, ...] = (),
    parallel: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
) -> Config:
    """Configure a DeepSeek-V2 model in which every kind of bytes is a good part, or a DeepSeek-V3
    model with multi-token prediction."""
    own = ParallelConfig(**(parallel or {}))
    model = FAMILIES["deepseek_v2"].config(**SIZES, num_hidden_layers=layers)
    if depths:
        model = FAMILIES["deepseek_v3"].config(
            **SIZES, num_hidden_layers=layers, num_nextn_predict_layers=depths
        )
    return Config(
        model=model,
        train=LoopConfig(
            batch_size=SEQUENCES,
            micro_batch_size=2,
            sequence_length=length,
            precision=precision,  # type: ignore[arg-type]
            recompute=recompute,
        ),
        moe=MoEConfig(memory=memory),  # type: ignore[arg-type]
        parallel=own,
        optim=optim_config(rule, **(optim or {})),
        data=DataConfig(**(data or {})),
    )


def counted_run(
    rank: int,
    world_size: int,
    config: Config,
    layers: Sequence[Sequence[int]] | None = None,
    *,
    tracked: bool = False,
    small: int = gathering.SMALL,
) -> tuple[int, int]:
    """Count the peak bytes of this rank's storages over two steps that refresh. If `tracked`, the
    building of the model counts, too, and the second number is the count of torch's tracker (else
    0). `layers` lists every stage's layers; None: equally many. Blocks with fewer bytes than
    `small` are gathered together."""
    torch.manual_seed(0)
    choose = Router._choose

    def evenly(router: Router, scores_TE: Tensor) -> Tensor:
        experts_TK = choose(router, scores_TE)
        return experts_TK.copy_(PAIRS[torch.arange(len(experts_TK)) % len(PAIRS)])

    with (
        PeakBytes() as alive,
        patch.object(Router, "_choose", evenly),
        patch.object(gathering, "SMALL", small),
    ):
        if tracked:
            with memory_tracker() as tracker:
                _train(config, layers, lambda: None)
            return alive.bytes, tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        _train(config, layers, lambda: setattr(alive, "bytes", 0))
    return alive.bytes, 0


def planned_rank(config: Config, world_size: int, small: int) -> RankRun:
    """Plan the first rank, in a process of `worker_processes`."""
    with patch.object(gathering, "SMALL", small):
        return dry_run(config, world_size, Assumed("cpu"), 0)


def sizes_of_units(config: Config, world_size: int, small: int) -> list[int]:
    """Return the number of modules of each unit of the first rank, in a process of
    `worker_processes`."""
    with (
        patch.object(gathering, "SMALL", small),
        dry_rank(config, world_size, Assumed("cpu"), 0) as dry,
    ):
        return [len(unit.modules) for unit in dict.fromkeys(dry.engine.units.values())]


def _train(
    config: Config, layers: Sequence[Sequence[int]] | None, built: Callable[[], None]
) -> None:
    """Train two steps; `built` is called before them."""
    mesh = Mesh.build(config.parallel, torch.device("cpu"))
    engine = build_engine(config, mesh, layers=layers)
    optimizer = build_optimizer(config.optim, engine.parameters)
    refresh_at_every_step(optimizer)
    step = TrainStep(engine, optimizer, config.train.max_grad_norm)
    batch = Batch.of_tokens(
        torch.randint(
            0, SIZES["vocab_size"], (SEQUENCES // mesh.data_size, config.train.sequence_length + 1)
        )
    )
    if config.data.is_per_document:
        batch = _in_documents(batch, is_padded=config.data.packing == "documents")
    built()
    for _ in range(2):
        step(batch, 1e-3)


def _in_documents(batch: Batch, *, is_padded: bool) -> Batch:
    """Divide each sequence into documents; the last position of each second one holds no token."""
    number, length = batch.inputs_BS.shape
    place_S = torch.arange(length)
    begins_BS = (place_S % -(-length // DOCUMENTS) == 0).expand(number, -1)
    batch = replace(batch, begins_BS=begins_BS)
    if not is_padded:
        return batch
    padding_BS = (torch.arange(number)[:, None] % 2 == 1) & (place_S == length - 1)
    return replace(batch, padding_BS=padding_BS)
