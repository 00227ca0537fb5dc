"""SOAP, Muon and AdamW on one screen: plain PyTorch, one matrix at a time, in the papers' order.

Read this file first. Each function takes a matrix and its gradients, step by step, and returns the
matrix after the last step. The optimizers of this package do the same in batches, on any mesh and
with less memory; tests/optim and the check of `lather bench optimizer` compare them with this file.

Letters: w the matrix, g its gradient, t the step (from 1), m and v Adam's moments, left and right
the Kronecker factors, q_left and q_right their eigenvectors (columns), b Muon's momentum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lather.shapes import Float


def soap(  # noqa: PLR0913 - the options of the paper
    w: Float[Tensor, "m n"],
    grads: Sequence[Float[Tensor, "m n"]],
    *,
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    adam_warmup_steps: int = 1,
) -> Float[Tensor, "m n"]:
    """Run SOAP (arXiv:2409.11321, algorithms 3 and 4): Adam in the eigenbases of the two averages
    of g g^T and g^T g. The first `adam_warmup_steps` steps are plain Adam, since there is no basis
    yet."""
    b1, b2 = betas
    left, right = grads[0] @ grads[0].mT, grads[0].mT @ grads[0]
    q_left, q_right = (torch.eye(len(k), dtype=w.dtype, device=w.device) for k in (left, right))
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        # Adam, in the bases of earlier steps
        x = q_left.mT @ g @ q_right
        m, v = b1 * m + (1 - b1) * x, b2 * v + (1 - b2) * x**2
        u = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps)
        w = (1 - lr * weight_decay) * w - lr * q_left @ u @ q_right.mT

        # the factors, as averages whose bias is corrected
        beta = 1 - (1 - shampoo_beta) / (1 - shampoo_beta ** (t + 1))
        left = beta * left + (1 - beta) * g @ g.mT
        right = beta * right + (1 - beta) * g.mT @ g

        # new bases: m turns with them, the entries of v follow the order of their columns
        m = q_left @ m @ q_right.mT
        if t == adam_warmup_steps:
            q_left, q_right = (torch.linalg.eigh(k).eigenvectors.flip(-1) for k in (left, right))
        elif t > adam_warmup_steps and t % precondition_frequency == 0:
            rows, columns = descending(left, q_left), descending(right, q_right)
            v = v[rows][:, columns]
            q_left = torch.linalg.qr(left @ q_left[:, rows]).Q
            q_right = torch.linalg.qr(right @ q_right[:, columns]).Q
        m = q_left.mT @ m @ q_right
    return w


def descending(k: Float[Tensor, "n n"], q: Float[Tensor, "n n"]) -> Tensor:
    """Order the columns of q by their Rayleigh quotients q_i^T k q_i, largest first."""
    return (q * (k @ q)).sum(0).argsort(descending=True)


def muon(
    w: Float[Tensor, "m n"],
    grads: Sequence[Float[Tensor, "m n"]],
    *,
    lr: float = 1e-2,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    nesterov: bool = True,
    steps: int = 5,
) -> Float[Tensor, "m n"]:
    """Run Muon (Jordan et al., 2024): the momentum, orthogonalized by Newton-Schulz and scaled to
    about the size of AdamW's update (arXiv:2502.16982)."""
    b = torch.zeros_like(w)
    for g in grads:
        b = momentum * b + (1 - momentum) * g
        x = momentum * b + (1 - momentum) * g if nesterov else b
        x = x / x.norm()
        for _ in range(steps):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        w = (1 - lr * weight_decay) * w - lr * 0.2 * max(w.shape) ** 0.5 * x
    return w


def adamw(
    w: Float[Tensor, "m n"],
    grads: Sequence[Float[Tensor, "m n"]],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Float[Tensor, "m n"]:
    """Run AdamW (arXiv:1711.05101, algorithm 2)."""
    b1, b2 = betas
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        u = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps)
        w = (1 - lr * weight_decay) * w - lr * u
    return w
