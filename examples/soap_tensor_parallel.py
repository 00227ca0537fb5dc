"""SOAP on tensor-parallel shards: as DTensors, which say themselves how they are cut, or as plain
tensors with a `partition_dim`.

    torchrun --nproc-per-node 2 examples/soap_tensor_parallel.py        (seconds on CPUs, with gloo;
                                                                        on GPUs with NCCL)

A column-wise and a row-wise layer are trained three times on the same batches: whole in one
process, with torch's `parallelize_module`, and with plain shards as Megatron has them. All end with
the same weights to rounding, since one of the ranks puts every matrix together, preconditions and
updates it. Rank 0 prints the loss at the start and at the end, and how far apart the weights are.

Gradients of sharded layers are rounded differently from those of whole ones. The first bases come
after 4 steps (`adam_warmup_steps`), when every factor has full rank. Earlier, rounding would decide
a part of each basis, and the runs would differ by that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lather.optim import SOAP, parameter_groups

WIDTH, HIDDEN, STEPS = 16, 32, 30
OPTIONS: dict[str, Any] = {"lr": 1e-2, "adam_warmup_steps": 4}


class MLP(nn.Module):
    """A layer up and a layer down: x (B, WIDTH) -> (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
    return x, x.roll(1, dims=1).tanh()


def train(
    model: Callable[[Tensor], Tensor],
    optimizer: SOAP,
    device: torch.device,
    collect: Callable[[], None] = lambda: None,
) -> str:
    """Train, and return the losses; a rank calls `collect` between backward and the step."""
    losses = []
    for step in range(STEPS):
        x, y = batch(step, device)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        collect()
        optimizer.step()
        losses.append(loss.item())
    return f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"


def main() -> None:
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["WORLD_SIZE"]
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    whole = MLP().to(device)
    shown = {"one process": train(whole, SOAP(parameter_groups(whole), **OPTIONS), device)}

    parallel = MLP().to(device)
    mesh = init_device_mesh(device.type, (num_ranks,))
    parallelize_module(parallel, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shown["DTensors"] = train(parallel, SOAP(parameter_groups(parallel), **OPTIONS), device)

    source = MLP().to(device)
    up, down = (
        nn.Parameter(w.detach().chunk(num_ranks, dim)[rank].clone())
        for w, dim in ((source.up.weight, 0), (source.down.weight, 1))
    )
    groups = [{"params": [up], "partition_dim": 0}, {"params": [down], "partition_dim": 1}]
    shown["plain shards"] = train(
        shards_forward(up, down), SOAP(groups, **OPTIONS, tp_group=dist.group.WORLD), device
    )

    difference = max(
        (parallel.up.weight.full_tensor() - whole.up.weight).abs().max().item(),  # type: ignore[operator]
        (up - whole.up.weight.chunk(num_ranks)[rank]).abs().max().item(),
        (down - whole.down.weight.chunk(num_ranks, 1)[rank]).abs().max().item(),
    )
    if rank == 0:
        for name, losses in shown.items():
            print(f"{name:12}  {losses}")
        print(f"weights differ from those of one process by {difference:.1e}")
    dist.destroy_process_group()


def shards_forward(up: Tensor, down: Tensor) -> Callable[[Tensor], Tensor]:
    """Compute the same layers on a rank's shards; summed over ranks, gradients are those of whole
    layers."""

    def forward(x: Tensor) -> Tensor:
        own = torch.relu(x @ up.T) @ down.T
        with torch.no_grad():
            others = own.clone()
            dist.all_reduce(others)
            others -= own
        return own + others

    return forward


if __name__ == "__main__":
    main()
