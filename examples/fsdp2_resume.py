"""A training script under FSDP2 with SOAP, as short as it can be: shard, make the optimizer, train,
save; resume.

    torchrun --nproc-per-node 8 examples/fsdp2_resume.py runs/fsdp2        (seconds on CPUs, with
                                                                           gloo; on GPUs with NCCL)

Each call saves into a folder of its own, 0000, 0001 and so on; the next call, on any number of
ranks, goes on from the newest. Rank 0 prints the last loss of its own data.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lather.optim import SOAP, parameter_groups

saved = sorted(Path(sys.argv[1]).glob("*"))
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))

torch.manual_seed(0)  # every rank makes the same weights
blocks = [
    nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    for _ in range(4)
]
model = nn.Sequential(*blocks).to(device)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = SOAP(
    parameter_groups(model, rest_lr=3.2e-2),
    lr=4e-3,
    second_moment="rotate",
    precondition_frequency=10,
)

if saved:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

torch.manual_seed(1 + mesh.get_rank())  # every rank has data of its own
for _ in range(20):
    x = torch.randn(32, 64, device=device)
    loss = (model(x) - x.sin()).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

weights, state = get_state_dict(model, optimizer)
dcp.save(
    {"model": weights, "optimizer": state}, checkpoint_id=Path(sys.argv[1]) / f"{len(saved):04}"
)
if mesh.get_rank() == 0:
    print(f"loss {loss.item():.4f}")
torch.distributed.destroy_process_group()
