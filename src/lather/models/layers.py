"""Layers shared by the model families: RMSNorm and linear layers, which save little memory for
backward. (The gated MLP: `lather.models.gated_mlp`.)

    RMSNorm      saves its input and a number per row; plain autograd saves two more copies, in fp32
    Linear       saves its input once for all layers that `project` it; autocast saves a copy for
                 each layer, and a copy of each weight; with an adapter (`lather.models.lora`), also
                 (T, r)

Weight gradients of Linear can be deferred: see `lather.models.saving.weight_gradients`.

Letters: T rows, D hidden size, I input and O output size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lather.boxes import gradient_dtype
from lather.device import is_gpu, no_autocast
from lather.kernels.backend import wide_product
from lather.kernels.rms_norm import (
    RoundedRows,
    add_rms_norm,
    narrow_rms_norm,
    rms_norm,
    round_rms_norm,
    rounded_again,
)
from lather.models.lora import Adapter, merged
from lather.models.saving.recomputed import NO_RECOMPUTATION, Recomputation
from lather.models.saving.rounded_weights import NO_CACHE, RoundedWeights, Rounding
from lather.models.saving.weight_gradients import (
    Accumulable,
    Deferrable,
    WeightGradients,
    weight_gradient,
)
from lather.shapes import Float

NormedRows = Float[Tensor, "*batch d"] | RoundedRows
"""Rows behind a norm, for one call of `project`."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products of x are computed: autocast's dtype inside autocast, else
    the dtype of x."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


B = TypeVar("B", bound=Callable[..., Any])


def without_autocast(backward: B) -> B:
    """Decorate the backward of an autograd Function, so that its products keep the dtypes of their
    operands even if the caller runs backward inside autocast."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        grad = next((grad for grad in grads if grad is not None), None)
        with nullcontext() if grad is None else no_autocast(grad):
            return backward(ctx, *grads)

    return cast(B, run)


@torch.no_grad()
def reset_parameters(module: nn.Module) -> None:
    """Draw the weights of a module without submodules as `nn.Linear` does, uniformly within
    1 / sqrt(inputs); set its biases to 0."""
    for name, p in module.named_parameters(recurse=False):
        if name.endswith("bias"):
            p.zero_()
        else:
            p.uniform_(-1, 1).div_(max(p.shape[-1], 1) ** 0.5)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32; if zero-centered, x / rms(x) * (1 + weight)."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.full((size,), 0.0 if zero_centered else 1.0))

    def fresh_parameter(self, name: str, p: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return a fresh weight on CPU."""
        return torch.full_like(p, 0.0 if self.zero_centered else 1.0, device="cpu")

    def forward(
        self,
        x: Float[Tensor, "*batch d"],
        branch: Float[Tensor, "*batch d"] | None = None,
        *,
        dtype: torch.dtype | None = None,
        copies: int = 1,
        wide: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the output. With a dtype return instead the tensors of `round_rms_norm`: x, the
        rows, and what stands for them; without copies those of `narrow_rms_norm`; or with a branch
        those of `add_rms_norm`."""
        if dtype is None:
            y = rms_norm(x, self._factor(), self.eps)
            if not self.zero_centered:
                return y
            return y.to(torch.promote_types(x.dtype, self.weight.dtype))
        if branch is None and not copies:
            return narrow_rms_norm(x, self._factor(), self.eps, dtype)
        if branch is None:
            x, rows = round_rms_norm(x, self._factor(), self.eps, dtype)
            return x, rows.values, rows.stand_in
        factor = self._factor()
        return add_rms_norm(x, branch, factor, self.eps, dtype, copies=copies, wide=wide)

    def _factor(self) -> Tensor:
        """Return what multiplies the normalized rows."""
        if not self.zero_centered:
            return self.weight
        # in bf16, 1 + weight would lose most of the weight
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def rounds_to(self, x: Tensor) -> torch.dtype | None:
        """Return the dtype of products, if the output for x should be written in it: under
        autocast, where products would round it. None: the norm is compiled, or its output is not
        wider than the products."""
        dtype = compute_dtype(x)
        is_compiled = self._compiled_call_impl is not None or torch.compiler.is_compiling()
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        return dtype if wide == torch.float32 and dtype.itemsize < 4 and not is_compiled else None

    def rounded_again(
        self, x: Float[Tensor, "*batch d"], dtype: torch.dtype, *, wide: bool = False
    ) -> tuple[Float[Tensor, "*batch d"], ...]:
        """Return what the norm made of x, for backward: rounded, and if `wide` not rounded, too."""
        y, y_wide = rounded_again(x, self._factor(), self.eps, dtype, wide=wide)
        return (y,) if y_wide is None else (y, y_wide)


def rounds_to(norm: nn.Module, x: Tensor) -> torch.dtype | None:
    """Return `RMSNorm.rounds_to(x)`; None for any other module in the place of a norm."""
    # a subclass, like a module of another library, may compute something else
    return norm.rounds_to(x) if type(norm) is RMSNorm else None


def norm_for_products(
    norm: nn.Module, x: Float[Tensor, "*batch d"]
) -> tuple[Float[Tensor, "*batch d"], NormedRows]:
    """Return x, and the norm's output for one call of `project`, in the dtype of products if it
    should be (`rounds_to`). What follows should use the returned x (`round_rms_norm`)."""
    dtype = rounds_to(norm, x)
    if dtype is None:
        return x, norm(x)
    x, values, stand_in = norm(x, dtype=dtype)
    return x, RoundedRows(values, stand_in)


def norm_in(
    norm: nn.Module, x: Float[Tensor, "*batch d"], dtype: torch.dtype
) -> Float[Tensor, "*batch d"]:
    """Return the norm's output in this dtype, and take its gradient in it."""
    if rounds_to(norm, x) != dtype:
        return norm(x).to(dtype)
    y: Tensor = norm(x, dtype=dtype, copies=0)
    return y


def recomputed_norm(
    norm: nn.Module, x: Float[Tensor, "*batch d"], recomputation: Recomputation
) -> tuple[Float[Tensor, "*batch d"], NormedRows]:
    """Return `norm_for_products(norm, x)`, with rows that backward recomputes from x; if autograd
    saves everything, the output as it is."""
    if not recomputation.enabled:
        return x, norm(x)
    x, rows = norm_for_products(norm, x)
    if isinstance(rows, RoundedRows):
        assert isinstance(norm, RMSNorm)
        values = rows.values
        recomputation.add((values,), partial(norm.rounded_again, dtype=values.dtype), x)
        # a module that is no `Linear` reads the rows widened
        rows = replace(rows, when_widened=lambda x: _add_widened(x, values, recomputation))
    else:
        recomputation.add((rows,), lambda x: (norm(x),), x)
    return x, rows


def _add_widened(x: Tensor, values: Tensor, recomputation: Recomputation) -> None:
    dtype = x.dtype
    recomputation.add((x,), lambda values: (values.to(dtype),), values)


class Linear(Deferrable, Rounding, nn.Linear):
    """x W^T + b: like `nn.Linear`, with the same names and initial values. With memory="reference"
    it uses plain autograd.

    `lora` is the adapter of its weight, if there is any.
    """

    products_read = ("weight",)
    memory = "saved"
    lora: Adapter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.register_module("lora", None)

    def forward(self, x: NormedRows) -> Float[Tensor, "*batch o"]:
        if self.memory == "reference":
            x = x.widened() if isinstance(x, RoundedRows) else x
            return F.linear(x, merged(self.weight, self.lora), self.bias)
        return project(x, self)[0]


def project(
    x: NormedRows,
    *layers: nn.Module,
    recomputation: Recomputation = NO_RECOMPUTATION,
) -> tuple[Float[Tensor, "..."], ...]:
    """Return each layer's output for the same x, which is saved only once, and not rounded.

    With a `recomputation` adapters keep nothing but x: their narrow products are made again. The
    gradients of x are added in the dtype of x, which under autocast is wider than that of the
    products. If any layer is not a `Linear` (another library has replaced it by an adapter), each
    layer is called by itself; otherwise hooks on the layers do not run."""
    linears = [
        layer for layer in layers if isinstance(layer, Linear) and layer.memory != "reference"
    ]
    if len(linears) != len(layers):
        x = x.widened() if isinstance(x, RoundedRows) else x
        return tuple(layer(x) for layer in layers)
    products = [
        Product(layer.weight, layer.bias, layer.weight_gradients, layer.rounded_weights)
        for layer in linears
    ]
    adapters = [
        (index, layer.lora, product)
        for index, (layer, product) in enumerate(zip(linears, products, strict=True))
        if layer.lora
    ]
    with_a = [replace(product, weight=adapter.A, bias=None) for _, adapter, product in adapters]
    values = x.values if isinstance(x, RoundedRows) else x
    dtype = compute_dtype(values)
    outputs = list(multiply(x, dtype, *products, *with_a))
    narrow = tuple(outputs[len(linears) :])
    if narrow:
        recomputation.add(narrow, lambda x: multiply(x, dtype, *with_a), values)
    for (index, adapter, product), x_Tr in zip(adapters, narrow, strict=True):
        (added,) = multiply(
            x_Tr, compute_dtype(x_Tr), replace(product, weight=adapter.B, bias=None)
        )
        outputs[index] = torch.add(outputs[index], added, alpha=adapter.scale)
    return tuple(outputs[: len(linears)])


def project_alone(x: NormedRows, layer: nn.Module) -> Float[Tensor, "*batch o"]:
    """Return `project(x, layer)`, but call the layer, so that hooks on it run."""
    if isinstance(x, RoundedRows) and not isinstance(layer, Linear):
        x = x.widened()
    return layer(x)


@dataclass(frozen=True)
class Product:
    """A weight, its bias, the queue for their gradients, and the cache of rounded weights."""

    weight: Tensor
    bias: Tensor | None
    queue: WeightGradients | None = None
    cache: RoundedWeights = NO_CACHE


def multiply(
    x: NormedRows, dtype: torch.dtype, *products: Product
) -> tuple[Float[Tensor, "..."], ...]:
    """Return x W^T + b in this dtype for each of the products. x is saved once for all, and not
    rounded."""
    parameters = [parameter for product in products for parameter in (product.weight, product.bias)]
    values, x = (x.values, x.stand_in) if isinstance(x, RoundedRows) else (None, x)
    with no_autocast(x):
        return _Linears.apply(x, values, dtype, products, *parameters)  # type: ignore[no-untyped-call]


class _Linears(torch.autograd.Function):
    """`values`: x, if the argument of this name only stands for it in autograd (`RoundedRows`).
    `parameters`: for each layer its weight, and its bias or None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor | None,
        dtype: torch.dtype,
        products: tuple[Product, ...],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.grad_dtype = x.dtype
        x = x if values is None else values
        narrow = x.to(dtype)
        # x itself, which a block can recompute (`Recomputation`), not its rounded copy
        ctx.save_for_backward(x, *weights)
        ctx.products, ctx.dtype = products, dtype
        ctx.set_materialize_grads(False)
        return tuple(
            F.linear(
                narrow,
                product.cache.round(weight, dtype),
                None if bias is None else bias.to(dtype),
            )
            for weight, bias, product in zip(weights, biases, products, strict=True)
            if weight is not None
        )

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        weights = [
            product.cache.in_backward(product.weight, weight)
            for product, weight in zip(ctx.products, saved, strict=True)
        ]
        needs_x, _, _, _, *needs = ctx.needs_input_grad
        # a deferred gradient holds it
        narrow = x.detach() if x.dtype.itemsize <= ctx.dtype.itemsize else x.detach().to(ctx.dtype)
        x_TI = narrow.reshape(x.shape[:-1].numel(), x.shape[-1])
        grad_x_TI: Tensor | None = None
        returned: list[Tensor | None] = []
        for grad, weight_OI, product, needs_weight, needs_bias in zip(
            grads, weights, ctx.products, needs[::2], needs[1::2], strict=True
        ):
            if grad is None:
                returned += [None, None]
                continue
            grad_TO = grad.reshape(len(x_TI), len(weight_OI))
            if needs_x:
                narrow_OI = product.cache.round(weight_OI, ctx.dtype)
                grad_x_TI = add_product(grad_x_TI, grad_TO, narrow_OI, ctx.grad_dtype)
            of_weight = Accumulable(weight_product, grad_TO, x_TI, gradient_dtype(product.weight))
            of_bias = partial(
                torch.sum,
                grad_TO,
                dim=0,
                dtype=torch.promote_types(grad_TO.dtype, gradient_dtype(product.weight)),
            )
            returned.append(
                weight_gradient(product.queue, product.weight, of_weight) if needs_weight else None
            )
            returned.append(
                weight_gradient(product.queue, product.bias, of_bias)
                if needs_bias and product.bias is not None
                else None
            )
        grad_x = None if grad_x_TI is None else grad_x_TI.view(x.shape)
        return grad_x, None, None, None, *returned


def weight_product(
    grad_TO: Float[Tensor, "t o"],
    x_TI: Float[Tensor, "t i"],
    dtype: torch.dtype,
    total: Float[Tensor, "o i"] | None = None,
) -> Float[Tensor, "o i"]:
    """Compute the gradient (O, I) of a weight that accumulates in this dtype, from operands in the
    dtype of `grad_TO`. The result is in the wider of the two dtypes, so that sums over
    micro-batches do not add rounded values. With `total`, an fp32 sum of earlier gradients, the
    kernel of an fp32 product on a GPU adds to it, and it is returned."""
    x_TI, wide = x_TI.to(grad_TO.dtype), torch.promote_types(grad_TO.dtype, dtype)
    if is_gpu(grad_TO) and wide == torch.float32:
        return wide_product(grad_TO.T, x_TI, total)
    if wide == grad_TO.dtype:
        return grad_TO.T @ x_TI
    return grad_TO.T.to(wide) @ x_TI.to(wide)


def add_product(
    total_TI: Tensor | None,
    grad_TO: Float[Tensor, "t o"],
    weight_OI: Float[Tensor, "o i"],
    dtype: torch.dtype,
) -> Float[Tensor, "t i"]:
    """Add grad W to `total_TI`, which has this dtype, in place, and return it; None counts as 0. An
    fp32 result is not rounded to the operands' dtype on a GPU; on a CPU the product is."""
    if is_gpu(grad_TO) and dtype == torch.float32 and grad_TO.dtype.itemsize == 2:
        return wide_product(grad_TO, weight_OI, total_TI)
    product_TI = (grad_TO @ weight_OI).to(dtype)
    return product_TI if total_TI is None else total_TI.add_(product_TI)
