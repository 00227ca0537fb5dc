"""Q of Y = Q R for batches of square matrices: by LAPACK or cuSOLVER one by one, or by Cholesky-QR in blocks, in batched products.

`torch.linalg.qr` works through a batch one matrix at a time. `cholesky_qr` does the same factorisation as batched products: block
Gram-Schmidt, each block made orthogonal to the earlier ones twice ("twice is enough": Giraud, Langou, Rozloznik 2005), and orthonormal in
itself by Cholesky-QR (Y^T Y = R^T R, Q = Y R^{-1}), twice as well (Yamamoto et al. 2015: CholeskyQR2). Cholesky does not
mind how columns are scaled, but a column that all but depends on the others of its block is lost to it, and so is Y = K Q where K has
next to no full rank: its Gram matrix squares a condition number that is too large already. Such matrices are reported as failed.

`root_rows` is the cure. T = Q^T K Q is positive semi-definite, T = L L^T, and L^T is upper triangular: K Q = Q T = (Q L) L^T has the same Q
as Q L, whose condition number is the square root of K's. So Q L is made orthonormal in place of K Q. K is lifted by T's rounding errors,
which are all that is known of smaller eigenvalues, so that there is an L; where K is nothing but rounding errors the basis stays.

Everything here works on rows: x (B, n, n) holds Y^T, since K Q is at hand as (Q^T K), which is row-contiguous.

Trade-off: 4 n^3 flops (6.3 from the root) instead of Householder's 8/3 n^3, but at the rate of matrix products. Blocks are narrow on a CPU,
for its caches. On a GPU there are at most four, so that a batch is at most 120 launches; of triangular matrices only those blocks are
inverted, and the rest are products, since batched triangular solves with many right-hand sides are slow there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.device import is_gpu
from lather.shapes import Bool, Float

BLOCKS = ((1280, 128), (384, 64), (0, 32))
"""On a CPU: sizes from which on so many rows are made orthonormal by one Cholesky factorisation; products with few rows are slow."""

GPU_BLOCKS = 4
"""Most blocks on a GPU, where launches count."""

GPU_LEAST_BLOCK = 256
"""Rows of a block on a GPU, at least, if there are so many."""

MAX_FIRST_ERROR = 0.3
"""Largest deviation from orthonormality that a block may have before its second Cholesky-QR, which then is exact to rounding. Rows may
depend on each other, and on those of earlier blocks, down to about one part in a thousand."""

NOISE = 4.0
"""Lift of K under `root_rows`, in units of eps |K| (Frobenius). With 2 some factors of LoRA adapters fail, with 4 none of a thousand, but
some of exactly four equal eigenvalues; with 8 none of these either, but KL-SOAP, which divides by small eigenvalues, loses more."""

CPU_PRODUCTS = range(40, 1793)
"""Sizes at which products are faster than LAPACK's QR on one kind of CPU and not much slower on another (64 to 2048, docs/log.md)."""

GPU_PRODUCTS = range(1, 4097)
"""On a GPU a batched QR is a loop over kernel chains; products win at every size in use (an estimate, not yet measured)."""


def pick_refresh_method(n: int, device: torch.device) -> str:
    """The method that `refresh_method="auto"` means for n x n matrices on this kind of device: on a GPU "root_qr", on a CPU "cholesky_qr",
    for those that it does not fail on, where products are faster; else "qr".

    It depends on nothing else, so that a matrix is refreshed alike alone and in company, on one rank and on many.
    """
    if is_gpu(device):
        return "root_qr" if n in GPU_PRODUCTS else "qr"
    return "cholesky_qr" if n in CPU_PRODUCTS else "qr"


def block_rows(n: int, device: torch.device) -> int:
    """Rows that one Cholesky factorisation makes orthonormal."""
    if is_gpu(device):
        return max(GPU_LEAST_BLOCK, -(-n // (GPU_BLOCKS * 32)) * 32)
    return next(rows for size, rows in BLOCKS if n >= size)


def orthonormal_rows(y: Float[Tensor, "b n n"], method: str) -> tuple[Float[Tensor, "b n n"], Bool[Tensor, " b"]]:
    """The rows of `y` made orthonormal in order (Gram-Schmidt, up to signs), and which matrices failed (are not to be used).

    `method` is "qr" or "cholesky_qr". `y` may be overwritten.
    """
    if method == "qr":
        q: Tensor = torch.linalg.householder_product(*torch.geqrf(y.mT)).mT  # torch.linalg.qr without forming R: a tenth less
        return q, ~q.sum((1, 2)).isfinite()
    block = block_rows(y.shape[1], y.device)
    errors: list[Tensor] = []
    _orthonormalise_(y, 0, y.shape[1], torch.eye(block, dtype=y.dtype, device=y.device), errors)
    return y, ~((torch.stack(errors).amax(0) <= MAX_FIRST_ERROR) & y.sum((1, 2)).isfinite())


def root_rows(kq: Float[Tensor, "b n n"], q: Float[Tensor, "b n n"], norm: Float[Tensor, " b"]) -> Float[Tensor, "b n n"]:
    """Rows of (Q L)^T, where L L^T = Q^T K Q, lifted by `NOISE`; not finite where there is no L.

    Args:
        kq: Q^T K.
        q: Q^T, orthonormal rows.
        norm: Frobenius norm of K.
    """
    n, block = q.shape[1], block_rows(q.shape[1], q.device)
    eye = torch.eye(block, dtype=q.dtype, device=q.device)
    lift = (norm * (NOISE * torch.finfo(q.dtype).eps)).clamp_min(1e-30)[:, None, None] * eye
    left, x = torch.empty_like(q), torch.empty_like(q)
    for start in range(0, n, block):
        stop = min(start + block, n)
        panel = kq[:, start:] @ q[:, start:stop].mT
        width = stop - start
        panel[:, :width].add_(lift[:, :width, :width])
        if start:
            panel.baddbmm_(left[:, start:, :start], left[:, start:stop, :start].mT, alpha=-1)
        corner = torch.linalg.cholesky_ex(panel[:, :width]).L
        rows = torch.bmm(corner.mT, q[:, start:stop], out=x[:, start:stop])
        if stop < n:
            below = torch.bmm(panel[:, width:], _inverse(corner, eye).mT, out=left[:, stop:, start:stop])
            rows.baddbmm_(below.mT, q[:, stop:])
    return x


def _orthonormalise_(x: Tensor, start: int, stop: int, eye: Tensor, errors: list[Tensor]) -> None:
    """Rows start to stop of x (B, n, n), a block at a time, given that those before are orthonormal and taken out of them once."""
    block = len(eye)
    if stop - start <= block:
        _orthonormalise_block_(x[:, start:stop], x[:, :start], eye, errors)
        return
    middle = start + block * max(1, round((stop - start) / (2 * block)))
    _orthonormalise_(x, start, middle, eye, errors)
    first, second = x[:, start:middle], x[:, middle:stop]
    second.baddbmm_(second @ first.mT, first, alpha=-1)
    _orthonormalise_(x, middle, stop, eye, errors)


def _orthonormalise_block_(rows: Tensor, earlier: Tensor, eye: Tensor, errors: list[Tensor]) -> None:
    """Rows (B, w, n) made orthonormal, also to `earlier` (B, k, n); adds to `errors` how far they were from it half-way (B,).

    Between the two Cholesky-QRs, when rows have norm 1, what the first has magnified of the earlier rows is taken out.
    """
    x = _inverse_cholesky(rows @ rows.mT, eye) @ rows
    if earlier.shape[1]:
        x.baddbmm_(x @ earlier.mT, earlier, alpha=-1)
    gram = x @ x.mT
    width = x.shape[1]
    errors.append(torch.linalg.vector_norm(gram - eye[:width, :width], torch.inf, dim=(1, 2)))
    torch.bmm(_inverse_cholesky(gram, eye), x, out=rows)


def _inverse_cholesky(gram: Tensor, eye: Tensor) -> Tensor:
    """L^{-1} of gram = L L^T (B, w, w); useless, perhaps not finite, where gram is not positive definite."""
    return _inverse(torch.linalg.cholesky_ex(gram).L, eye)


def _inverse(lower: Tensor, eye: Tensor) -> Tensor:
    width = lower.shape[-1]
    inverse: Tensor = torch.linalg.solve_triangular(lower, eye[:width, :width].expand_as(lower), upper=False)
    return inverse
