"""Eigenbases of Kronecker factors: how they are computed and kept up to date.

Source: SOAP (arXiv:2409.11321, algorithm 4): eigh once, then one step of orthogonal iteration, Q =
qr(K Q), per refresh. On a GPU eigh processes one matrix after the other, and the host waits for
each; there, larger first bases are computed by four steps of orthogonal iteration instead.
Everything is batched over B matrices. The columns of a basis are eigenvectors, in descending order
of eigenvalues.

When a basis changes, S = Q_new^T Q_old transforms the moments that are kept in its coordinates:
exp_avg exactly, exp_avg_sq either by the element-wise squares of S ("rotate": never negative, and
the sum is kept) or by re-ordering with the columns ("permute").

Bases do not depend on the scale of K, but its elements are squares of gradients, and their squares
leave the range of fp32 for gradients of 1e-10. K is therefore divided by a power of two first,
which changes no bit of the basis.

Precision: on a GPU the products K Q of large factors are split
(`lather.optim.linalg.split_products`) in refreshes by "root_qr", the default there; those by "qr",
which repeat what failed, and by "cholesky_qr" multiply in true fp32. The error of split products is
5e-6 of |K|, spread over all elements: eigenvectors whose eigenvalues are below 1e-6 of |K| turn
more slowly, because `root_lift` covers the error. Split are then also the product that rotates
exp_avg_sq, a sum of numbers that are not negative, so that each element has about this relative
error, and S, if nothing but its squares is needed: they let 1e-11 of the largest elements into the
smallest, of which TF32 in an update lets in 1e-7. The products for eigenvalues and exp_avg stay in
true fp32: an optimizer divides by the former, and the errors of the latter add up over refreshes.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from lather.device import Read, is_cpu, is_gpu, is_true
from lather.optim.linalg.kronecker import apply_transposed
from lather.optim.linalg.orthogonal import (
    orthonormal_rows,
    pick_refresh_method,
    root_lift,
    root_rows,
)
from lather.optim.linalg.scale import near_one
from lather.optim.linalg.split_products import (
    Operand,
    SplitMatrix,
    is_split,
    operand,
    split_product,
)
from lather.shapes import Bool, Float, Int

logger = logging.getLogger(__name__)

DEFAULT_TOLERANCE = 1e-7
"""Relative off-diagonal part below which `use_adaptive_criteria` does not refresh a basis."""

FIRST_ROUNDS = 4
"""Steps of orthogonal iteration for a first basis: for factors of first gradients they leave a
thousandth off the diagonal."""

FIRST_BY_EIGH = 64
"""Largest size for which first bases are computed by eigh on a GPU, where eigh is batched up to
about this size."""

MIN_TURN = 0.4
"""Least geometric mean of the cosines between q_i and K q_i (1 for an eigenbasis of K) at which
"auto" on a CPU refreshes by Cholesky-QR. Below it, columns of K Q are nearly linearly dependent and
Cholesky-QR may fail, which costs as much as QR itself. Of 18,385 factors of real gradients (the
quickstart, LoRA adapters, a small ViT) it failed for 1 in 167 of those above and for 1 in 3 of
those below."""


def get_eigenbasis_eigh(
    k: Float[Tensor, "b n n"], fallback: Float[Tensor, "b n n"] | None = None
) -> tuple[Float[Tensor, "b n n"], Bool[Tensor, " b"]]:
    """Return the eigenvectors of symmetric `k`, in descending order of eigenvalues, and which
    matrices failed.

    A decomposition that raises or is not finite is tried again in fp64; if that fails, too, the
    basis is that of `fallback` (the identity if there is none). A matrix of zeros, of an expert
    that never got a token, has the identity as basis.
    """
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand_as(k)
    scaled = near_one(k)
    q = _eigh_or_none(scaled)
    if q is None:
        q = torch.stack([_eigh_retried(one) for one in scaled])
    q = eye.where(is_zero(k)[:, None, None], q)
    failed = ~q.isfinite().all(-1).all(-1)
    return (eye if fallback is None else fallback).where(failed[:, None, None], q), failed


def _eigh_or_none(k: Tensor) -> Tensor | None:
    try:
        q: Tensor = torch.linalg.eigh(k).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but missing from torch.linalg's __all__
        return None
    return q.flip(-1) if is_true(q.isfinite().all(), Read.FINITE) else None


def _eigh_retried(k: Tensor) -> Tensor:
    """Decompose one (n, n) matrix in its dtype, or else in fp64; return NaN if both fail."""
    for attempt in (k, k.double()):
        q = _eigh_or_none(attempt)
        if q is not None:
            return q.to(k.dtype)
    logger.warning(
        "eigh failed in %s and in fp64 for a factor of %d x %d, which keeps its basis",
        k.dtype,
        *k.shape,
    )
    return torch.full_like(k, torch.nan)


def get_eigenbasis_svd(k: Float[Tensor, "b n n"]) -> Float[Tensor, "b n n"]:
    """Return the eigenvectors of symmetric positive semi-definite `k`, in descending order of
    eigenvalues, as its left singular vectors.

    It is slower than `get_eigenbasis_eigh`, but the vectors are orthonormal up to rounding even in
    the null space of a rank-deficient `k`."""
    return torch.linalg.svd(near_one(k)).U


def get_eigenbasis_qr(
    k: Float[Tensor, "b n n"],
    q: Float[Tensor, "b n n"],
    power_iter_steps: int = 1,
    method: str = "auto",
) -> tuple[Float[Tensor, "b n n"], Int[Tensor, "b n"]]:
    """Take `power_iter_steps` of orthogonal iteration from the old basis `q`. Return the new basis
    and the order of the old columns in it.

    The columns are first sorted by their Rayleigh quotients diag(Q^T K Q), in descending order; K Q
    is computed once for both purposes. `method` is "qr", "cholesky_qr" or "root_qr" (see
    `lather.optim.linalg.orthogonal`), or "auto", the best of the three for the size and the device,
    and on a CPU for each matrix. Matrices for which the method fails are refreshed by QR.
    """
    q_new, order, failed = iterate(k, q, power_iter_steps, method)
    if method != "qr" and is_true(failed.any(), Read.CHOICE):
        again, _, _ = iterate(k[failed], q[failed], power_iter_steps, "qr")
        q_new = q_new.index_copy(0, failed.nonzero().squeeze(1), again)
    return q_new, order


def iterate(
    k: Tensor, q: Tensor, power_iter_steps: int, method: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as `get_eigenbasis_qr`, but do not repeat matrices that failed; the third result
    tells which did."""
    is_auto, k = method == "auto", near_one(k)
    if is_auto:
        method = pick_refresh_method(k.shape[-1], k.device)
    by_root, split = method == "root_qr", _splits(k, method)
    k_operand, q_rows = operand(k, split=split), operand(q.mT, split=split)
    rows = split_product(q_rows, k_operand)
    w = (rows.mT * q).sum(-2)
    order = w.argsort(dim=-1, descending=True, stable=True)
    by_qr = _is_hard(rows, w) if is_auto and method == "cholesky_qr" else None
    rows = _select_rows(rows, order)
    if by_root:
        q_rows = _select_operand_rows(q_rows, order)
        lift = root_lift(k, q.mT, split=split).gather(1, order)
    failed: Tensor | None = None
    for remaining in reversed(range(power_iter_steps)):
        if by_root:
            rows = root_rows(rows, q_rows, lift)
            rows, failed_now = orthonormal_rows(rows, "cholesky_qr", split=split)
        else:
            rows, failed_now = _orthonormal_rows(rows, method, by_qr)
        failed = failed_now if failed is None else failed | failed_now
        if remaining:
            if by_root:
                lift = root_lift(k, rows, split=split)
            q_rows = operand(rows, split=split)
            rows = split_product(q_rows, k_operand)
    assert failed is not None
    return rows.mT, order, failed


def _splits(k: Tensor, method: str) -> bool:
    """Tell whether a refresh by this method splits its products."""
    if method == "auto":
        method = pick_refresh_method(k.shape[-1], k.device)
    return method in ("root_qr", "iteration") and is_split(k)


def _is_hard(rows: Tensor, w: Tensor) -> Tensor:
    """Return which matrices (B,) are refreshed by QR without trying Cholesky-QR (`MIN_TURN`), from
    the rows of Q^T K and their products w with those of Q^T."""
    cosines = w / torch.linalg.vector_norm(rows, dim=-1)
    return ~(cosines.log10().mean(-1) > math.log10(MIN_TURN))  # also true for NaN


def _orthonormal_rows(rows: Tensor, method: str, by_qr: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call `orthonormal_rows` with `method`, or "qr" for the matrices `by_qr`; the results are
    those of each matrix alone."""
    if by_qr is None or not is_true(by_qr.any(), Read.CHOICE):
        return orthonormal_rows(rows, method)
    if is_true(by_qr.all(), Read.CHOICE):
        return orthonormal_rows(rows, "qr")
    failed = torch.empty_like(by_qr)
    for chosen, by in ((by_qr, "qr"), (~by_qr, method)):
        rows[chosen], failed[chosen] = orthonormal_rows(rows[chosen], by)
    return rows, failed


def _select_rows(x: Tensor, order: Tensor) -> Tensor:
    """Return the rows of each matrix of x (B, n, k) in the given order (B, n)."""
    b, n, k = x.shape
    first = torch.arange(0, b * n, n, device=x.device).unsqueeze(1)
    return x.reshape(b * n, k).index_select(0, (order + first).flatten()).view(b, n, k)


def _select_operand_rows(x: Operand, order: Tensor) -> Operand:
    """Do the same as `_select_rows` with an operand of products."""
    if isinstance(x, SplitMatrix):
        return x.map(lambda part: _select_rows(part, order))
    return _select_rows(x, order)


def rayleigh_quotients(
    k: Float[Tensor, "b n n"], q: Float[Tensor, "b n n"]
) -> Float[Tensor, "b n"]:
    """Return diag(Q^T K Q), the estimates of the eigenvalues of K in the basis Q."""
    return (q * (k @ q)).sum(-2)


def is_zero(k: Float[Tensor, "b n n"]) -> Bool[Tensor, " b"]:
    """Return which factors are zero, because they have never had a gradient."""
    return (k == 0).all(-1).all(-1)


def is_still_diagonal(
    k: Float[Tensor, "b n n"], q: Float[Tensor, "b n n"], tolerance: float
) -> Bool[Tensor, " b"]:
    """Return which matrices need no refresh: |diag(Q^T K Q)| >= (1 - tolerance) |Q^T K Q|, in the
    Frobenius norm."""
    rotated = q.mT @ near_one(k) @ q
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    return torch.linalg.vector_norm(diagonal, dim=-1) >= (1 - tolerance) * torch.linalg.matrix_norm(
        rotated
    )


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
    """Refresh the basis `q` of inner dim `dim` from its factor `k`, and transform the moments to
    the new coordinates, all in place.

    Args:
        exp_avg: the first moment, if it is kept in the coordinates of the bases, otherwise None.
        method: "eigh": a full eigendecomposition; "iteration": `FIRST_ROUNDS` steps of orthogonal
            iteration by "root_qr"; "first": the better of these two for the size and the device;
            "qr", "cholesky_qr" or "root_qr": orthogonal iteration by this algorithm; "auto": the
            best of these three. The columns that the first three return do not correspond to the
            old ones, so with "permute" they leave exp_avg_sq as it is.
        second_moment: "permute" or "rotate": how exp_avg_sq is transformed (see the head of this
            file).
        eigenvalues: if given, they are set to those of the new basis, whose columns are then sorted
            by them.

    Returns:
        Which matrices failed; their basis and moments have not changed. Only "eigh" waits for the
        device.
    """
    if method == "first":
        method = "iteration" if is_gpu(k) and k.shape[-1] > FIRST_BY_EIGH else "eigh"
    order: Tensor | None = None
    if method == "eigh":
        q_new, failed = get_eigenbasis_eigh(k, q)
    elif method == "iteration":
        q_new, _, failed = iterate(k, q, FIRST_ROUNDS, "root_qr")
    else:
        q_new, order, failed = iterate(k, q, power_iter_steps, method)
    if eigenvalues is not None:
        w = rayleigh_quotients(k, q_new)
        if order is not None:
            again = w.argsort(dim=-1, descending=True, stable=True)
            w, order = w.gather(-1, again), order.gather(-1, again)
            q_new = q_new.gather(-1, again.unsqueeze(-2).expand_as(q_new))
        # An expert that never got a token keeps its initial eigenvalues; zeros would weigh its
        # first gradient by 1 / eps.
        eigenvalues.copy_(eigenvalues.where((failed | is_zero(k))[:, None], w))
    split, turn = _splits(k, method), None
    if second_moment == "rotate" or (exp_avg is not None and _prefers_turn(exp_avg, dim)):
        of_squares = split and exp_avg is None
        turn = split_product(operand(q_new.mT, split=of_squares), operand(q, split=of_squares))
    if exp_avg is not None:
        _replace_(exp_avg, _turned(exp_avg, q, q_new, turn, dim), failed)
    if second_moment == "rotate":
        assert turn is not None
        _replace_(exp_avg_sq, _rotated(exp_avg_sq, turn, dim, split=split), failed)
    elif order is not None:
        _replace_(exp_avg_sq, _reordered(exp_avg_sq, order, dim), failed)
    _replace_(q, q_new, failed)
    return failed


def _prefers_turn(x: Tensor, dim: int) -> bool:
    """Whether computing S = Q_new^T Q_old and one product with it takes fewer flops than two
    products, with Q_old and Q_new^T."""
    n = x.shape[dim + 1]
    return n * n < x[0].numel()


def _turned(x: Tensor, q_old: Tensor, q_new: Tensor, turn: Tensor | None, dim: int) -> Tensor:
    if turn is not None:
        return apply_transposed(turn.mT, x, dim)
    return apply_transposed(q_new, apply_transposed(q_old.mT, x, dim), dim)


def _rotated(v: Tensor, turn: Tensor, dim: int, *, split: bool) -> Tensor:
    """Return the second moment `v` with its inner dim `dim` multiplied by the squares of S. What is
    split has relative errors of up to 2^-9 below 1e-33, where gradients are below 3e-17."""
    squares = turn.square()
    if not split or v.dim() != 3:
        return apply_transposed(squares.mT, v, dim)
    s, parts = operand(squares, split=True), operand(v, split=True)
    return split_product(s, parts) if dim == 0 else split_product(parts, s.mT)


def _replace_(old: Tensor, new: Tensor, failed: Tensor) -> None:
    """Set `old` to `new`, except for matrices whose refresh failed."""
    # On a GPU the check would wait for the device.
    if is_cpu(new) and not is_true(failed.any(), Read.CHOICE):
        old.copy_(new)
    else:
        torch.where(failed.view(-1, *[1] * (old.dim() - 1)), old, new, out=old)


def _reordered(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """Return x (B, ...) with inner dim `dim` in the given order (B, n)."""
    if dim == 0:
        return _select_rows(x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1), order).view(x.shape)
    shape = [len(order)] + [1] * (x.dim() - 1)
    shape[dim + 1] = order.shape[1]
    return x.gather(dim + 1, order.view(shape).expand_as(x))
