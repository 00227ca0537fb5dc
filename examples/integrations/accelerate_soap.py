"""SOAP in a training loop with accelerate.

    python examples/integrations/accelerate_soap.py
        (seconds on a CPU)
    accelerate launch --cpu --num_processes 2 examples/integrations/accelerate_soap.py

`prepare` wraps model, optimizer, data and schedule; `save_state` and `load_state` keep all of them.
After the first of two epochs the state is saved, and loaded into fresh objects that go on. Prints
the loss at the start, after an epoch, and at the end.
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lather.optim import SOAP, parameter_groups

STEPS, BATCH = 40, 32


def make_accelerator():
    """Make the accelerator. With `split_batches` BATCH counts the rows of all processes, and the
    schedule steps once in a step."""
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )


def make(accelerator):
    """Make model, optimizer, data and schedule, and prepare them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32),
        nn.GELU(),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.LayerNorm(32),
        nn.Linear(32, 1),
    )
    optimizer = SOAP(
        parameter_groups(model, rest_lr=3.2e-2),
        lr=4e-3,
        weight_decay=0.01,
        precondition_frequency=5,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    x = torch.randn(STEPS // 2 * BATCH, 16, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x[:, :4].sum(1, keepdim=True).tanh()), batch_size=BATCH)
    return accelerator.prepare(model, optimizer, data, schedule)


def train_epoch(accelerator, model, optimizer, data, schedule):
    losses = []
    for x, y in data:
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def main():
    accelerator = make_accelerator()
    folders = [tempfile.mkdtemp() if accelerator.is_main_process else None]
    broadcast_object_list(folders)
    first = train_epoch(accelerator, *make(accelerator))
    accelerator.save_state(folders[0])
    accelerator.free_memory()

    fresh = make(accelerator)
    accelerator.load_state(folders[0])
    second = train_epoch(accelerator, *fresh)
    accelerator.print(f"loss {first[0]:.4f} -> {second[0]:.4f} -> {second[-1]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
