"""Computes the rules that `lather bench optimizer` measures as their papers have them: one matrix
at a time, plain expressions, the dtype given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.contestants import OPTIONS
from lather.shapes import Float

WARMUP = 6
"""Steps of Adam before SOAP's first bases: enough for the factors of a small matrix to have full
rank."""


def naive_soap(
    w: Float[Tensor, "m n"], grads: Sequence[Float[Tensor, "m n"]], frequency: int
) -> Float[Tensor, "m n"]:
    """Run SOAP (arXiv:2409.11321, algorithms 3 and 4) on one matrix, with Adam for WARMUP steps;
    returns w after all `grads`."""
    rule = OPTIONS["soap"]
    (b1, b2), lr, eps, beta = rule["betas"], rule["lr"], rule["eps"], rule["shampoo_beta"]
    left, right = grads[0] @ grads[0].mT, grads[0].mT @ grads[0]
    q_left, q_right = (torch.eye(len(k), dtype=w.dtype) for k in (left, right))
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        w = w * (1 - lr * rule["weight_decay"])
        turned = q_left.mT @ g @ q_right
        m, v = b1 * m + (1 - b1) * turned, b2 * v + (1 - b2) * turned**2
        u = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps)
        w = w - lr * q_left @ u @ q_right.mT
        weight = (1 - beta) / (1 - beta ** (t + 1))
        left, right = (
            (1 - weight) * left + weight * g @ g.mT,
            (1 - weight) * right + weight * g.mT @ g,
        )
        m = q_left @ m @ q_right.mT
        if t == WARMUP:
            q_left, q_right = (torch.linalg.eigh(k).eigenvectors.flip(-1) for k in (left, right))
        elif t > WARMUP and t % frequency == 0:
            orders = [
                (q * (k @ q)).sum(0).argsort(descending=True)
                for k, q in ((left, q_left), (right, q_right))
            ]
            v = v[orders[0]][:, orders[1]]
            q_left, q_right = (
                torch.linalg.qr(k @ q[:, order]).Q
                for k, q, order in zip((left, right), (q_left, q_right), orders, strict=True)
            )
        m = q_left.mT @ m @ q_right
    return w


def naive_muon(
    w: Float[Tensor, "m n"], grads: Sequence[Float[Tensor, "m n"]], frequency: int
) -> Float[Tensor, "m n"]:
    """Run Muon (Jordan et al., 2024), whose update is 0.2 sqrt(max(m, n)) times the orthogonalised
    momentum; returns w after all `grads`."""
    rule = OPTIONS["muon"]
    mu, lr = rule["momentum"], rule["lr"]
    b = torch.zeros_like(w)
    for g in grads:
        b = mu * b + (1 - mu) * g
        x = mu * b + (1 - mu) * g
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        w = w * (1 - lr * rule["weight_decay"]) - lr * 0.2 * max(w.shape) ** 0.5 * x
    return w


def naive_adamw(
    w: Float[Tensor, "m n"], grads: Sequence[Float[Tensor, "m n"]], frequency: int
) -> Float[Tensor, "m n"]:
    """Run AdamW (arXiv:1711.05101, algorithm 2); returns w after all `grads`."""
    rule = OPTIONS["adamw"]
    (b1, b2), lr = rule["betas"], rule["lr"]
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        w = w * (1 - lr * rule["weight_decay"]) - lr * m / (1 - b1**t) / (
            (v / (1 - b2**t)).sqrt() + rule["eps"]
        )
    return w


NAIVE = {"soap": naive_soap, "muon": naive_muon, "adamw": naive_adamw}
