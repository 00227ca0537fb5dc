"""`linear_cross_entropy`: the loss of `x @ weight^T` without the logits, 0.8 GB in bf16 for 4096 tokens and a vocabulary of 102400.

    loss = 1 / normalizer * sum over tokens with a label of (Z - logits[label] + z_loss Z^2),   Z = logsumexp(logits)

Letters: T tokens, D hidden size, V vocabulary; a tile is N tokens by C columns of the vocabulary.

Forward goes over the tiles with a running maximum and sum of exponentials (online softmax) and keeps Z of each token besides its own
inputs. Backward computes each tile again, turns it into its gradient in place and multiplies it twice. Columns are the outer loop: dW of a
column is summed in fp32 over all tokens and written once; dx is summed in fp32 over all columns, in its own output where that is fp32.

Cost: four products of T V D where kept logits need three (a third more arithmetic), and one fp32 copy of a bf16 dx. Chunks of tokens with
the whole vocabulary would need no fourth product, as forward could make both gradients, but an fp32 copy of dW: 0.8 GB here again.

dW is made along with dx, also where a pipeline puts other weight gradients off: later it would need each tile once more, a fifth product.

Logits are in fp32 always: the products take bf16 and give fp32 on CUDA; on a CPU, where there is no such product, tiles of the inputs are
widened. On CUDA the gradient of a tile is rounded to bf16 for the products, as it is in plain autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.device import is_gpu, no_autocast
from lather.kernels.backend import use_triton
from lather.kernels.cross_entropy.labels import check_inputs, divided, flat_labels
from lather.kernels.cross_entropy.reference import losses
from lather.kernels.linear_cross_entropy import reference
from lather.shapes import Float, Int

GPU_TILE_TOKENS, GPU_TILE_ELEMENTS = 8192, 2**24
"""Most tokens, and elements, of a tile on a GPU: 64 MiB of logits in fp32 and half of that for their gradient in bf16. 8,192 tokens and a
vocabulary of 102,400 are 50 tiles, some 500 launches forward and backward; with tiles of an eighth, which need 100 MB less, 6,000."""

CPU_TILE = (512, 512)
"""1 MiB in fp32: a tile stays in the cache between the products and the elementwise work."""

SUM_ELEMENTS = 2**24
"""Elements of a product that are held before they are added to a sum, where one call cannot do both: 64 MiB in fp32."""


def linear_cross_entropy(
    x: Float[Tensor, "*tokens d"],
    weight: Float[Tensor, "v d"],
    labels: Int[Tensor, "*tokens"],
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    normalizer: float | Tensor = 1.0,
    tile: tuple[int, int] | None = None,
) -> Float[Tensor, ""]:
    """Cross entropy in nats of the logits `x @ weight^T`, summed over tokens and divided by `normalizer`; see the head of this file.

    Args:
        x: (..., D). Under autocast `x` and `weight` are taken in its dtype, tile by tile, as `F.linear` would; gradients have their own.
        weight: (V, D), of the same dtype as `x` outside autocast. A frozen one, or a frozen `x`, costs no work.
        labels: (...), integers in [0, V), or `ignore_index` for tokens that do not count.
        z_loss: coefficient of the squared logsumexp.
        normalizer: > 0, the count of labels over all micro-batches and ranks; a tensor on the device is not waited for.
        tile: (tokens, columns) of a tile of logits; None: what suits the device.

    Returns:
        The loss, a scalar in fp32 (fp64 for fp64).

    Raises:
        TypeError, ValueError: for dtypes, shapes or devices that do not fit, a label out of range (on CUDA that is a device-side assert),
            or a normalizer that is not > 0.
    """
    check_inputs(x, labels, normalizer, "x")
    dtype = _check_weight(x, weight)
    if tile is not None and min(tile) < 1:
        raise ValueError(f"tile={tile} is not valid: give two numbers >= 1, tokens and columns of the vocabulary")
    labels_T = flat_labels(labels, len(weight), ignore_index)
    plan = _ProductPlan(dtype, _has_mixed_products(x), tile or (gpu_tile(labels_T.numel()) if is_gpu(x) else CPU_TILE), z_loss, normalizer)
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, labels_T, plan)  # type: ignore[no-untyped-call]
    return loss


def gpu_tile(num_tokens: int) -> tuple[int, int]:
    """Tokens and columns of a tile for so many tokens: it depends on nothing else, so that bits do not depend on free memory."""
    rows = min(GPU_TILE_TOKENS, max(1, num_tokens))
    return rows, GPU_TILE_ELEMENTS // rows


def _check_weight(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which the product takes its operands; raises for operands that do not fit."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, but x has {tuple(x.shape)}: give (vocabulary, {x.shape[-1]})")
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}, but x is on {x.device}: move it there")
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(device_type)
    if weight.dtype != x.dtype:
        raise TypeError(f"weight has dtype {weight.dtype}, but x has {x.dtype}: convert one, or use torch.autocast")
    return x.dtype


def _has_mixed_products(x: Tensor) -> bool:
    """Whether the device multiplies bf16 or fp16 to fp32 (`torch.mm(..., out_dtype=torch.float32)`)."""
    return is_gpu(x)


@dataclass(frozen=True)
class _ProductPlan:
    """How the products are done."""

    dtype: torch.dtype
    """dtype to which `x` and `weight` are rounded."""
    mixed: bool
    tile: tuple[int, int]
    z_loss: float
    normalizer: float | Tensor

    @property
    def wide(self) -> torch.dtype:
        """dtype of logits, sums and loss."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def operands(self) -> torch.dtype:
        """dtype of the factors of products."""
        return self.dtype if self.mixed else self.wide

    def rounded(self, x: Tensor, labels_T: Tensor) -> Tensor:
        """`x` as (T, D), in `dtype`."""
        return x.reshape(labels_T.numel(), x.shape[-1]).to(self.dtype)

    def operand(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.operands)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b) if a.dtype == self.wide else torch.mm(a, b, out_dtype=self.wide)

    def add_product_(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a b. With `out_dtype`, not every supported torch adds to an fp32 sum in the same call: done by pieces of rows."""
        if a.dtype == self.wide:
            total.addmm_(a, b)
            return
        num_rows = max(1, SUM_ELEMENTS // max(1, b.shape[1]))
        for piece, rows in zip(total.split(num_rows), a.split(num_rows), strict=True):
            piece.add_(self.product(rows, b))

    def columns(self, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The vocabulary by tiles: which columns, and their rows of the weight."""
        for first in range(0, len(weight_VD), self.tile[1]):
            columns = slice(first, min(first + self.tile[1], len(weight_VD)))
            yield columns, self.operand(weight_VD[columns])

    def rows(self, x_TD: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The tokens by tiles."""
        for first in range(0, len(x_TD), self.tile[0]):
            rows = slice(first, min(first + self.tile[0], len(x_TD)))
            yield rows, self.operand(x_TD[rows])

    def implementation(self, x: Tensor) -> Any:
        """The module that does the elementwise work."""
        if use_triton(x) and self.wide == torch.float32:
            from lather.kernels.linear_cross_entropy import triton

            return triton
        return reference


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_VD: Tensor, labels_T: Tensor, plan: _ProductPlan) -> Tensor:
        with no_autocast(x):
            logsumexp_T, label_logit_T = _logsumexp(plan.rounded(x, labels_T), weight_VD, labels_T, plan)
            ctx.save_for_backward(x, weight_VD, labels_T, logsumexp_T)
            ctx.plan = plan
            return divided(losses(logsumexp_T, label_logit_T, labels_T, plan.z_loss).sum(), plan.normalizer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight_VD, labels_T, logsumexp_T = ctx.saved_tensors
        with no_autocast(x):
            scale_T = torch.where(labels_T >= 0, divided(grad, ctx.plan.normalizer), 0)
            x_TD = ctx.plan.rounded(x, labels_T)
            needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
            dx_TD, dw_VD = _gradients(x_TD, weight_VD, labels_T, logsumexp_T, scale_T, ctx.plan, needed)
            return None if dx_TD is None else dx_TD.to(x.dtype).view(x.shape), dw_VD, None, None


def _logsumexp(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, plan: _ProductPlan) -> tuple[Tensor, Tensor]:
    """logsumexp of each token's logits, and the logit of its label."""
    max_T = torch.full_like(labels_T, -torch.inf, dtype=plan.wide)
    sum_T, label_logit_T = torch.zeros_like(max_T), torch.zeros_like(max_T)
    work = plan.implementation(x_TD)
    for columns, weight_CD in plan.columns(weight_VD):
        for rows, x_ND in plan.rows(x_TD):
            logits_NC = plan.product(x_ND, weight_CD.T)
            work.update_logsumexp_(max_T[rows], sum_T[rows], label_logit_T[rows], logits_NC, labels_T[rows], columns.start)
    return max_T + sum_T.log(), label_logit_T


def _gradients(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, logsumexp_T: Tensor, scale_T: Tensor, plan: _ProductPlan, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `x_TD`, wide, and of `weight_VD`, in its own dtype; None where not needed."""
    dx_TD = torch.zeros_like(x_TD, dtype=plan.wide) if needed[0] else None
    dw_VD = torch.zeros_like(weight_VD) if needed[1] else None
    work = plan.implementation(x_TD)
    for columns, weight_CD in plan.columns(weight_VD):
        dw_CD = None if dw_VD is None else _sum_for(dw_VD[columns], plan.wide)
        for rows, x_ND in plan.rows(x_TD):
            logits_NC = plan.product(x_ND, weight_CD.T)
            tile = labels_T[rows], columns.start, logsumexp_T[rows], scale_T[rows]
            gradient_NC = work.softmax_gradient(logits_NC, *tile, z_loss=plan.z_loss, dtype=plan.operands)
            del logits_NC  # the sums below are made in its place
            if dw_CD is not None:
                plan.add_product_(dw_CD, gradient_NC.T, x_ND)
            if dx_TD is not None:
                plan.add_product_(dx_TD[rows], gradient_NC, weight_CD)
        if dw_VD is not None and dw_CD is not None and dw_VD.dtype != plan.wide:
            dw_VD[columns] = dw_CD
    return dx_TD, dw_VD


def _sum_for(out_CD: Tensor, dtype: torch.dtype) -> Tensor:
    """Where to sum up what becomes `out_CD`, which is zero: itself, if it has the dtype."""
    return out_CD if out_CD.dtype == dtype else torch.zeros_like(out_CD, dtype=dtype)
