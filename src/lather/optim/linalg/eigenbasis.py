"""Eigenbases of Kronecker factors: how they are found and kept up to date.

Source: SOAP (arXiv:2409.11321, algorithm 4): eigh once, then one step of orthogonal iteration, Q = qr(K Q), per refresh. On a GPU eigh
takes matrices one by one, and the host waits for each: larger first bases are four steps of orthogonal iteration there, too. Everything is
batched over B matrices. A basis holds eigenvectors as columns, eigenvalues descending.

When bases turn, the moments kept in their coordinates are carried along by S = Q_new^T Q_old: exp_avg exactly, exp_avg_sq either by the
element-wise squares of S ("rotate": never negative, total mass kept) or by following the re-ordered columns ("permute").
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from lather.device import is_cpu, is_gpu
from lather.optim.linalg.kronecker import apply_transposed
from lather.optim.linalg.orthogonal import orthonormal_rows, pick_refresh_method, root_rows
from lather.shapes import Bool, Float, Int

logger = logging.getLogger(__name__)

DEFAULT_TOLERANCE = 1e-7
"""Off-diagonal share below which `use_adaptive_criteria` counts a basis as still good."""

FIRST_ROUNDS = 4
"""Steps of orthogonal iteration to a first basis: off the diagonal a thousandth is left of factors of first gradients."""

FIRST_BY_EIGH = 64
"""Largest size at which a GPU finds first bases by eigh, which is batched there up to about here."""

MIN_TURN = 0.4
"""Least geometric mean of the cosines between q_i and K q_i at which "auto" on a CPU refreshes by Cholesky-QR: 1 where the basis is K's.
Below, columns of K Q all but depend on each other and Cholesky-QR may fail, which costs as much as QR itself: of 18,385 factors of real
gradients (the quickstart, LoRA adapters, a small ViT) it fails on 1 in 167 of those above and on 1 in 3 of those below."""


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
    q = eye.where(is_zero(k)[:, None, None], q)
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


def get_eigenbasis_svd(k: Float[Tensor, "b n n"]) -> Float[Tensor, "b n n"]:
    """Eigenvectors of symmetric positive semi-definite `k`, eigenvalues descending, as its left singular vectors.

    Slower than `get_eigenbasis_eigh`, and orthonormal to rounding also in the null space of a rank-deficient `k`.
    """
    u: Tensor = torch.linalg.svd(k).U
    return u


def get_eigenbasis_qr(
    k: Float[Tensor, "b n n"], q: Float[Tensor, "b n n"], power_iter_steps: int = 1, method: str = "auto"
) -> tuple[Float[Tensor, "b n n"], Int[Tensor, "b n"]]:
    """`power_iter_steps` of orthogonal iteration from the old basis `q`, and the order in which the old columns were taken.

    The columns are first put in descending order of their Rayleigh quotients diag(Q^T K Q); K Q is formed once for both. `method` is
    "qr", "cholesky_qr" or "root_qr" (see `lather.optim.linalg.orthogonal`), with QR for the matrices that these fail on, or "auto", the
    best of the three for size and device, and on a CPU for the matrix.
    """
    q_new, order, failed = iterate(k, q, power_iter_steps, method)
    if method != "qr" and bool(failed.any()):
        again, _, _ = iterate(k[failed], q[failed], power_iter_steps, "qr")
        q_new = q_new.index_copy(0, failed.nonzero().squeeze(1), again)
    return q_new, order


def iterate(k: Tensor, q: Tensor, power_iter_steps: int, method: str) -> tuple[Tensor, Tensor, Tensor]:
    """As `get_eigenbasis_qr`, without help for the matrices that fail; they are the third result."""
    looks = method == "auto"
    if looks:
        method = pick_refresh_method(k.shape[-1], k.device)
    rows = q.mT @ k
    w = (rows.mT * q).sum(-2)
    order = w.argsort(dim=-1, descending=True, stable=True)
    by_qr = _is_hard(rows, w) if looks and method == "cholesky_qr" else None
    rows = _select_rows(rows, order)
    by_root = method == "root_qr"
    if by_root:
        q_rows, norm = _select_rows(q.mT, order), torch.linalg.vector_norm(k, dim=(1, 2))
    failed: Tensor | None = None
    for remaining in reversed(range(power_iter_steps)):
        if by_root:
            rows, failed_now = orthonormal_rows(root_rows(rows, q_rows, norm), "cholesky_qr")
            q_rows = rows
        else:
            rows, failed_now = _orthonormal_rows(rows, method, by_qr)
        failed = failed_now if failed is None else failed | failed_now
        if remaining:
            rows = rows @ k
    assert failed is not None
    return rows.mT, order, failed


def _is_hard(rows: Tensor, w: Tensor) -> Tensor:
    """Which matrices (B,) are refreshed by QR at once (`MIN_TURN`), by the rows of Q^T K and their products with those of Q^T."""
    cosines = w / torch.linalg.vector_norm(rows, dim=-1)
    is_hard: Tensor = ~(cosines.log10().mean(-1) > math.log10(MIN_TURN))  # where a cosine is no number, too
    return is_hard


def _orthonormal_rows(rows: Tensor, method: str, by_qr: Tensor | None) -> tuple[Tensor, Tensor]:
    """`orthonormal_rows`, for the matrices `by_qr` by QR; each as it would be alone."""
    if by_qr is None or bool(by_qr.all()) or not bool(by_qr.any()):
        return orthonormal_rows(rows, method if by_qr is None or not bool(by_qr[0]) else "qr")
    failed = torch.empty_like(by_qr)
    for chosen, by in ((by_qr, "qr"), (~by_qr, method)):
        rows[chosen], failed[chosen] = orthonormal_rows(rows[chosen], by)
    return rows, failed


def _select_rows(x: Tensor, order: Tensor) -> Tensor:
    """The rows of each matrix of x (B, n, k) in the given order (B, n)."""
    b, n, k = x.shape
    first = torch.arange(0, b * n, n, device=x.device).unsqueeze(1)
    return x.reshape(b * n, k).index_select(0, (order + first).flatten()).view(b, n, k)


def rayleigh_quotients(k: Float[Tensor, "b n n"], q: Float[Tensor, "b n n"]) -> Float[Tensor, "b n"]:
    """diag(Q^T K Q): the eigenvalues that a basis stands for."""
    return (q * (k @ q)).sum(-2)


def is_zero(k: Float[Tensor, "b n n"]) -> Bool[Tensor, " b"]:
    """Which factors have never seen a gradient."""
    return (k == 0).all(-1).all(-1)


def is_still_diagonal(k: Float[Tensor, "b n n"], q: Float[Tensor, "b n n"], tolerance: float) -> Bool[Tensor, " b"]:
    """The skip criterion: |diag(Q^T K Q)| >= (1 - tolerance) |Q^T K Q|, in Frobenius norm, per matrix."""
    rotated = q.mT @ k @ q
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    still: Tensor = torch.linalg.vector_norm(diagonal, dim=-1) >= (1 - tolerance) * torch.linalg.matrix_norm(rotated)
    return still


def update_eigenbasis_and_momentum(  # noqa: PLR0913 - one dim of a batch, in the paper's letters
    k: Float[Tensor, "b n n"],
    q: Float[Tensor, "b n n"],
    exp_avg: Float[Tensor, "b *dims"] | None,
    exp_avg_sq: Float[Tensor, "b *dims"],
    dim: int,
    *,
    method: str = "auto",
    second_moment: str = "permute",
    power_iter_steps: int = 1,
    eigenvalues: Float[Tensor, "b n"] | None = None,
) -> Bool[Tensor, " b"]:
    """Refresh the basis `q` of inner dim `dim` from its factor `k` and carry the moments into the new coordinates; all in place.

    Args:
        exp_avg: the first moment, if it is kept in the bases' coordinates; else None.
        method: "eigh", a whole eigendecomposition; "iteration", `FIRST_ROUNDS` steps of orthogonal iteration by "root_qr"; "first",
            the better of these two for size and device; "qr", "cholesky_qr" or "root_qr", steps of it; "auto", the best of these here.
            The first three have no tie to the old columns, so under "permute" exp_avg_sq then stays as it is.
        second_moment: "permute" or "rotate", how exp_avg_sq follows (see the head of this file).
        eigenvalues: if given, set to those of the new basis; columns are then in their order.

    Returns:
        Which matrices failed: nothing of theirs has changed. Except by "eigh", the device is not waited for.
    """
    if method == "first":
        method = "iteration" if is_gpu(k) and k.shape[-1] > FIRST_BY_EIGH else "eigh"
    order: Tensor | None = None
    if method == "eigh":
        q_new, failed = get_eigenbasis_eigh(k, q)
    elif method == "iteration":
        q_new, _, failed = iterate(k, q, FIRST_ROUNDS, "root_qr")
        q_new = _unless(failed, q, q_new)
    else:
        q_new, order, failed = iterate(k, q, power_iter_steps, method)
        q_new = _unless(failed, q, q_new)
    if eigenvalues is not None:
        w = rayleigh_quotients(k, q_new)
        if order is not None:
            again = w.argsort(dim=-1, descending=True, stable=True)
            w, order = w.gather(-1, again), order.gather(-1, again)
            q_new = q_new.gather(-1, again.unsqueeze(-2).expand_as(q_new))
        # An expert that never saw a token has no eigenvalues yet; with zeros its first gradient would count for 1 / eps.
        eigenvalues.copy_(eigenvalues.where((failed | is_zero(k))[:, None], w))
        q_new = _unless(failed, q, q_new)
    turns = second_moment == "rotate" or (exp_avg is not None and _prefers_turn(exp_avg, dim))
    turn = q_new.mT @ q if turns else None
    if exp_avg is not None:
        exp_avg.copy_(_unless(failed, exp_avg, _turned(exp_avg, q, q_new, turn, dim)))
    if second_moment == "rotate":
        assert turn is not None
        exp_avg_sq.copy_(_unless(failed, exp_avg_sq, apply_transposed(turn.mT.square(), exp_avg_sq, dim)))
    elif order is not None:
        exp_avg_sq.copy_(_unless(failed, exp_avg_sq, _reordered(exp_avg_sq, order, dim)))
    q.copy_(q_new)
    return failed


def _prefers_turn(x: Tensor, dim: int) -> bool:
    """Whether S = Q_new^T Q_old and one product with it are fewer flops than two products, with Q_old and Q_new^T."""
    n = x.shape[dim + 1]
    return n * n < x[0].numel()


def _turned(x: Tensor, q_old: Tensor, q_new: Tensor, turn: Tensor | None, dim: int) -> Tensor:
    if turn is not None:
        return apply_transposed(turn.mT, x, dim)
    return apply_transposed(q_new, apply_transposed(q_old.mT, x, dim), dim)


def _unless(failed: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """`new`, and where the refresh failed `old`, to the bit."""
    if is_cpu(new) and not bool(failed.any()):  # elsewhere to look would be to wait for the device
        return new
    return old.where(failed.view(-1, *[1] * (old.dim() - 1)), new)


def _reordered(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """Inner dim `dim` of x (B, ...) in the given order (B, n)."""
    if dim == 0:
        return _select_rows(x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1), order).view(x.shape)
    shape = [len(order)] + [1] * (x.dim() - 1)
    shape[dim + 1] = order.shape[1]
    return x.gather(dim + 1, order.view(shape).expand_as(x))
