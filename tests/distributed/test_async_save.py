"""`torch.distributed.checkpoint.async_save` of a sharded optimizer's state, and loading it
again."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from lather.optim import SOAP, MatrixOptimizer, Muon, parameter_groups


class Net(nn.Module):
    """A module with matrices, vectors, an embedding and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 6), nn.Linear(6, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.down(torch.relu(self.up(self.embedding(tokens))))
        return torch.einsum("bi,eoi->beo", x, self.experts).square().mean()


def steps(net: nn.Module, optimizer: MatrixOptimizer, numbers: range, rank: int) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(100 * number + rank)
        net(torch.randint(0, 12, (4,), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


def saved_and_resumed(rank: int, world_size: int, folder: str) -> list[str]:
    """Name what differs after an asynchronous save, further steps, and loading what was saved."""
    wrong = []
    for cls in (SOAP, Muon):
        net = Net()
        fully_shard(net)
        optimizer = cls(parameter_groups(net), lr=1e-2)
        steps(net, optimizer, range(3), rank)
        state = get_optimizer_state_dict(net, optimizer)
        saved = {
            f"{name}/{key}": whole(x).clone()
            for name, entries in state["state"].items()
            for key, x in entries.items()
        }
        dcp.async_save({"optimizer": state}, checkpoint_id=f"{folder}/{cls.__name__}").result()  # type: ignore[union-attr]
        steps(net, optimizer, range(3, 6), rank)
        room = {"optimizer": get_optimizer_state_dict(net, optimizer)}
        dcp.load(room, checkpoint_id=f"{folder}/{cls.__name__}")
        set_optimizer_state_dict(net, optimizer, room["optimizer"])
        for name, entries in get_optimizer_state_dict(net, optimizer)["state"].items():
            wrong += [
                f"{cls.__name__} {name}/{key}"
                for key, x in entries.items()
                if not torch.equal(whole(x), saved[f"{name}/{key}"])
            ]
    return wrong


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def test_an_asynchronous_save_of_sharded_state_loads_again(tmp_path: Path) -> None:
    assert run_ranks(saved_and_resumed, 2, str(tmp_path)) == [[], []]
