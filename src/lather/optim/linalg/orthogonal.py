"""Q of Y = Q R for batches of square matrices: by LAPACK or cuSOLVER one by one, or by blocked Cholesky-QR in batched products.

`torch.linalg.qr` works through a batch one matrix at a time. `cholesky_qr` does the same factorisation as batched products: block
Gram-Schmidt, each block made orthogonal to the earlier ones twice ("twice is enough": Giraud, Langou, Rozloznik 2005), and orthonormal in
itself by Cholesky-QR (Y^T Y = R^T R, Q = Y R^{-1}), twice as well (Yamamoto et al. 2015: CholeskyQR2). Cholesky does not
mind how columns are scaled, but a column that all but depends on the others of its block is lost to it: a spectrum that falls steeply does
no harm to a basis that is nearly right, and is too much for one that is not. Such matrices are reported as failed, for the caller to send
to QR (1 to 2 % of the refreshes of the quickstart's first 60 steps).

Everything here works on rows: x (B, n, n) holds Y^T, since K Q is at hand as (Q^T K), which is row-contiguous.

Trade-off: 4 n^3 flops instead of Householder's 8/3 n^3, but at the rate of matrix products. On a CPU that pays from about n = 40.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.shapes import Bool, Float

BLOCKS = ((1280, 128), (384, 64), (0, 32))
"""Sizes from which on so many rows are made orthonormal by one Cholesky factorisation: products with few rows are slow."""

MAX_FIRST_ERROR = 0.3
"""Largest deviation from orthonormality that a block may have before its second Cholesky-QR, which then is exact to rounding. Rows may
depend on each other, and on those of earlier blocks, down to about one part in a thousand."""

CPU_CHOLESKY_QR = range(40, 1793)
"""Sizes at which Cholesky-QR is faster than LAPACK's QR on one kind of CPU and not much slower on another (64 to 2048, docs/log.md)."""

CUDA_CHOLESKY_QR = range(1, 4097)
"""On CUDA a batched QR is a loop over kernel chains; products win at every size in use (an estimate, not yet measured)."""


def pick_refresh_method(n: int, device_type: str) -> str:
    """ "cholesky_qr" or "qr", whichever is faster for n x n matrices on this kind of device: what `refresh_method="auto"` means.

    It depends on nothing else, so that a matrix is refreshed alike alone and in company, on one rank and on many.
    """
    return "cholesky_qr" if n in (CPU_CHOLESKY_QR if device_type == "cpu" else CUDA_CHOLESKY_QR) else "qr"


def orthonormal_rows(y: Float[Tensor, "b n n"], method: str) -> tuple[Float[Tensor, "b n n"], Bool[Tensor, " b"]]:
    """The rows of `y` made orthonormal in order (Gram-Schmidt, up to signs), and which matrices failed (are not to be used).

    `method` is "qr" or "cholesky_qr". `y` may be overwritten.
    """
    if method == "qr":
        q: Tensor = torch.linalg.householder_product(*torch.geqrf(y.mT)).mT  # torch.linalg.qr without forming R: a tenth less
        failed = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    else:
        failed = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        block = next(rows for size, rows in BLOCKS if y.shape[1] >= size)
        _orthonormalise_(y, 0, y.shape[1], block, failed)
        q = y
    return q, failed | ~q.sum((1, 2)).isfinite()


def _orthonormalise_(x: Tensor, start: int, stop: int, block: int, failed: Tensor) -> None:
    """Rows start to stop of x (B, n, n), `block` at a time, given that those before are orthonormal and taken out of them once."""
    if stop - start <= block:
        x[:, start:stop] = _orthonormal_block(x[:, start:stop], x[:, :start], failed)
        return
    middle = start + block * max(1, round((stop - start) / (2 * block)))
    _orthonormalise_(x, start, middle, block, failed)
    first, second = x[:, start:middle], x[:, middle:stop]
    x[:, middle:stop] = torch.baddbmm(second, second @ first.mT, first, alpha=-1)
    _orthonormalise_(x, middle, stop, block, failed)


def _orthonormal_block(x: Tensor, earlier: Tensor, failed: Tensor) -> Tensor:
    """The rows of x (B, w, n) orthonormal, also to `earlier` (B, k, n); notes in `failed` where they depend too much on each other.

    Between the two Cholesky-QRs, when rows have norm 1, what the first has magnified of the earlier rows is taken out.
    """
    x = _inverse_cholesky(x @ x.mT) @ x
    if earlier.shape[1]:
        x = torch.baddbmm(x, x @ earlier.mT, earlier, alpha=-1)
    gram = x @ x.mT
    error = (gram - torch.eye(x.shape[1], dtype=x.dtype, device=x.device)).flatten(1)
    failed |= ~(error.amax(1).maximum(-error.amin(1)) <= MAX_FIRST_ERROR)
    return _inverse_cholesky(gram) @ x


def _inverse_cholesky(gram: Tensor) -> Tensor:
    """L^{-1} of gram = L L^T (B, w, w); useless, perhaps not finite, where gram is not positive definite."""
    factor = torch.linalg.cholesky_ex(gram).L
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
    return inverse
