"""SOAP in place of AdamW in an ordinary training loop, for a model that knows nothing of Lather.

    python examples/soap_any_model.py        (seconds on a CPU)

A small model with an embedding, a convolution, matrices and norms learns to read a formula off
sequences of symbols. `parameter_groups` finds what belongs where: the convolution's and the linear
layers' weights are preconditioned, the embedding, norms and biases get AdamW, all in one optimizer.
Prints the loss every 50 steps with SOAP and with AdamW, each at its own best learning rate of
three, on the same batches. One seed and a toy task: it shows how to use SOAP, not how much better
it is. docs/optimizers.md has the rates to begin with for language models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lather.optim import SOAP, parameter_groups

SYMBOLS, LENGTH, STEPS = 16, 16, 150
LEARNING_RATES = (3e-3, 1e-2, 3e-2)
BETAS = (0.9, 0.95)


class Reader(nn.Module):
    """Reads one number off each row of symbols: (B, LENGTH) -> (B,)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        self.conv = nn.Conv1d(width, width, kernel_size=5, padding=2)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 1))

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.conv(self.embed(symbols).mT).mT
        x = self.norm(torch.nn.functional.gelu(x)).mean(1)
        y: Tensor = self.mlp(x)
        return y.squeeze(-1)


def batch(step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Draw symbols, and the sum over positions of sin(value of a symbol times that of the next)."""
    generator = torch.Generator().manual_seed(step)
    symbols = torch.randint(SYMBOLS, (size, LENGTH), generator=generator)
    values = torch.linspace(-2, 2, SYMBOLS)[symbols]
    return symbols, (values[:, :-1] * values[:, 1:]).sin().sum(1)


def soap(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Make the optimizer; nothing else in this file is Lather's."""
    groups = parameter_groups(model)
    return SOAP(groups, lr=lr, betas=BETAS, second_moment="rotate", precondition_frequency=5)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS)


def train(
    make_optimizer: Callable[[nn.Module, float], torch.optim.Optimizer], lr: float
) -> list[float]:
    """Train, and return the loss of every step."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = make_optimizer(model, lr)
    losses = []
    for step in range(STEPS):
        symbols, target = batch(step)
        loss = (model(symbols) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / STEPS)
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_of_last(losses: list[float]) -> float:
    return sum(losses[-10:]) / 10


def main() -> None:
    for name, make_optimizer in (("SOAP", soap), ("AdamW", adamw)):
        runs = {lr: train(make_optimizer, lr) for lr in LEARNING_RATES}
        best = min(runs, key=lambda lr: mean_of_last(runs[lr]))
        losses = runs[best]
        shown = "  ".join(f"{step + 1}: {losses[step]:.3f}" for step in range(0, STEPS, 50))
        print(f"{name:5}  lr {best:g}  loss at step  {shown}  last ten: {mean_of_last(losses):.3f}")


if __name__ == "__main__":
    main()
