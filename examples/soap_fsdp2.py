"""SOAP under FSDP2: every rank keeps and computes its share of the matrices, and the result is that
of one process.

    torchrun --nproc-per-node 4 examples/soap_fsdp2.py        (seconds on CPUs, with gloo; on GPUs
                                                              with NCCL)
    python examples/soap_fsdp2.py                             (one process: the same losses to
                                                              rounding)

The only line that is not an ordinary FSDP2 script is the one that makes the optimizer. After half
of the steps model and optimizer are saved with torch's own tools for distributed checkpoints and
loaded into fresh ones, which go on; the folder would load on any other number of ranks as well.
Rank 0 prints losses, and the bytes of optimizer state of each rank.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lather.optim import SOAP, parameter_groups

WIDTH, STEPS, BATCH = 32, 200, 256


def build(mesh: dist.DeviceMesh, device: torch.device) -> tuple[nn.Module, SOAP]:
    """Make a sharded model with the same weights on any number of ranks, and its optimizer."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), *hidden, nn.Linear(WIDTH, 1)).to(
        device
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, SOAP(parameter_groups(model, rest_lr=3.2e-2), lr=4e-3, precondition_frequency=5)


def batch(step: int, rank: int, num_ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw this rank's part of a batch that is the same on any number of ranks."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    y = (x[:, :4] * x[:, 4:8]).sum(1, keepdim=True).tanh()
    return x.chunk(num_ranks)[rank].to(device), y.chunk(num_ranks)[rank].to(device)


def train(model: nn.Module, optimizer: SOAP, steps: range, device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for step in steps:
        x, y = batch(step, rank, num_ranks, device)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and (step % 50 == 0 or step == STEPS - 1):
            print(f"step {step:3}  loss {total.item() / num_ranks:.4f}", flush=True)


def main() -> None:
    for name, alone in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, alone)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["WORLD_SIZE"]
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    model, optimizer = build(mesh, device)
    train(model, optimizer, range(STEPS // 2), device)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folders[0])

    model, optimizer = build(mesh, device)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folders[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, range(STEPS // 2, STEPS), device)

    own = torch.tensor(
        sum(piece.value.nbytes for _, piece in optimizer.state_pieces() if piece.name != "step"),
        device=device,
    )
    sizes = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, own)
    if dist.get_rank() == 0:
        print("bytes of optimizer state by rank:", *(f"{int(size):,}" for size in sizes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
