"""Checks of the labels and of the normalizer, for both cross entropies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lather.device import is_cpu, is_gpu

IGNORED = -1
"""Label of a token that does not count; it replaces the caller's `ignore_index`."""


def flat_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """Return the labels as int64 (T,), with `ignore_index` replaced by IGNORED.

    A label outside [0, vocabulary) raises ValueError on a CPU; on CUDA it is a device-side assert, so that the host need not wait.
    """
    labels_T = labels.detach().reshape(-1).long()
    ignored_T = labels_T == ignore_index
    wrong_T = ((labels_T < 0) | (labels_T >= vocabulary)) & ~ignored_T
    if is_gpu(labels):
        labels_T.new_zeros(1).index_select(0, wrong_T.long())
    elif is_cpu(labels) and wrong_T.any():
        raise ValueError(
            f"label {int(labels_T[wrong_T][0])} is out of range: labels are in [0, {vocabulary}), the rows of the vocabulary, "
            f"or ignore_index ({ignore_index}); does the tokenizer have more tokens than the model?"
        )
    return labels_T.masked_fill(ignored_T, IGNORED)


def check_inputs(inputs: Tensor, labels: Tensor, normalizer: float | Tensor, what: str) -> None:
    """Raise TypeError or ValueError unless there is one integer label per row of `inputs`, on its device, and a valid normalizer."""
    if not inputs.is_floating_point():
        raise TypeError(f"{what} has dtype {inputs.dtype}: give a floating-point dtype")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels have dtype {labels.dtype}: give integers, as class numbers")
    if labels.shape != inputs.shape[:-1]:
        raise ValueError(f"labels have shape {tuple(labels.shape)}, but {what} has {tuple(inputs.shape)}: give one label per row")
    if labels.device != inputs.device:
        raise ValueError(f"labels are on {labels.device}, but {what} is on {inputs.device}: move them there")
    if isinstance(normalizer, Tensor):
        if normalizer.numel() != 1:
            raise ValueError(f"normalizer has shape {tuple(normalizer.shape)}: give a single number")
    elif not (normalizer > 0 and math.isfinite(normalizer)):
        raise ValueError(f"normalizer={normalizer} is not valid: give a number > 0; where no label counts, max(1, count)")


def divided(x: Tensor, normalizer: float | Tensor) -> Tensor:
    """Return x / normalizer in the dtype of the scalar `x`, on its device, without waiting for the device."""
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.detach().reshape(()).to(device=x.device, dtype=x.dtype, non_blocking=True)
    return x / normalizer
