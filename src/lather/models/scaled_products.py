"""The products of routed experts in FP8 with block scales (`lather.kernels.block_scaled`).

Gate/up, down and the gradients of their inputs multiply operands that are rounded to e4m3: weights
once per step, rows of tokens by a pass of their own, so that products look them up by number, and
rows of experts by the kernels that compute them. All else stays as it is: results are in bf16, and
the gradients of weights are products in bf16 with fp32 sums. That of gate/up reads its input as the
product did, rounded to e4m3, on every mesh; so rows travel to experts on other ranks, and are kept
there, in FP8 alone.

Letters: R rows, G rows grouped by expert, E experts, I input and O output size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lather.kernels.block_scaled import (
    BlockScaled,
    grouped_product,
    scaled_weights,
    unscaled_rows,
)
from lather.models.grouped_products import grouped_weight_gradient
from lather.models.lora import AdaptedStack
from lather.shapes import Float, Int

Rows = Tensor | BlockScaled
"""Rows in the dtype of products, or in FP8."""


@dataclass(frozen=True)
class ScaledStack(AdaptedStack):
    """A stack of experts' weights without an adapter, whose products are in FP8, of rows in
    FP8."""

    def linear(self, x: Any, row_G: Int[Tensor, " g"] | None = None) -> Float[Tensor, "g o"]:
        return self._with_bias(self._product(x, row_G))

    def transposed(self, grad: Any, row_G: Int[Tensor, " g"] | None = None) -> Float[Tensor, "g i"]:
        return self._product(grad, row_G, transposed=True)

    def _product(self, rows: Any, row_G: Tensor | None, *, transposed: bool = False) -> Tensor:
        assert isinstance(rows, BlockScaled)
        weights = self.cache.converted(self.weight_EOI, scaled_weights)
        return grouped_product(
            rows, row_G, weights, self.end_E, torch.bfloat16, transposed=transposed
        )


def scaled_weight_gradient(
    g_GO: Float[Tensor, "g o"],
    x: BlockScaled,
    end_E: Int[Tensor, " e"],
    *,
    x_rows: Int[Tensor, " g"],
    dtype: torch.dtype,
    total: Float[Tensor, "e o i"] | None = None,
) -> Float[Tensor, "e o i"]:
    """Compute `grouped_weight_gradient` from rows in FP8, which are read in the dtype of g."""
    x_GI = unscaled_rows(x, x_rows, g_GO.dtype)
    return grouped_weight_gradient(g_GO, x_GI, end_E, dtype=dtype, total=total)
