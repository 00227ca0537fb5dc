"""Tiny training runs on meshes, of which tests change what they need. Ranks import this module
without pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lather.config.config import Config
from lather.config.toml_file import config_from_mapping
from lather.parallel.mesh import Mesh
from lather.train.loop import train
from lather.train.outcome import RunOutcome
from lather.train.requests import RunRequests
from tiny_model import TINY

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "naïve", "owners")


class Silent:
    """A display that shows nothing."""

    def note(self, text: str) -> None: ...

    def step(self, row: object, num_steps: int) -> None: ...


def write_texts(folder: Path) -> None:
    """Write the texts that `make_config` trains on, in `folder/corpus`."""
    (folder / "corpus").mkdir(parents=True)
    for number in range(8):
        lines = [
            " ".join(WORDS[(number * 3 + line * 5 + place * (line % 4)) % 8] for place in range(9))
            for line in range(12 + number)
        ]
        (folder / "corpus" / f"{number}.txt").write_text("\n".join(lines))


def make_config(folder: Path, run_dir: str, *changes: dict[str, Any]) -> Config:
    """Configure a run in `folder/run_dir`; `changes` are keys of its sections."""
    return config_from_mapping(values_of(folder, run_dir, *changes))


def values_of(folder: Path, run_dir: str, *changes: dict[str, Any]) -> dict[str, Any]:
    """Return what the TOML file of such a run holds."""
    mapping: dict[str, Any] = {
        "run_dir": str(folder / run_dir),
        "model": TINY,
        "data": {
            "source": str(folder / "corpus"),
            "pattern": "*.txt",
            "cache_dir": str(folder / "cache"),
            "holdout_every": 4,
        },
        "optim": {"name": "adamw", "lr": 3e-3, "warmup_steps": 2},
        "train": {
            "steps": 4,
            "batch_size": 8,
            "micro_batch_size": 1,
            "sequence_length": 16,
            "validation_sequences": 5,
            "device": "cpu",
        },
        "checkpoint": {"every": 100},
        "log": {"sample_tokens": 0, "picture": False},
    }
    for change in changes:
        for key, value in change.items():
            is_section = isinstance(value, dict)
            mapping[key] = {**mapping.get(key, {}), **value} if is_section else value
    return mapping


EVERY_STEP: dict[str, Any] = {
    "data": {"holdout_every": 2},
    "optim": {"warmup_steps": 0},
    "train": {
        "steps": 10**6,
        "batch_size": 4,
        "micro_batch_size": 0,
        "sequence_length": 8,
        "validation_sequences": 2,
        "validation_every": 0,
    },
    "checkpoint": {"every": 1},
}
"""Changes for a run without an end that saves after each of its steps."""


def start(config: Config, stop_after: int = 0) -> RunOutcome:
    """Train on a mesh of all ranks. With `stop_after` this rank asks for a stop once it has done so
    many steps."""
    mesh = Mesh.build(config.parallel, torch.device("cpu"))
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return 0 < stop_after < steps

    return train(config, Silent(), RunRequests(stop), mesh)
