"""Emulates decisions above torch's operations as CUDA or a CPU would make them: attention kernels,
Triton launches, compiled functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from lather.device import is_cpu
from lather.standin import device, operations
from lather.torch_private import fused_sdp_choice

NARROW = (torch.bfloat16, torch.float16)


AUTOCAST = (F.linear, F.scaled_dot_product_attention)
"""Functions of models whose operands autocast rounds."""


class Observer(Protocol):
    """The mode of the stand-in device (`StandInMode`), which is told of kernels."""

    def is_here(self, x: object) -> bool: ...

    def note(self, what: str) -> None: ...

    def launch_triton(self, function: Any, arguments: Mapping[str, Any]) -> None: ...


class Functions(TorchFunctionMode):
    """Runs the attention kernel that CUDA, or a CPU, would choose; and rounds the operands of
    layers inside autocast, which torch does not do for devices that it does not know."""

    def __init__(self, mode: Observer) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in AUTOCAST and self.mode.is_here(args[0]):
            args = [_rounded(x) for x in args]
        if func is F.scaled_dot_product_attention and self.mode.is_here(args[0]):
            return self._attention(*args, **kwargs)
        if func is fused_sdp_choice and self.mode.is_here(args[0]):
            return int(chosen_kernel(*args, **kwargs).value)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Run the kernel that CUDA, or a CPU, would choose.

        torch turns a mask of booleans into one of numbers first, which each call keeps for
        backward.
        """
        aten, widths = torch.ops.aten, {x.shape[-1] for x in (query, key, value)}
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            visible = attn_mask.new_zeros((), dtype=query.dtype)
            hidden = attn_mask.new_full((), -math.inf, dtype=query.dtype)
            attn_mask = torch.where(attn_mask, visible, hidden)
        enable_gqa = enable_gqa and query.shape[1] != key.shape[1]
        kernel = chosen_kernel(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa
        )
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if kernel == SDPBackend.CUDNN_ATTENTION and len(widths) > 1:
            cudnn = aten._scaled_dot_product_cudnn_attention
            return cudnn(query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale)[0]
        if kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) and not is_cpu(query):
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        if kernel == SDPBackend.EFFICIENT_ATTENTION:
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(
                query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale
            )[0]
        if kernel == SDPBackend.FLASH_ATTENTION:
            on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
            return on_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        if enable_gqa:
            key, value = (
                x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value)
            )
        self.mode.note(f"attention with (S, S) elements, {str(query.dtype)[6:]}")
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )[0]


def _rounded(x: Any) -> Any:
    """Return an operand as autocast would give it to a product."""
    is_wide = isinstance(x, Tensor) and x.dtype == torch.float32
    if not is_wide or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def chosen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SDPBackend:
    """Return the kernel that torch would choose on a GPU of compute capability 9.0 with torch 2.11
    and cuDNN 9.19, or on a CPU.

    On that GPU torch prefers cuDNN in bf16 and fp16, for widths of up to 256, which may differ.
    Where they do not, the stand-in runs FlashAttention instead, which keeps as many bytes but for a
    seed and has as many flops. (With newer versions of torch cuDNN takes only widths of up to 128,
    192 with 128, and 256 in backward; equal widths then go to FlashAttention.) fp32 goes to the
    memory-efficient kernel.
    """
    widths = {x.shape[-1] for x in (query, key, value)}
    is_dense, alike = all(x.stride(-1) == 1 for x in (query, key, value)), len(widths) == 1
    if is_cpu(query):
        fused = (
            alike
            and is_dense
            and not dropout_p
            and (attn_mask is None or not attn_mask.requires_grad)
        )
        return SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH
    if (
        query.dtype in NARROW
        and attn_mask is None
        and is_dense
        and max(widths) <= 256
        and not any(width % 8 for width in widths)
    ):
        deterministic = torch.are_deterministic_algorithms_enabled()
        if torch.backends.cuda.cudnn_sdp_enabled() and not deterministic:
            return SDPBackend.CUDNN_ATTENTION
        if alike:
            return SDPBackend.FLASH_ATTENTION
    if (
        not (enable_gqa and query.shape[1] != key.shape[1])
        and is_dense
        and not any(width * query.element_size() % 16 for width in widths)
        and query.dtype != torch.float64
    ):
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


def counted_triton(mode: Observer) -> AbstractContextManager[object]:
    """Count launches of Triton kernels instead of compiling and launching them."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return nullcontext()

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        needed = [
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.default is inspect.Parameter.empty
        ]
        if missing := [name for name in needed if name not in bound]:
            raise TypeError(f"{self.fn.__name__} is launched without {missing}")
        tensors = {name: x for name, x in bound.items() if isinstance(x, Tensor)}
        if wrong := {name: str(x.device) for name, x in tensors.items() if not mode.is_here(x)}:
            raise RuntimeError(
                f"{self.fn.__name__} is launched with tensors that are elsewhere: {wrong}"
            )
        blocks = grid(bound) if callable(grid) else grid
        if min(blocks) < 1 or blocks[0] >= 2**31 or max(blocks[1:], default=1) > 65535:
            raise RuntimeError(
                f"{self.fn.__name__} is launched with the grid {blocks}, which CUDA refuses"
            )
        mode.launch_triton(self.fn, bound)

    return patch.object(JITFunction, "run", run)


def counted_compile() -> AbstractContextManager[object]:
    """Make `torch.compile` return flex attention as a forward and two backward kernels, and other
    functions unchanged. The compiled function is kept for the process, so its kernels report to the
    mode that is active when they are launched."""

    def compiled(function: Any = None, **options: Any) -> Any:
        if getattr(function, "__name__", "") == "flex_attention":
            return _flex_attention
        return function if function is not None else (lambda decorated: decorated)

    return patch.object(torch, "compile", compiled)


def _flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    enable_gqa: bool,
    return_aux: Any = None,
    **options: Any,
) -> Any:
    """Launch flex attention; its other options (the block mask) change neither shapes nor flops."""
    if len({x.dtype for x in (q, k, v)}) > 1:
        raise TypeError(f"flex attention got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(f"flex attention got {q.shape[1]} and {k.shape[1]} heads")
    y, lse = _Flex.apply(q, k, v)  # type: ignore[no-untyped-call]
    return y if return_aux is None else (y, SimpleNamespace(lse=lse if return_aux.lse else None))


class _Flex(torch.autograd.Function):
    """Shapes, bytes and flops of flex attention; every block counts as visible."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y, lse = (
            q.new_empty((*q.shape[:3], v.shape[-1])),
            q.new_empty(q.shape[:3], dtype=torch.float32),
        )
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.flops = 2 * math.prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3])
        device.module.launched(
            "flex attention",
            sum(map(operations.nbytes, (q, k, v))),
            operations.nbytes(y) + operations.nbytes(lse),
            flops=ctx.flops,
        )
        return y, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        gradients, delta = [torch.empty_like(x) for x in (q, k, v)], torch.empty_like(lse)
        device.module.launched(
            "flex attention's delta", 2 * operations.nbytes(y), operations.nbytes(delta)
        )
        size = sum(map(operations.nbytes, (q, k, v)))
        device.module.launched(
            "flex attention's backward",
            size + 2 * operations.nbytes(y),
            size,
            flops=5 * ctx.flops // 2,
        )
        return tuple(gradients)
