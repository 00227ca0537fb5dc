"""Eigenbases of Kronecker factors: how they are found, kept up to date, and applied.

Source: SOAP (arXiv:2409.11321, algorithm 4): eigh once, then one step of orthogonal iteration, Q = qr(K Q), per refresh. Everything is
batched over B matrices. A basis holds eigenvectors as columns, eigenvalues descending. `precondition` takes a tensor
into the bases and out again; a dim without basis is left alone.

When bases turn, the moments kept in their coordinates are carried along by S = Q_new^T Q_old: exp_avg exactly, exp_avg_sq either by the
element-wise squares of S ("rotate": never negative, total mass kept) or by following the re-ordered columns ("permute").
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lather.optim.kronecker import Factors
from lather.shapes import Bool, Float, Int

logger = logging.getLogger(__name__)

DEFAULT_TOLERANCE = 1e-7
"""Off-diagonal share below which `use_adaptive_criteria` counts a basis as still good."""


def precondition(
    x: Float[Tensor, "b *dims"], bases: Mapping[int, Float[Tensor, "b _ _"]], direction: Literal["in", "out"]
) -> Float[Tensor, "b *dims"]:
    """ "in": into the eigenbases, Q_L^T X Q_R for a matrix and Q_i^T on each dim i in general. "out": back, Q_L X Q_R^T."""
    for dim, q in bases.items():
        x = _apply(x, q if direction == "in" else q.mT, dim)
    return x


def _apply(x: Tensor, a: Tensor, dim: int) -> Tensor:
    """a^T applied on inner dim `dim` of x."""
    if x.dim() == 2:
        return (x.unsqueeze(1) @ a).squeeze(1)
    if x.dim() == 3:
        return a.mT @ x if dim == 0 else x @ a
    rows = x.movedim(dim + 1, -1)
    return (rows.flatten(1, -2) @ a).view(rows.shape).movedim(-1, dim + 1)


def get_eigenbasis_eigh(
    k: Float[Tensor, "b n n"], fallback: Float[Tensor, "b n n"] | None = None
) -> tuple[Float[Tensor, "b n n"], Bool[Tensor, " b"]]:
    """Eigenvectors of symmetric `k`, eigenvalues descending, and which matrices failed.

    A matrix whose decomposition raises or is not finite is tried again in fp64; if that fails too, its basis is `fallback`'s (the
    identity if there is none). A matrix of zeros, an expert that never saw a token, has the identity as basis.
    """
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand_as(k)
    q = _eigh_or_none(k)
    if q is None:
        q = torch.stack([_eigh_retried(one) for one in k])
    q = eye.where((k == 0).all(-1).all(-1)[:, None, None], q)
    failed = ~q.isfinite().all(-1).all(-1)
    return (eye if fallback is None else fallback).where(failed[:, None, None], q), failed


def _eigh_or_none(k: Tensor) -> Tensor | None:
    try:
        q: Tensor = torch.linalg.eigh(k).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but missing from torch.linalg's __all__
        return None
    return q.flip(-1) if bool(q.isfinite().all()) else None


def _eigh_retried(k: Tensor) -> Tensor:
    """One (n, n) matrix: as it is, then in fp64, then NaN."""
    for attempt in (k, k.double()):
        q = _eigh_or_none(attempt)
        if q is not None:
            return q.to(k.dtype)
    logger.warning("eigh failed in %s and in fp64 for a factor of %d x %d: its basis stays as it is", k.dtype, *k.shape)
    return torch.full_like(k, torch.nan)


def get_eigenbasis_qr(
    k: Float[Tensor, "b n n"], q: Float[Tensor, "b n n"], power_iter_steps: int = 1
) -> tuple[Float[Tensor, "b n n"], Int[Tensor, "b n"]]:
    """`power_iter_steps` of orthogonal iteration from the old basis `q`, and the order in which the old columns were taken.

    The columns are first put in descending order of their Rayleigh quotients diag(Q^T K Q); K Q is formed once for both.
    """
    kq = k @ q
    order = (q * kq).sum(-2).argsort(dim=-1, descending=True, stable=True)
    kq = kq.gather(-1, order.unsqueeze(-2).expand_as(kq))
    for remaining in reversed(range(power_iter_steps)):
        q = torch.linalg.qr(kq).Q
        kq = k @ q if remaining else kq
    return q, order


def is_still_diagonal(k: Float[Tensor, "b n n"], q: Float[Tensor, "b n n"], tolerance: float) -> Bool[Tensor, " b"]:
    """The skip criterion: |diag(Q^T K Q)| >= (1 - tolerance) |Q^T K Q|, in Frobenius norm, per matrix."""
    rotated = q.mT @ k @ q
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    still: Tensor = torch.linalg.vector_norm(diagonal, dim=-1) >= (1 - tolerance) * torch.linalg.matrix_norm(rotated)
    return still


@dataclass
class RefreshCounts:
    """Matrices of one refresh by what happened to them, as 0-dim tensors (read later, so that CUDA need not wait)."""

    done: Tensor | int = 0
    skipped: Tensor | int = 0
    failed: Tensor | int = 0


def update_eigenbasis_and_momentum(  # noqa: PLR0913 - one argument over, none of them can be derived
    factors: Factors,
    bases: Factors,
    exp_avg: Float[Tensor, "b *dims"],
    exp_avg_sq: Float[Tensor, "b *dims"],
    *,
    use_eigh: bool = False,
    second_moment: str = "permute",
    power_iter_steps: int = 1,
    tolerance: float | None = None,
    keep: Bool[Tensor, " b"] | None = None,
) -> RefreshCounts:
    """Refresh every basis from its factor and carry both moments into the new coordinates; all in place.

    Args:
        use_eigh: a whole eigendecomposition instead of orthogonal iteration. New eigenvectors have no tie to the old columns, so
            under "permute" exp_avg_sq then stays as it is.
        second_moment: "permute" or "rotate", how exp_avg_sq follows (see the head of this file).
        tolerance: if given, a factor that `is_still_diagonal` is skipped; the other factors of the parameter are refreshed all the same.
        keep: batch entries (experts) whose bases stay as they are.
    """
    counts = RefreshCounts()
    turns: Factors = {}
    for dim, k in factors.items():
        q_old = bases[dim]
        order = torch.arange(k.shape[-1], device=k.device).expand(k.shape[:-1])
        stay = torch.zeros(len(k), dtype=torch.bool, device=k.device) if keep is None else keep
        if tolerance is not None:
            stay = stay | is_still_diagonal(k, q_old, tolerance)
        if use_eigh:
            q_new, failed = get_eigenbasis_eigh(k, q_old)
        else:
            q_new, new_order = get_eigenbasis_qr(k, q_old, power_iter_steps)
            failed = ~q_new.isfinite().all(-1).all(-1)
            order = order.where((stay | failed)[:, None], new_order)
        stay_or_failed = (stay | failed)[:, None, None]
        q_new = q_old.where(stay_or_failed, q_new)
        turn = q_new.mT @ q_old
        # Exactly the identity where the basis stays, so that a skipped parameter keeps its moments to the bit.
        turns[dim] = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).where(stay_or_failed, turn)
        if second_moment == "permute":
            _reorder_(exp_avg_sq, order, dim)
        q_old.copy_(q_new)
        counts.skipped = counts.skipped + stay.sum()
        counts.failed = counts.failed + (failed & ~stay).sum()
        counts.done = counts.done + (~stay & ~failed).sum()
    exp_avg.copy_(precondition(exp_avg, turns, "out"))
    if second_moment == "rotate":
        exp_avg_sq.copy_(precondition(exp_avg_sq, {dim: s.square() for dim, s in turns.items()}, "out"))
    return counts


def _reorder_(x: Tensor, order: Tensor, dim: int) -> None:
    """In place: inner dim `dim` of x (B, ...) in the given order (B, n)."""
    shape = [len(order)] + [1] * (x.dim() - 1)
    shape[dim + 1] = order.shape[1]
    x.copy_(x.gather(dim + 1, order.view(shape).expand_as(x)))
