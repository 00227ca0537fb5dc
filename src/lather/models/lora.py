"""Low-rank adapters (LoRA): two small matrices for each adapted weight, which are trained while the
weight is frozen.

    y = x W^T + (alpha / rank) (x A^T) B^T        that is, the weight is W + (alpha / rank) B A

Source: LoRA (Hu et al., arXiv:2106.09685). As in PEFT, B starts at zero, so that a fresh adapter
has no effect, and A is uniform within 1 / sqrt(I) (Kaiming initialization with a = sqrt 5).

The products with A and B are computed separately from the product with W. The alternative,
computing W + B A and multiplying with it, is simpler, and memory="reference" does it; but it saves
a copy of every adapted weight for backward, and computes a gradient as large as the weight only to
derive those of A and B from it.

Letters: I input and O output size of a weight, E experts, G rows grouped by expert, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lather.errors import require
from lather.models.grouped_products import (
    expert_of_row,
    grouped_linear,
    grouped_linear_transposed,
    grouped_weight_gradient,
    rows_of,
)
from lather.models.saving.rounded_weights import NO_CACHE, RoundedWeights
from lather.shapes import Float, Int


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA): with them, only the adapters are trained and the adapted weights
    stay frozen."""

    rank: int = 0
    """Rank of the adapters; 0: no adapters, the weights themselves are trained."""
    alpha: float = 16.0
    """Scale of the adapters: an adapter's product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("attention", "experts")
    """Weights that get an adapter: attention, experts (in a model without experts: dense),
    shared_experts, dense, or patterns of names such as layers.0.* or *.q_proj."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "at least 0")
        require(0 < self.alpha < math.inf, "lora.alpha", self.alpha, "above 0 and finite")
        require(
            bool(self.targets) and all(self.targets),
            "lora.targets",
            self.targets,
            "one or more of attention, experts, shared_experts, dense and patterns of names",
        )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 0.0


class Adapter(nn.Module):
    """The adapter of a weight (O, I) or of a stack of weights (E, O, I): `A` (..., r, I) and `B`
    (..., O, r)."""

    def __init__(self, weight: Float[Tensor, "*e o i"], rank: int, scale: float) -> None:
        """Create A and B, filled with zeros, on the device and in the dtype of `weight`;
        `fresh_adapters` has the initial values of A."""
        super().__init__()
        *experts, size_out, size_in = weight.shape
        self.A = nn.Parameter(weight.new_zeros(*experts, rank, size_in))
        self.B = nn.Parameter(weight.new_zeros(*experts, size_out, rank))
        self.scale = scale


def merged(weight: Float[Tensor, "*e o i"], adapter: Adapter | None) -> Float[Tensor, "*e o i"]:
    """Return the weight with its adapter, if any, merged into it, in plain autograd."""
    return weight if adapter is None else weight + adapter.scale * (adapter.B @ adapter.A)


@dataclass(frozen=True)
class AdaptedStack:
    """A stack of experts' weights, with their biases and with A and B of an adapter, if it has
    them; multiplies rows grouped by expert."""

    weight_EOI: Tensor
    bias_EO: Tensor | None
    a_ErI: Tensor | None
    b_EOr: Tensor | None
    scale: float
    end_E: Int[Tensor, " e"]
    """The end of each expert's rows."""
    cache: RoundedWeights = NO_CACHE

    def linear(self, x: Any, row_G: Int[Tensor, " g"] | None = None) -> Float[Tensor, "g o"]:
        """Compute x (W_e + s B_e A_e)^T + b_e, in the dtype of x.

        Args:
            row_G: the row of x of each of the G rows, -1 for a row of zeros; None: x has the G
                rows.
        """
        x_GI = x if row_G is None else rows_of(x, row_G)
        y_GO = self._times(grouped_linear, x_GI, self.weight_EOI)
        if self.a_ErI is not None and self.b_EOr is not None:
            y_GO.add_(self._times(grouped_linear, x_GI, self.a_ErI, self.b_EOr), alpha=self.scale)
        return self._with_bias(y_GO)

    def transposed(self, grad: Any, row_G: Int[Tensor, " g"] | None = None) -> Float[Tensor, "g i"]:
        """Compute grad (W_e + s B_e A_e), the gradient of the rows in `linear`; `row_G`: see
        there."""
        grad_GO = grad if row_G is None else rows_of(grad, row_G)
        grad_GI = self._times(grouped_linear_transposed, grad_GO, self.weight_EOI)
        if self.a_ErI is not None and self.b_EOr is not None:
            grad_GI.add_(
                self._times(grouped_linear_transposed, grad_GO, self.b_EOr, self.a_ErI),
                alpha=self.scale,
            )
        return grad_GI

    def _times(
        self, product: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, *stacks: Tensor
    ) -> Tensor:
        """Multiply the rows by each of the stacks in turn."""
        for stack in stacks:
            rows = product(rows, self.cache.round(stack, rows.dtype), self.end_E)
        return rows

    def _with_bias(self, y_GO: Tensor) -> Tensor:
        return y_GO if self.bias_EO is None else y_GO.add_(self.bias_of_rows(y_GO))

    def bias_of_rows(self, rows: Float[Tensor, "g i"]) -> Float[Tensor, "g o"]:
        """Return the bias of each row's expert, in the dtype of the rows; for rows without an
        expert, that of the last expert."""
        assert self.bias_EO is not None
        expert_G = expert_of_row(self.end_E, len(rows)).clamp_(max=len(self.bias_EO) - 1)
        return self.bias_EO.to(rows.dtype).index_select(0, expert_G)

    def factor_gradients(
        self, grad_GO: Float[Tensor, "g o"], x_GI: Float[Tensor, "g i"]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of A and B. The router's weights may be multiplied into either
        argument."""
        assert self.a_ErI is not None
        assert self.b_EOr is not None
        x_Gr = self._times(grouped_linear, x_GI, self.a_ErI)
        grad_Gr = self._times(grouped_linear_transposed, grad_GO, self.b_EOr)
        grad_a_ErI = grouped_weight_gradient(grad_Gr, x_GI, self.end_E)
        grad_b_EOr = grouped_weight_gradient(grad_GO, x_Gr, self.end_E)
        return grad_a_ErI.mul_(self.scale).to(self.a_ErI.dtype), grad_b_EOr.mul_(self.scale).to(
            self.b_EOr.dtype
        )


def fresh_adapters(
    model: nn.Module, generator: torch.Generator | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and a fresh value, on CPU, of every A and B in the model, in the order of its
    modules. The model may be on the meta device."""
    for path, module in model.named_modules():
        if isinstance(module, Adapter):
            bound = max(module.A.shape[-1], 1) ** -0.5
            a = torch.empty_like(module.A, device="cpu")
            yield f"{path}.A", a.uniform_(-bound, bound, generator=generator)
            yield f"{path}.B", torch.zeros_like(module.B, device="cpu")
