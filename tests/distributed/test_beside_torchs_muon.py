"""Check what docs/your-trainer.md says of torch.optim.Muon and ours on a mesh."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from lather.optim import Muon

PAGE = Path(__file__).parents[2] / "docs" / "your-trainer.md"
CLASSES = {"torch": torch.optim.Muon, "ours": Muon}


def collectives(rank: int, num_ranks: int, sizes: tuple[int, ...]) -> dict[str, list[int]]:
    """Count the collective operations of a step for each number of matrices."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    found: dict[str, list[int]] = {name: [] for name in CLASSES}
    for size in sizes:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(size)])
        fully_shard(model, mesh=mesh)
        model(torch.randn(8, 16)).square().mean().backward()
        for name, cls in CLASSES.items():
            optimizer = cls(model.parameters(), lr=1e-3)  # type: ignore[operator]
            optimizer.step()
            with CommDebugMode() as counting:
                optimizer.step()
            found[name].append(counting.get_total_counts())
    return found


def test_torchs_muon_communicates_for_each_product_and_ours_for_the_step() -> None:
    first, second = run_ranks(collectives, 2, (4, 8))
    assert first == second
    assert first["ours"] == [3, 3]
    text = re.search(r"(\d+) collective operations for each matrix", PAGE.read_text("utf-8"))
    assert text
    assert first["torch"] == [4 * int(text[1]), 8 * int(text[1])]


def test_torchs_muon_takes_no_experts() -> None:
    with pytest.raises(ValueError, match="only supports 2D"):
        torch.optim.Muon([nn.Parameter(torch.zeros(2, 3, 4))])
