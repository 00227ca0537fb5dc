"""Runs with `train.weight_dtype`: weights in bf16 with remainders train as weights in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tiny_training import make_config, start

from lather.checkpoint.folder import list_checkpoints
from lather.checkpoint.reader import open_checkpoint
from lather.files import read_rows
from lather.kernels.remainder import split
from lather.models.saving.rounded_weights import RoundedWeights
from lather.parallel import sharded_parameters

BF16: dict[str, Any] = {
    "model": {"tie_word_embeddings": True},
    "train": {"precision": "bf16", "batch_size": 4, "steps": 3},
}
NARROW: dict[str, Any] = {"train": {"weight_dtype": "bfloat16"}}
WIDE: dict[str, Any] = {"train": {"weight_dtype": "float32"}}
SAVED: dict[str, Any] = {"checkpoint": {"every": 2, "keep_last": 9}}
RUNS: dict[str, dict[str, Any]] = {
    "soap": {"optim": {"name": "soap", "precondition_frequency": 2}},
    "muon": {
        "optim": {"name": "muon", "momentum": 0.9, "keep_norm": True},
        "train": {"qk_clip": 0.017},
    },
    "adamw": {"optim": {"name": "adamw", "weight_decay": 0.1}},
}


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row]


def weights(run_dir: Path, step: int = -1) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, exactly."""
    tensors = open_checkpoint(list_checkpoints(run_dir / "checkpoints")[step]).weights()
    return {name: tensors.read(name).float() for name in tensors.tensors}


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Name the weights that differ."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def away_from_zero(x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Round to bf16 as weights with remainders are: ties, of which there is one in 65,536 numbers,
    do not go to the even neighbor."""
    if (x.dtype, dtype) != (torch.float32, torch.bfloat16):
        return x.to(dtype)
    w, r = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=torch.int16)
    split(x.detach(), w, r)
    return w


def copy_away(targets: list[torch.Tensor], sources: list[torch.Tensor], **options: Any) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(away_from_zero(source, target.dtype))


@contextmanager
def rounding_away() -> Iterator[None]:
    """Round fp32 weights so in this context."""
    with (
        patch.object(RoundedWeights, "round", lambda _, w, dtype: away_from_zero(w, dtype)),
        patch.object(sharded_parameters, "foreach_copy_", copy_away),
    ):
        yield


def train_both(folder: Path, name: str, *changes: dict[str, Any]) -> list[str]:
    """Train with weights in fp32 and in bf16, and name what differs."""
    runs = [folder / f"{name} {dtype}" for dtype in ("fp32", "bf16")]
    with rounding_away():
        start(make_config(folder, runs[0].name, BF16, RUNS[name], *changes, WIDE))
    start(make_config(folder, runs[1].name, BF16, RUNS[name], *changes, NARROW))
    if dist.is_initialized() and dist.get_rank():
        return []
    wide, narrow = map(losses, runs)
    assert len(wide) == 3
    assert all(map(math.isfinite, wide))
    return [f"losses {wide} {narrow}"] * (wide != narrow) + same_weights(*map(weights, runs))


MESHES: dict[str, dict[str, Any]] = {
    "pp2 ep2": {"parallel": {"pp": 2, "ep": 2}, "train": {"batch_size": 8}},
    "dp4": {},
    "hsdp": {"parallel": {"replicas": 2}},
}


def on_meshes(rank: int, world_size: int, folder: Path) -> list[str]:
    """Name what differs on meshes of four ranks, where owners of matrices are on other ranks."""
    wrong = []
    for (mesh, changes), name in zip(MESHES.items(), ("soap", "muon", "adamw"), strict=True):
        RUNS[mesh] = RUNS[name]
        wrong += [f"{mesh}: {what}" for what in train_both(folder, mesh, changes)]
    return wrong
