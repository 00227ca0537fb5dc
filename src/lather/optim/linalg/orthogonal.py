"""Q of Y = Q R for batches of square matrices: by LAPACK or cuSOLVER for one matrix at a time, or
by block Cholesky-QR in batched products.

`torch.linalg.qr` processes one matrix of a batch at a time. `cholesky_qr` does the same
factorization as batched products: block Gram-Schmidt, in which each block is made orthogonal to the
earlier ones twice ("twice is enough": Giraud, Langou, Rozloznik 2005), and orthonormal in itself by
Cholesky-QR (Y^T Y = R^T R, Q = Y R^{-1}), also twice (Yamamoto et al. 2015: CholeskyQR2). Cholesky
is insensitive to the scale of columns, but it fails if a column nearly depends on the others of its
block. It also fails for Y = K Q if K is nearly rank-deficient, because the Gram matrix of Y squares
a condition number that is too large already. Such matrices are reported as failed.

`root_rows` helps for these. T = Q^T K Q is positive semi-definite, T = L L^T, and L^T is upper
triangular: K Q = Q T = (Q L) L^T has the same Q as Q L, whose condition number is the square root
of K's. So Q L is made orthonormal instead of K Q. For L to exist, T is lifted by a multiple of its
rounding errors; below these nothing is known about its eigenvalues. If K is nothing but rounding
errors, the basis stays.

Everything here works on rows: x (B, n, n) holds Y^T, because K Q is computed as Q^T K, which is
row-contiguous.

Precision: on a GPU, products of large matrices are split (`lather.optim.linalg.split_products`,
error 5e-6), where nothing is lost by it. T = (K Q)^T Q has errors relative to the rows of K Q, so
to the smaller of two eigenvalues; what they could take from its definiteness, `root_lift` adds. The
first projection and the first Cholesky-QR only prepare their second ones. These stay in true fp32
where small numbers are differences of large ones: the coefficients of rows along the earlier ones,
the second Gram matrix, and the product with its inverse factor, which is nearly the identity. The
second projection, whose coefficients are small, is split. So rows are as orthonormal as in true
fp32. Small triangles, and their products, stay in true fp32, too.

Trade-off: with b blocks 4 + 4/b + 3/b^2 times n^3 flops, and with `root_rows` 19/3 + 7/b + 3/b^2,
instead of Householder's 8/3, but at the speed of matrix products; K Q takes 2 n^3 more. Blocks are
narrow on a CPU, for its caches (4.2 to 4.8 n^3 from n = 200 on). On a GPU each block costs
launches: there are four, of at least 256 rows (5.2 n^3, with `root_rows` 8.2, from n = 1,024 on),
and above n = 2,048 one for each 512 rows (4.5 and 7.2 at n = 4,096), so that a batch takes at most
130 launches up to 2,048 and 220 up to 4,096, or 290 and 510 if products are split. Only the
diagonal blocks of triangular matrices are inverted, and all else is products, because batched
triangular solves with many right-hand sides are slow there, and so are solves and Cholesky
factorizations of more than 512 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.device import is_gpu
from lather.kernels.symmetric_product import symmetric_product
from lather.optim.linalg.split_products import (
    SPLIT_ERROR,
    Operand,
    SplitMatrix,
    add_product_,
    empty_split,
    operand,
    split_product,
    write_split,
)
from lather.shapes import Bool, Float

BLOCKS = ((1280, 128), (384, 64), (0, 32))
"""(least size, rows of a block) on a CPU: larger matrices have larger blocks, because products with
few rows are slow."""

GPU_BLOCKS = 4
"""Number of blocks on a GPU, where each costs launches, unless they would be too small or large."""

GPU_BLOCK_ROWS = (256, 512)
"""Least and largest number of rows of a block on a GPU. torch 2.11 gives larger batched triangular
solves to MAGMA, which prepares each call on the host, and cuSOLVER's batched Cholesky is bound by
latency."""

MAX_FIRST_ERROR = 0.3
"""Largest deviation from orthonormality of a block before its second Cholesky-QR, which is then
exact up to rounding. It allows rows that depend on each other, and on earlier blocks, except for
about one part in a thousand."""

NOISE = 4.0
"""Number, in units of eps |K| (Frobenius), that `root_rows` adds to the diagonal. With 2, some
factors of LoRA adapters fail; with 4, none of a thousand, but some with exactly four equal
eigenvalues; with 8, none of these either, but KL-SOAP, which divides by small eigenvalues, loses
more."""

LOCAL_NOISE = 2e-5
"""Number that `root_lift` multiplies the local scale of K by, if products are split. With 0, some
factors fail whose eigenvectors have two or four elements; with 1e-5, none of them. Of 64 factors of
rank 3 to 8 with exactly equal eigenvalues 3 fail whatever it is, and 1 in true fp32."""

CPU_PRODUCTS = range(40, 1793)
"""Sizes for which Cholesky-QR is faster than LAPACK's QR on one kind of CPU and not much slower on
another (64 to 2048, docs/log.md)."""

GPU_PRODUCTS = range(1, 4097)
"""Sizes for which Cholesky-QR is taken on a GPU, where QR launches a chain of kernels for each
matrix (an estimate, not yet measured)."""


def pick_refresh_method(n: int, device: torch.device) -> str:
    """Return the method that `refresh_method="auto"` stands for with n x n matrices on this kind of
    device: if products are faster, "root_qr" on a GPU and "cholesky_qr" on a CPU; otherwise "qr".

    It depends on nothing else, so that a matrix has the same results in every batch and on every
    number of ranks.
    """
    if is_gpu(device):
        return "root_qr" if n in GPU_PRODUCTS else "qr"
    return "cholesky_qr" if n in CPU_PRODUCTS else "qr"


def block_rows(n: int, device: torch.device) -> int:
    """Return the number of rows of a block, which one Cholesky factorization makes orthonormal."""
    if is_gpu(device):
        least, most = GPU_BLOCK_ROWS
        num_blocks = max(GPU_BLOCKS, -(-n // most))
        return max(least, -(-n // (num_blocks * 32)) * 32)
    return next(rows for size, rows in BLOCKS if n >= size)


def orthonormal_rows(
    y: Float[Tensor, "b n n"], method: str, *, split: bool = False
) -> tuple[Float[Tensor, "b n n"], Bool[Tensor, " b"]]:
    """Make the rows of `y` orthonormal, in order (Gram-Schmidt, up to signs). Return them, and
    which matrices failed and must not be used.

    `method` is "qr" or "cholesky_qr", whose products may be `split`. `y` may be overwritten.
    """
    if method == "qr":
        q: Tensor = torch.linalg.householder_product(
            *torch.geqrf(y.mT)
        ).mT  # torch.linalg.qr without forming R: a tenth less
        return q, ~q.sum((1, 2)).isfinite()
    block = block_rows(y.shape[1], y.device)
    eye = torch.eye(block, dtype=y.dtype, device=y.device)
    errors: list[Tensor] = []
    parts = empty_split(y) if split else y
    _orthonormalise_(y, parts, slice(0, y.shape[1]), eye, errors)
    return y, ~((torch.stack(errors).amax(0) <= MAX_FIRST_ERROR) & y.sum((1, 2)).isfinite())


def root_lift(
    k: Float[Tensor, "b n n"], q: Float[Tensor, "b n n"], *, split: bool
) -> Float[Tensor, "b n"]:
    """Return what `root_rows` adds to the diagonal of T = Q^T K Q, for the rows q of Q^T.

    True fp32 has errors of about eps |K|. Of split products the errors are independent, and the
    spectral norm of their matrix is 2 `SPLIT_ERROR` |K| / sqrt(n); the lift is twice that. Where a
    few elements hold a row, they do not average; their error is relative to sum_k q_ik^2 K_kk.
    """
    n = k.shape[-1]
    norm = torch.linalg.vector_norm(k, dim=(1, 2))[:, None]
    level = NOISE * torch.finfo(k.dtype).eps
    if not split:
        return (norm * level).clamp_min(1e-30).expand(-1, n)
    local = torch.bmm(q.square(), k.diagonal(dim1=1, dim2=2).unsqueeze(-1)).squeeze(-1)
    lift = norm * max(level, 4 * SPLIT_ERROR / n**0.5) + LOCAL_NOISE * local
    return lift.clamp_min(1e-30)


def root_rows(
    kq: Float[Tensor, "b n n"], q: Operand, lift: Float[Tensor, "b n"]
) -> Float[Tensor, "b n n"]:
    """Return the rows of (Q L)^T, where L L^T = Q^T K Q, lifted by `lift`; they are not finite if
    L does not exist.

    Args:
        kq: Q^T K.
        q: Q^T, orthonormal rows (B, n, n); their parts if products are split.
        lift: `root_lift`; where K is zero, it is all there is, and the basis stays.
    """
    n, block, split = kq.shape[1], block_rows(kq.shape[1], kq.device), isinstance(q, SplitMatrix)
    eye = torch.eye(block, dtype=kq.dtype, device=kq.device)
    x, kq_operand = torch.empty_like(kq), operand(kq, split=split)
    left = empty_split(kq) if split else torch.empty_like(kq)
    for start in range(0, n, block):
        stop = min(start + block, n)
        panel = split_product(kq_operand[:, start:], q[:, start:stop].mT)
        width = stop - start
        panel[:, :width].diagonal(dim1=1, dim2=2).add_(lift[:, start:stop])
        if start:
            above = left[:, start:stop, :start]
            add_product_(panel, left[:, start:, :start], above.mT, alpha=-1)
        corner = torch.linalg.cholesky_ex(panel[:, :width]).L
        rows = x[:, start:stop]
        split_product(operand(corner, split=split).mT, q[:, start:stop], out=rows)
        if stop < n:
            below = left[:, stop:, start:stop]
            out = below if isinstance(below, Tensor) else None
            write_split(below, torch.bmm(panel[:, width:], _inverse(corner, eye).mT, out=out))
            add_product_(rows, below.mT, q[:, stop:])
    return x


def _orthonormalise_(
    x: Tensor, parts: Operand, rows: slice, eye: Tensor, errors: list[Tensor]
) -> None:
    """Make these rows of x (B, n, n) orthonormal, block by block, and write their `parts`. The rows
    before them must be orthonormal, and must have been projected out of them once."""
    start, stop, block = rows.start, rows.stop, len(eye)
    if stop - start <= block:
        _orthonormalise_block_(x[:, rows], x[:, :start], parts[:, :stop], eye, errors)
        return
    middle = start + block * max(1, round((stop - start) / (2 * block)))
    _orthonormalise_(x, parts, slice(start, middle), eye, errors)
    first, second = parts[:, start:middle], x[:, middle:stop]
    split = isinstance(parts, SplitMatrix)
    along = split_product(operand(second, split=split), first.mT)
    add_product_(second, operand(along, split=split), first, alpha=-1)
    _orthonormalise_(x, parts, slice(middle, stop), eye, errors)


def _orthonormalise_block_(
    rows: Tensor, earlier: Tensor, parts: Operand, eye: Tensor, errors: list[Tensor]
) -> None:
    """Make `rows` (B, w, n) orthonormal, and orthogonal to `earlier` (B, k, n). Append to `errors`
    their deviation before the second Cholesky-QR (B,). `parts` are those of both, earlier ones
    first; those of `rows` are written.

    The first Cholesky-QR magnifies components along the earlier rows; they are projected out
    between the two.
    """
    num_earlier, width = earlier.shape[1], rows.shape[1]
    split = isinstance(parts, SplitMatrix)
    rows_parts = parts[:, num_earlier:]
    write_split(rows_parts, rows)
    gram = split_product(rows_parts, rows_parts.mT) if split else symmetric_product(rows)
    x = split_product(operand(_inverse_cholesky(gram, eye), split=split), rows_parts)
    if num_earlier:
        along = operand(x @ earlier.mT, split=split)
        add_product_(x, along, parts[:, :num_earlier], alpha=-1)
    gram = symmetric_product(x)
    errors.append(torch.linalg.vector_norm(gram - eye[:width, :width], torch.inf, dim=(1, 2)))
    torch.bmm(_inverse_cholesky(gram, eye), x, out=rows)
    write_split(rows_parts, rows)


def _inverse_cholesky(gram: Tensor, eye: Tensor) -> Tensor:
    """Return L^{-1} for gram = L L^T (B, w, w); it is meaningless, and perhaps not finite, if gram
    is not positive definite."""
    return _inverse(torch.linalg.cholesky_ex(gram).L, eye)


def _inverse(lower: Tensor, eye: Tensor) -> Tensor:
    width = lower.shape[-1]
    return torch.linalg.solve_triangular(lower, eye[:width, :width].expand_as(lower), upper=False)
