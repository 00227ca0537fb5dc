"""The correction bias of a family whose published models have one: in runs that balance without a
loss and in runs that do not, and on its way between runs and folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from changing_runs import run
from lather.checkpoint.folder import list_checkpoints
from lather.config.config import Config
from lather.files import read_rows
from lather.train.trained_model import TrainedModel

MakeConfig = Callable[..., Config]
BIAS = "layers.1.mlp.gate.e_score_correction_bias"
V3 = {"model_type": "deepseek_v3", "norm_topk_prob": True}
RATE, STEPS = 0.05, 5
BALANCES: dict[str, Any] = {"moe": {"bias_update_rate": RATE}, "train": {"steps": STEPS}}


def weights_of(config: Config) -> dict[str, Tensor]:
    """Run it; return the tensors of its last checkpoint."""
    run(config)
    checkpoint = list_checkpoints(Path(config.run_dir) / "checkpoints")[-1]
    return load_file(checkpoint / "rank-00000.safetensors")


@pytest.fixture
def balanced(make_config: MakeConfig, tmp_path: Path) -> tuple[Config, Tensor]:
    """A run of five moves by the rate, after which no bias is 0 again; and its bias."""
    config = make_config(run_dir=str(tmp_path / "balanced"), model=V3, **BALANCES)
    return config, weights_of(config)[BIAS]


def test_only_balancing_moves_it_by_its_rate(
    make_config: MakeConfig, balanced: tuple[Config, Tensor], tmp_path: Path
) -> None:
    moves = balanced[1] / RATE
    assert torch.allclose(moves, moves.round(), atol=1e-4)
    assert moves.abs().max() <= STEPS
    assert moves.round().int().unique().numel() > 1
    still = weights_of(make_config(run_dir=str(tmp_path / "still"), model=V3))
    assert not still[BIAS].any()
    assert not any(name.startswith(f"{BIAS}/") for name in still)  # the optimizer has no state


def test_it_is_exported_in_fp32_and_counts_in_a_run_that_starts_from_the_folder(
    make_config: MakeConfig, balanced: tuple[Config, Tensor], tmp_path: Path
) -> None:
    config, bias = balanced
    run_dir, folder = Path(config.run_dir), tmp_path / "folder"
    checkpoint = list_checkpoints(run_dir / "checkpoints")[-1]
    TrainedModel(run_dir, checkpoint, config).export(folder, torch.bfloat16, 10**9)
    published = load_file(folder / "model.safetensors")[f"model.{BIAS}"]
    assert published.dtype == torch.float32
    assert torch.equal(published, bias)
    losses = []
    for number, changed in enumerate((bias, torch.tensor([9.0, 0.0, 0.0, 0.0]))):
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, f"model.{BIAS}": changed}, folder / "model.safetensors")
        options = {"model": V3, "init_from": str(folder)}
        following = make_config(run_dir=str(tmp_path / f"following-{number}"), **options)
        assert torch.equal(weights_of(following)[BIAS], changed)
        rows = read_rows(Path(following.run_dir) / "metrics.jsonl")
        losses.append(next(row["validation_loss"] for row in rows if "validation_loss" in row))
    assert losses[0] != losses[1]


@pytest.mark.parametrize("lora", [0, 2])
def test_a_run_that_starts_from_another_takes_it_over(
    make_config: MakeConfig, balanced: tuple[Config, Tensor], tmp_path: Path, lora: int
) -> None:
    config, bias = balanced
    following = replace(
        make_config(run_dir=str(tmp_path / "following"), model=V3, init_from=config.run_dir),
        lora=replace(config.lora, rank=lora),
    )
    assert torch.equal(weights_of(following)[BIAS], bias)
