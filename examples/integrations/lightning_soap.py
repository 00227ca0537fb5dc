"""SOAP in a Lightning module.

    python examples/integrations/lightning_soap.py        (seconds on a CPU)

Lightning runs forward and backward in a closure that it gives to `step`, clips in it, steps the
schedule and saves. A second Trainer goes on from the checkpoint of the first of two epochs. Prints
the loss at the start, after an epoch and at the end, and the loss at the end of the second.
"""

import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lather.optim import SOAP, parameter_groups

STEPS, BATCH = 40, 32


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 32),
            nn.GELU(),
            nn.LayerNorm(32),
            nn.Linear(32, 1),
        )
        self.losses = []

    def training_step(self, batch):
        x, y = batch
        loss = (self.layers(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = SOAP(
            parameter_groups(self, rest_lr=3.2e-2),
            lr=4e-3,
            weight_decay=0.01,
            precondition_frequency=5,
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_data():
    x = torch.randn(STEPS // 2 * BATCH, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :4].sum(1, keepdim=True).tanh()), batch_size=BATCH)


def fit(folder, checkpoint=None, data=None, **options):
    """Train a module, and save it after each epoch."""
    torch.manual_seed(0)
    module = Regression()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=2, gradient_clip_val=1.0, callbacks=[saver], **quiet, **options
    )
    trainer.fit(module, data or make_data(), ckpt_path=checkpoint)
    return module


def main():
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(folder).losses
        second = fit(folder, f"{folder}/epoch=0.ckpt").losses
        print(
            f"loss {whole[0]:.4f} -> {whole[STEPS // 2]:.4f} -> {whole[-1]:.4f}, resumed: "
            f"{second[-1]:.4f}"
        )


if __name__ == "__main__":
    main()
