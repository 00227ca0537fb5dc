"""Plain causal attention of a context rank's slices on a GPU: the test whether cuDNN's kernels run
it in pieces.

A slice attends to its own keys, a causal square, and to all earlier keys, a rectangle without a
mask. On an H200 cuDNN reaches 707 Tflop/s forward and 593 backward for the late rectangle of 8
ranks, flex attention 410 and 406 for both slices (32 heads, 4 key-value heads, width 128, 32,768
tokens, bf16). The trade-off: forward and backward launch about 35 small kernels more, to merge
outputs and to add up gradients, and of a part of the keys and values the gradients are there twice
for a moment. So short slices are left to flex attention.

The test is that of `lather.models.fused_attention`: torch prefers cuDNN for a sequence of a slice's
length, and a trial of all pieces passes, because cuDNN may find out only in a call that it has no
plan for these sizes.

Letters: B sequences, S queries, T keys, H heads, G key-value heads, N width of a query and key, U
of a value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lather.device import STANDINS, is_gpu
from lather.models.attention_pieces import Pieces, Segment, attend_in_pieces
from lather.models.fused_attention import Case, Form, Operands
from lather.models.piece_kernels import BY_CUDNN

SHORTEST = 1024
"""Fewest tokens of a slice that is attended to in pieces; an estimate of where their launches pay
off, with 2.5 us of the device each."""


def cudnn_takes_slices(operands: Operands, starts: Sequence[int]) -> bool:
    """Tell whether cuDNN's kernels attend to slices of queries (B, H, S, N), which begin at these
    keys and attend to all keys up to their own, of (B, G, T, N); values are (B, G, T, U)."""
    q_BHSN = operands[0]
    length = q_BHSN.shape[2] // len(starts)
    if (
        length < SHORTEST
        or not is_gpu(q_BHSN)
        or not torch.backends.cuda.cudnn_sdp_enabled()  # the user's switch
    ):
        return False
    q, k, v = (x[:, :, :length] for x in operands)
    of_slice = Case.of((q, k, v), None)
    whole = replace(of_slice, shapes=tuple(tuple(x.shape[1:]) for x in operands))
    return _passes(of_slice, whole, tuple(starts))


@functools.cache
def _passes(of_slice: Case, whole: Case, starts: tuple[int, ...]) -> bool:
    if of_slice.chosen(Form(padded=False)) != SDPBackend.CUDNN_ATTENTION:
        return False
    length = whole.shapes[0][1] // len(starts)
    segments = [
        Segment(slice(number * length, (number + 1) * length), start, 0)
        for number, start in enumerate(starts)
    ]
    pieces = Pieces.of([segments], None, whole.dtype, whole.device)

    def attend(operands: Operands) -> Tensor:
        return attend_in_pieces(*operands, pieces, 1.0, None, kernels=BY_CUDNN)

    return whole.device.type in STANDINS or whole.passes(attend)
