"""A fine-tuning script of transformers and FSDP2 with one line of Lather, that of the optimizer.

    python examples/integrations/fsdp2_finetune.py          (a tiny Qwen3-MoE: seconds on a CPU)
    torchrun --nproc-per-node 2 examples/integrations/fsdp2_finetune.py MODEL OUT

MODEL is a folder that `from_pretrained` reads, OUT a folder for the result. The data are sequences
that count up. Rank 0 prints the loss of every fifth step.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lather.optim import Muon, parameter_groups

STEPS, BATCH, LENGTH = 20, 16, 16
TINY = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
)


def make_model(folder, device):
    torch.manual_seed(0)  # every rank makes the same weights
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    return AutoModelForCausalLM.from_config(TINY).to(device)


def batch(step, rank, num_ranks, device):
    """Return this rank's part of a batch that is the same on any number of ranks."""
    start = torch.arange(BATCH)[:, None] * 7 + step
    rows = (start + (start % 4 + 1) * torch.arange(LENGTH)) % 64
    return rows.chunk(num_ranks)[rank].to(device)


def main():
    for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("MASTER_PORT", 0)):
        os.environ.setdefault(name, str(alone))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    model = make_model(sys.argv[1] if len(sys.argv) > 1 else "", device)
    narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else None
    options = {"mp_policy": narrow} if narrow else {}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)

    # was: optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = Muon(parameter_groups(model, rest_lr=3e-3), lr=3e-3, momentum=0.9)

    for step in range(STEPS):
        rows = batch(step, mesh.get_rank(), mesh.size(), device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), dist.ReduceOp.SUM)
        if mesh.get_rank() == 0 and (step % 5 == 0 or step == STEPS - 1):
            print(f"step {step:2}  loss {loss.item() / mesh.size():.5f}", flush=True)
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if len(sys.argv) > 2 and mesh.get_rank() == 0:
        model.save_pretrained(sys.argv[2], state_dict=whole)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
