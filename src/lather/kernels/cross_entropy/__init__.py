"""`cross_entropy_`: cross entropy that overwrites the logits with their gradient, so that no other
tensor of their size is needed.

    loss = 1 / normalizer * sum over tokens with a label of (Z - logits[label] + z_loss Z^2)
    with Z = logsumexp(logits)

The gradient can be computed together with the loss, and it has the shape and dtype of the logits:
forward overwrites the logits with it, and backward multiplies it by the incoming scalar and returns
it. `F.cross_entropy` in fp32 on bf16 logits creates an fp32 copy, its log-softmax and two gradients
besides the logits; here there is a single (T, V) tensor. The price is that the logits are lost. An
autograd node that has saved them raises because of torch's version counter; the tensor itself, and
its base if it is a view, become `SpentLogits`, which raise at every use. Other tensors that share
the memory (`detach()`, a second view) stay as they are: they contain the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from lather.device import Read, is_cpu, is_gpu, is_true
from lather.kernels.backend import fastest, wide_dtype
from lather.kernels.cross_entropy import reference
from lather.shapes import Float, Int
from lather.torch_private import base_of

IGNORED = -1
"""Label of a token that does not count; it replaces the caller's `ignore_index`."""


def cross_entropy_(
    logits: Float[Tensor, "*tokens v"],
    labels: Int[Tensor, "*tokens"],
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    normalizer: float | Tensor = 1.0,
) -> Float[Tensor, ""]:
    """Return the cross entropy in nats, summed and divided by `normalizer`. The logits are
    overwritten with their gradient and cannot be used again.

    If no gradient is needed (`torch.no_grad()`, or logits that do not require one), the logits are
    not changed.

    Args:
        logits: (..., V), contiguous, and no leaf; the computation is in fp32 (fp64 for fp64),
            independent of their dtype.
        labels: (...), integers in [0, V), or `ignore_index` for tokens that do not count.
        z_loss: coefficient of the squared logsumexp.
        normalizer: > 0, the number of labels in all micro-batches on all ranks; the host does not
            wait for a tensor on the device.

    Returns:
        The loss, a scalar in fp32 (fp64 for fp64), which allows one backward pass.

    Raises:
        TypeError, ValueError: before anything is changed, for logits that cannot be overwritten, a
            label out of range (on CUDA that is a device-side assert) or a normalizer that is not >
            0.
        RuntimeError: if the logits have been overwritten before; later, at a second backward pass
            or if the logits are read.
    """
    if isinstance(logits, SpentLogits):
        raise RuntimeError(SpentLogits.explanation)
    check_inputs(logits, labels, normalizer, "logits")
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    if wants_gradient:
        _check_expendable(logits)
    labels_T = flat_labels(labels, logits.shape[-1], ignore_index)
    if not wants_gradient:
        logits_TV = logits.detach().reshape(labels_T.numel(), logits.shape[-1]).contiguous()
        losses_T = _token_losses(logits_TV, labels_T, None, z_loss)
        return divided(losses_T.sum(), normalizer)
    loss: Tensor = _CrossEntropyInPlace.apply(logits, labels_T, z_loss, normalizer)  # type: ignore[no-untyped-call]
    for tensor in (logits, base_of(logits)):
        if tensor is not None:
            tensor.__class__ = SpentLogits
    return loss


def _token_losses(
    logits_TV: Tensor, labels_T: Tensor, scale: Tensor | None, z_loss: float
) -> Tensor:
    if not logits_TV.numel():
        return torch.zeros(0, dtype=wide_dtype(logits_TV), device=logits_TV.device)
    is_fp64 = logits_TV.dtype == torch.float64
    operation = fastest(reference.token_losses, logits_TV, in_reference=is_fp64)
    return operation(logits_TV, labels_T, scale, z_loss=z_loss)


def _check_expendable(logits: Tensor) -> None:
    if type(logits) is not Tensor:
        raise TypeError(
            "cross_entropy_ overwrites its logits and takes a plain tensor, not "
            f"{type(logits).__name__}: use F.cross_entropy"
        )
    if not logits.is_contiguous():
        raise ValueError(
            f"logits of strides {logits.stride()} are not contiguous and cannot be overwritten: "
            "give logits.contiguous()"
        )
    if logits.is_leaf:
        raise ValueError(
            "logits are a leaf that requires grad, and would be overwritten: give the output of an "
            "operation, or logits.clone()"
        )
    base = base_of(logits)
    if base is not None and (
        base.numel() != logits.numel()
        or type(base) is not Tensor
        or (base.is_leaf and base.requires_grad)
    ):
        raise ValueError(
            f"logits are a view of a part of a tensor of shape {tuple(base.shape)} that would be "
            "overwritten: give the whole tensor with "
            "ignore_index where a row does not count, or logits.clone()"
        )


def flat_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """Return the labels as int64 (T,), with `ignore_index` replaced by IGNORED.

    A label outside [0, vocabulary) raises ValueError on a CPU; on CUDA it is a device-side assert,
    so that the host need not wait."""
    labels_T = labels.detach().reshape(-1).long()
    ignored_T = labels_T == ignore_index
    wrong_T = ((labels_T < 0) | (labels_T >= vocabulary)) & ~ignored_T
    if is_gpu(labels):
        labels_T.new_zeros(1).index_select(0, wrong_T.long())
    elif is_cpu(labels) and is_true(wrong_T.any(), Read.WRONG):
        raise ValueError(
            f"label {int(labels_T[wrong_T][0])} is out of range: labels are in [0, {vocabulary}), "
            "the rows of the vocabulary, "
            f"or ignore_index ({ignore_index}); does the tokenizer have more tokens than the model?"
        )
    return labels_T.masked_fill(ignored_T, IGNORED)


def check_inputs(inputs: Tensor, labels: Tensor, normalizer: float | Tensor, what: str) -> None:
    """Raise TypeError or ValueError unless there is one integer label per row of `inputs`, on its
    device, and a valid normalizer."""
    if not inputs.is_floating_point():
        raise TypeError(f"{what} has dtype {inputs.dtype}: give a floating-point dtype")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels have dtype {labels.dtype}: give integers, as class numbers")
    if labels.shape != inputs.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, but {what} has {tuple(inputs.shape)}: give "
            "one label per row"
        )
    if labels.device != inputs.device:
        raise ValueError(
            f"labels are on {labels.device}, but {what} is on {inputs.device}: move them there"
        )
    if isinstance(normalizer, Tensor):
        if normalizer.numel() != 1:
            raise ValueError(
                f"normalizer has shape {tuple(normalizer.shape)}: give a single number"
            )
    elif not (normalizer > 0 and math.isfinite(normalizer)):
        raise ValueError(
            f"normalizer={normalizer} is not valid: give a number > 0; where no label counts, "
            "max(1, count)"
        )


def divided(x: Tensor, normalizer: float | Tensor) -> Tensor:
    """Return x / normalizer in the dtype of the scalar `x`, on its device, without waiting for the
    device."""
    if isinstance(normalizer, Tensor):
        normalizer = (
            normalizer.detach().reshape(()).to(device=x.device, dtype=x.dtype, non_blocking=True)
        )
    return x / normalizer


class _CrossEntropyInPlace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels_T: Tensor, z_loss: float, normalizer: float | Tensor
    ) -> Tensor:
        gradient = logits.detach()
        scale = torch.ones((), dtype=wide_dtype(logits), device=logits.device)
        scale = divided(scale, normalizer)
        logits_TV = gradient.view(labels_T.numel(), logits.shape[-1])
        losses_T = _token_losses(logits_TV, labels_T, scale, z_loss)
        # so that nodes that have saved the logits raise; kernels do not increment it
        increment_version(logits)
        ctx.save_for_backward(gradient)
        ctx.handed_over = False
        return divided(losses_T.sum(), normalizer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.handed_over:
            raise RuntimeError(
                "backward through cross_entropy_ a second time: its gradient, which was kept in "
                "the logits' memory, was handed over at the "
                "first; compute the logits and the loss again, or use F.cross_entropy"
            )
        (gradient,) = ctx.saved_tensors
        ctx.handed_over = True
        return gradient.mul_(grad), None, None, None


_METADATA = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "ndim",
        "dim",
        "size",
        "numel",
    ]
)


class SpentLogits(Tensor):
    """Logits that `cross_entropy_` has overwritten: shape, dtype and device can be read, `repr`
    explains why, everything else raises RuntimeError."""

    explanation = (
        "these logits went into cross_entropy_, which has overwritten them with their gradient: "
        "read what you need of them before "
        "(logits.argmax(-1), logits.clone()), or use F.cross_entropy"
    )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Return the explanation, because debuggers show every variable."""
        return f"<{self.explanation}>"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if (func.__self__.__name__ if name == "__get__" else name) not in _METADATA:
            raise RuntimeError(cls.explanation)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
