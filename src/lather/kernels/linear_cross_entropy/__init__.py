"""`linear_cross_entropy`: the cross entropy of the logits `x @ weight^T`, without storing them (0.8
GB in bf16 for 4096 tokens and a vocabulary of 102400).

    loss = 1 / normalizer * sum over tokens with a label of (Z - logits[label] + z_loss Z^2)
    with Z = logsumexp(logits)

Letters: T tokens, D hidden size, V vocabulary; a tile is N tokens by C columns of the vocabulary.

Forward processes the tiles with a running maximum and sum of exponentials (online softmax) and
keeps Z of each token besides its inputs. Backward computes each tile again, overwrites it with its
gradient and multiplies that twice. Columns are the outer loop: dW of a column is summed in fp32
over all tokens and written once; dx is summed in fp32 over all columns, directly in the output if
that is fp32.

Cost: four products of T V D flops instead of the three with stored logits (a third more
arithmetic), and one fp32 copy of a bf16 dx. With chunks of tokens times the whole vocabulary,
forward could compute both gradients and save the fourth product, but an fp32 copy of dW would again
take 0.8 GB here.

dW is computed together with dx, even if a pipeline defers other weight gradients: later it would
need each tile again, a fifth product.

Logits are always fp32: on CUDA the products take bf16 and return fp32; a CPU has no such product,
so tiles of the inputs are converted to fp32. On CUDA the gradient of a tile is rounded to bf16 for
the products, as in plain autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.boxes import gradient_dtype
from lather.device import is_gpu, no_autocast
from lather.kernels.backend import fastest, wide_product
from lather.kernels.cross_entropy import check_inputs, divided, flat_labels
from lather.kernels.cross_entropy.reference import losses
from lather.kernels.linear_cross_entropy import reference
from lather.shapes import Float, Int

GPU_TILE_TOKENS, GPU_TILE_ELEMENTS = 8192, 2**24
"""Largest number of tokens, and of elements, of a tile on a GPU: 64 MiB of fp32 logits and half of
that for their bf16 gradient. 8,192 tokens and a vocabulary of 102,400 make 50 tiles and about 400
launches in forward and backward; with tiles of an eighth of the size, which need 100 MB less, there
are 6,000."""

CPU_TILE = (512, 512)
"""Tokens and columns of a tile on a CPU: 1 MiB in fp32, which stays in the cache between the
products and the elementwise work."""


def linear_cross_entropy(
    x: Float[Tensor, "*tokens d"],
    weight: Float[Tensor, "v d"],
    labels: Int[Tensor, "*tokens"],
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    normalizer: float | Tensor = 1.0,
    tile: tuple[int, int] | None = None,
    accumulate: bool = False,
) -> Float[Tensor, ""]:
    """Return the cross entropy in nats of the logits `x @ weight^T`, summed over tokens and divided
    by `normalizer`.

    Args:
        x: (..., D). Under autocast, `x` and `weight` are converted to its dtype, tile by tile, as
            in `F.linear`; the gradients have the dtypes of `x` and `weight`
            (or `weight.grad_dtype`).
        weight: (V, D), in the dtype of `x` outside autocast. No gradient is computed for a frozen
            `weight` or `x`.
        labels: (...), integers in [0, V), or `ignore_index` for tokens that do not count.
        z_loss: coefficient of the squared logsumexp.
        normalizer: > 0, the number of labels in all micro-batches on all ranks; the host does not
            wait for a tensor on the device.
        tile: (tokens, columns) of a tile of logits; None: a size that suits the device.
        accumulate: in backward, add the gradient of `weight`, a leaf, tile by tile to the `.grad`
            that it has, with the bits that autograd's sum has; hooks on `weight` do not run then.

    Returns:
        The loss, a scalar in fp32 (fp64 for fp64).

    Raises:
        TypeError, ValueError: for dtypes, shapes or devices that do not match, a label out of range
            (on CUDA that is a device-side assert), or a normalizer that is not > 0.
    """
    check_inputs(x, labels, normalizer, "x")
    products = _products(x, weight, labels.numel(), tile)
    labels_T = flat_labels(labels, len(weight), ignore_index)
    leaf = _leaf(weight, accumulate=accumulate)
    return _LinearCrossEntropy.apply(x, weight, labels_T, products, z_loss, normalizer, leaf)  # type: ignore[no-untyped-call]


def linear_token_losses(
    x: Float[Tensor, "*tokens d"],
    weight: Float[Tensor, "v d"],
    labels: Int[Tensor, "*tokens"],
    *,
    ignore_index: int = -100,
    tile: tuple[int, int] | None = None,
    accumulate: bool = False,
) -> Float[Tensor, "*tokens"]:
    """Return the cross entropy in nats of each token, 0 for those with `ignore_index`: minus the
    log-probabilities of the labels. Differentiable once, for losses that weigh or compare tokens.

    Arguments, dtypes and errors are those of `linear_cross_entropy`, whose loss has the bits of the
    sum of these.
    """
    check_inputs(x, labels, 1.0, "x")
    products = _products(x, weight, labels.numel(), tile)
    labels_T = flat_labels(labels, len(weight), ignore_index)
    leaf = _leaf(weight, accumulate=accumulate)
    losses_T: Tensor = _LinearCrossEntropy.apply(x, weight, labels_T, products, 0.0, None, leaf)  # type: ignore[no-untyped-call]
    return losses_T.view(labels.shape)


def _products(
    x: Tensor, weight: Tensor, num_tokens: int, tile: tuple[int, int] | None
) -> _Products:
    """Return the products of `x` and `weight`, after a check of both and of `tile`."""
    dtype = _check_weight(x, weight)
    if tile is not None and min(tile) < 1:
        raise ValueError(
            f"tile={tile} is not valid: give two numbers >= 1, tokens and columns of the vocabulary"
        )
    if tile is None:
        tile = gpu_tile(num_tokens) if is_gpu(x) else CPU_TILE
    return _Products(dtype, is_gpu(x), tile)


def _leaf(weight: Tensor, *, accumulate: bool) -> Tensor | None:
    """Return the leaf to whose `.grad` backward adds; None: autograd does."""
    return weight if accumulate and weight.is_leaf and weight.requires_grad else None


def gpu_tile(num_tokens: int) -> tuple[int, int]:
    """Return tokens and columns of a tile on a GPU. They depend on the number of tokens alone, so
    that bits do not depend on free memory."""
    rows = min(GPU_TILE_TOKENS, max(1, num_tokens))
    return rows, GPU_TILE_ELEMENTS // rows


def _check_weight(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the operands of the product. Raises ValueError or TypeError for operands
    that do not match."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, but x has {tuple(x.shape)}: give "
            f"(vocabulary, {x.shape[-1]})"
        )
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}, but x is on {x.device}: move it there")
    if (
        not x.is_meta
        and torch.is_autocast_enabled(x.device.type)
        and torch.float64 not in (x.dtype, weight.dtype)
    ):
        return torch.get_autocast_dtype(x.device.type)
    if weight.dtype != x.dtype:
        raise TypeError(
            f"weight has dtype {weight.dtype}, but x has {x.dtype}: convert one, or use "
            "torch.autocast"
        )
    return x.dtype


@dataclass(frozen=True)
class _Products:
    """The products of tiles: their dtypes and sizes."""

    dtype: torch.dtype
    """dtype to which `x` and `weight` are converted."""
    widens: bool
    """Whether products of bf16 or fp16 tensors can return fp32 on the device (`torch.mm(...,
    out_dtype=torch.float32)`)."""
    tile: tuple[int, int]

    @property
    def wide(self) -> torch.dtype:
        """dtype of logits, sums and loss."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def operands(self) -> torch.dtype:
        """dtype of the operands of products."""
        return self.dtype if self.widens else self.wide

    def rounded(self, x: Tensor) -> Tensor:
        """Return `x` as (T, D), in `dtype`."""
        return x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(self.dtype)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b) if a.dtype == self.wide else wide_product(a, b)

    def add_product_(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        if a.dtype == self.wide:
            total.addmm_(a, b)
        else:
            wide_product(a, b, total)

    def tiles(
        self, x_TD: Tensor, weight_VD: Tensor
    ) -> Iterator[tuple[slice, Tensor, Iterator[tuple[slice, Tensor]]]]:
        """Yield each run of columns of the vocabulary, its weights, and an iterator over each run
        of tokens and their rows; weights and rows are operands of products."""
        for columns, weight_CD in self._runs(weight_VD, self.tile[1]):
            yield columns, weight_CD, self._runs(x_TD, self.tile[0])

    def _runs(self, x: Tensor, num_rows: int) -> Iterator[tuple[slice, Tensor]]:
        for first in range(0, len(x), num_rows):
            rows = slice(first, first + num_rows)
            yield rows, x[rows].to(self.dtype).to(self.operands)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        products: _Products,
        z_loss: float,
        normalizer: float | Tensor | None,
        leaf: Tensor | None,
    ) -> Tensor:
        """Return the sum of the losses divided by `normalizer`, or without one all losses."""
        with no_autocast(x):
            logsumexp_T, label_logit_T = _logsumexp(
                products.rounded(x), weight_VD, labels_T, products
            )
            ctx.save_for_backward(x, weight_VD, labels_T, logsumexp_T)
            ctx.products, ctx.z_loss, ctx.normalizer = products, z_loss, normalizer
            ctx.gradient_dtype, ctx.leaf = gradient_dtype(weight_VD), leaf
            losses_T = losses(logsumexp_T, label_logit_T, labels_T, z_loss)
            return losses_T if normalizer is None else divided(losses_T.sum(), normalizer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_VD, labels_T, logsumexp_T = ctx.saved_tensors
        products: _Products = ctx.products
        with no_autocast(x):
            scale = grad if ctx.normalizer is None else divided(grad, ctx.normalizer)
            scale_T = torch.where(labels_T >= 0, scale, 0)
            x_TD = products.rounded(x)
            dx_TD = torch.zeros_like(x_TD, dtype=products.wide) if ctx.needs_input_grad[0] else None
            total_VD = None if ctx.leaf is None else ctx.leaf.grad
            accumulates, dw_VD = total_VD is not None, total_VD
            if dw_VD is None and ctx.needs_input_grad[1]:
                dw_VD = torch.zeros_like(weight_VD, dtype=ctx.gradient_dtype)
            of_tokens = (labels_T, logsumexp_T, scale_T)
            args = (x_TD, weight_VD, of_tokens, products, ctx.z_loss, dx_TD, dw_VD)
            _add_gradients(*args, accumulates=accumulates)
            dx = None if dx_TD is None else dx_TD.to(x.dtype).view(x.shape)
            return dx, None if accumulates else dw_VD, None, None, None, None, None


def _logsumexp(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, products: _Products
) -> tuple[Tensor, Tensor]:
    """Return the logsumexp of each token's logits, and the logit of its label."""
    max_T = torch.full_like(labels_T, -torch.inf, dtype=products.wide)
    sum_T, label_logit_T = torch.zeros_like(max_T), torch.zeros_like(max_T)
    is_fp64 = products.wide == torch.float64
    update_logsumexp_ = fastest(reference.update_logsumexp_, x_TD, in_reference=is_fp64)
    for columns, weight_CD, runs in products.tiles(x_TD, weight_VD):
        for rows, x_ND in runs:
            state_N = max_T[rows], sum_T[rows], label_logit_T[rows]
            update_logsumexp_(  # no name holds the tile, so that there is one at a time
                *state_N, products.product(x_ND, weight_CD.T), labels_T[rows], columns.start
            )
    return max_T + sum_T.log(), label_logit_T


def _add_gradients(
    x_TD: Tensor,
    weight_VD: Tensor,
    of_tokens: tuple[Tensor, Tensor, Tensor],
    products: _Products,
    z_loss: float,
    dx_TD: Tensor | None,
    dw_VD: Tensor | None,
    *,
    accumulates: bool,
) -> None:
    """Add the gradients of `x_TD`, in fp32 or wider, and of `weight_VD`, in any dtype, to tensors
    of zeros, unless these are None. With `accumulates`, `dw_VD` is not zero: each tile's whole sum
    is added to it. `of_tokens`: labels, logsumexp and scale."""
    is_fp64 = products.wide == torch.float64
    softmax_gradient = fastest(reference.softmax_gradient, x_TD, in_reference=is_fp64)
    for columns, weight_CD, runs in products.tiles(x_TD, weight_VD):
        out_CD = None if dw_VD is None else dw_VD[columns]
        dw_CD = out_CD
        if out_CD is not None and (accumulates or out_CD.dtype != products.wide):
            dw_CD = torch.zeros_like(out_CD, dtype=products.wide)
        for rows, x_ND in runs:
            labels_N, logsumexp_N, scale_N = (x_T[rows] for x_T in of_tokens)
            gradient_NC = softmax_gradient(
                products.product(x_ND, weight_CD.T),
                labels_N,
                columns.start,
                logsumexp_N,
                scale_N,
                z_loss=z_loss,
                dtype=products.operands,
            )
            if dw_CD is not None:
                products.add_product_(dw_CD, gradient_NC.T, x_ND)
            if dx_TD is not None:
                products.add_product_(dx_TD[rows], gradient_NC, weight_CD)
            del gradient_NC  # before the next tile
        if out_CD is not None and dw_CD is not None and dw_CD is not out_CD:
            if accumulates:
                out_CD += dw_CD.to(out_CD.dtype)
            else:
                out_CD.copy_(dw_CD)
