"""Counts what a forward pass keeps for backward: on real tensors, and on the ledger of a dry run. A
process of its own imports this, without pytest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.live_bytes import PeakBytes
from lather.config.config import Config, MoEConfig, ParallelConfig
from lather.config.loop import LoopConfig
from lather.config.optim import optim_config
from lather.engine.engine import build_engine
from lather.memory.dry_rank import batch_of
from lather.memory.profile import profile
from lather.memory.workers import Assumed
from lather.parallel.mesh import Mesh
from lather.pipeline.recorder import Recorder
from lather.pipeline.schedule import Action
from models.tiny import FAMILY_TABLES, tiny_family_config

SIZES = {"vocab_size": 320, "hidden_size": 256, "num_attention_heads": 4}


@dataclass(frozen=True)
class KeptCase:
    """A family and how its tensors are kept."""

    family: str
    memory: str = "saved"
    recompute: tuple[str, ...] = ()

    def config(self) -> Config:
        """Configure one micro-batch of two sequences."""
        return Config(
            model=tiny_family_config(self.family, **{**SIZES, **FAMILY_TABLES[self.family].wide}),
            train=LoopConfig(
                batch_size=2,
                micro_batch_size=2,
                sequence_length=64,
                recompute=self.recompute,  # type: ignore[arg-type]
            ),
            moe=MoEConfig(memory=self.memory),  # type: ignore[arg-type]
            parallel=ParallelConfig(),
            optim=optim_config("adamw"),
        )


class _AtBackward(Recorder):
    """Notes the bytes that are alive when the first forward and the first backward pass begin."""

    def __init__(self, alive: PeakBytes) -> None:
        self.alive = alive
        self.bytes: dict[str, int] = {}

    @contextmanager
    def action(self, action: Action) -> Iterator[Any]:
        self.bytes.setdefault(str(action), self.alive.now)
        yield


def counted(case: KeptCase) -> int:
    """Return the bytes of the real tensors that the forward pass of a micro-batch keeps."""
    config, alive = case.config(), PeakBytes()
    record = _AtBackward(alive)
    mesh = Mesh.single(torch.device("cpu"))
    engine = build_engine(config, mesh, record=record)
    batch = batch_of(config, config.train.batch_size, engine.micro_batch_size)
    with alive:
        engine.launch_gradients(batch)
    return record.bytes["0B0"] - record.bytes["0F0"]


def planned(cases: list[KeptCase]) -> list[int]:
    """Return what the ledger says about each case; the process must have no other use."""
    return [profile(case.config(), Assumed("cpu")).bytes() for case in cases]
