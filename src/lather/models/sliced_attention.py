"""Plain causal attention of a context rank's two slices by cuDNN's kernels on a GPU, and the test
whether these run it.

A slice attends to its own keys, a causal square, and to all earlier keys, a rectangle without a
mask. On an H200 cuDNN reaches 707 Tflop/s forward and 593 backward for the late rectangle of 8
ranks, flex attention 410 and 406 for both slices (32 heads, 4 key-value heads, width 128, 32,768
tokens, bf16). The trade-off is small kernels beside it, so short slices are left to flex attention:

    forward     both squares | for each rectangle: attend, merge the outputs by log-sum-exps
    backward    both squares | for each range of keys: the rectangles', sums of the keys' gradients

Backward needs no merging: with the output and the log-sum-exp of all keys, a kernel gives its
keys' part of the gradients (as in ring attention, Liu et al., arXiv:2310.01889). Gradients of a
range of keys exist beside their sums until they are added up, so ranges have limited bytes.

The test is that of `lather.models.fused_attention`: torch prefers cuDNN for a sequence of a slice's
length, and a trial of all pieces passes, because cuDNN may find out only in a call that it has no
plan for these sizes.

Letters: B sequences, L positions of a slice, S = 2 L queries, T keys, H heads, G key-value heads, N
width of a query and key, U of a value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from lather.device import STANDINS, is_gpu
from lather.kernels.attention_slices import KeyGradients, merge_into, write_key_gradients
from lather.models.attention_pieces import by_token, of_width, write_sum
from lather.models.fused_attention import Case, Form, Operands, Register
from lather.models.piece_kernels import BY_CUDNN, PieceOptions
from lather.shapes import Float

SHORTEST = 1024
"""Fewest tokens of a slice that is attended to here: an estimate of where the launches pay off,
with 2.5 us of the device each."""
MOST_BYTES = 2**28
"""Most bytes of gradients of the rectangles' keys and values that backward makes at a time."""


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

    def attend(operands: Operands) -> Tensor:
        return attend_in_slices(*operands, starts, 1.0)

    return whole.device.type in STANDINS or whole.passes(attend)


def attend_in_slices(
    q_BHSN: Float[Tensor, "b h s n"],
    k_BGTN: Float[Tensor, "b g t n"],
    v_BGTU: Float[Tensor, "b g t u"],
    starts: Sequence[int],
    scale: float,
    register: Register | None = None,
) -> Float[Tensor, "b h s u"]:
    """Attend with cuDNN's kernels; see `cudnn_takes_slices`. Queries, keys and values have one
    dtype; of these, the output and its log-sum-exps backward needs no more. `register` gets the
    first three, and the function that gives them the form that the kernel takes."""
    q, k, v = map(of_width, (q_BHSN, k_BGTN, v_BGTU))
    if register is not None:
        register((q, k, v), of_width)
    early, late = starts
    y_BHSU: Tensor = _InSlices.apply(q, k, v, (early, late), scale)  # type: ignore[no-untyped-call]
    return y_BHSU


class _InSlices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSN: Tensor,
        k_BGTN: Tensor,
        v_BGTU: Tensor,
        starts: tuple[int, int],
        scale: float,
    ) -> Tensor:
        half = q_BHSN.shape[2] // 2
        k, v = (_own(x, starts, half) for x in (k_BGTN, v_BGTU))
        y_QHLU, lse_QHL = BY_CUDNN.attend(_squares(q_BHSN), k, v, PieceOptions(True, None, scale))
        y_BSHU, lse_B2HL = _of_rows(y_QHLU), lse_QHL.unflatten(0, (-1, 2))
        y_B2LHU = y_BSHU.unflatten(1, (2, half))
        for number, start in enumerate(starts):
            if start:
                q = q_BHSN[:, :, number * half : (number + 1) * half]
                keys = slice(0, start)
                other_BHLU, other_lse_BHL = BY_CUDNN.attend(
                    q, k_BGTN[:, :, keys], v_BGTU[:, :, keys], PieceOptions(False, None, scale)
                )
                merge_into(
                    y_B2LHU[:, number],
                    lse_B2HL[:, number],
                    other_BHLU.transpose(1, 2),
                    other_lse_BHL,
                )
        y_BHSU = y_BSHU.transpose(1, 2)
        ctx.save_for_backward(q_BHSN, k_BGTN, v_BGTU, y_BHSU, lse_QHL)
        ctx.starts, ctx.scale = starts, scale
        return y_BHSU

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSU: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSN, k_BGTN, v_BGTU, y_BHSU, lse_QHL = ctx.saved_tensors
        starts: tuple[int, int] = ctx.starts
        early, late = starts
        half = q_BHSN.shape[2] // 2
        of_queries = q_BHSN, y_BHSU, of_width(grad_BHSU)
        q, y, grad = map(_squares, of_queries)
        k, v = (_own(x, starts, half) for x in (k_BGTN, v_BGTU))
        dq_QHLN, *own_QGLx = BY_CUDNN.differentiate(
            grad, q, k, v, y, lse_QHL, PieceOptions(True, None, ctx.scale)
        )
        own_BSX = [_of_rows(x).flatten(2) for x in own_QGLx]
        dq_BSHN = _of_rows(dq_QHLN)
        totals = [by_token(x.shape, x) for x in (k_BGTN, v_BGTU)]

        def rectangle(number: int, keys: slice) -> tuple[Tensor, list[Tensor]]:
            """Return gradients of a slice's queries (B, H, L, N), keys and values (B, K, X)."""
            at = slice(number * half, (number + 1) * half)
            q, y, grad = (x[:, :, at] for x in of_queries)
            lse_BHL = lse_QHL.unflatten(0, (-1, 2))[:, number].contiguous()
            dq, *others = BY_CUDNN.differentiate(
                grad,
                q,
                k_BGTN[:, :, keys],
                v_BGTU[:, :, keys],
                y,
                lse_BHL,
                PieceOptions(False, None, ctx.scale),
            )
            return dq, [x.transpose(1, 2).flatten(2) for x in others]

        of_slices: tuple[list[Tensor], list[Tensor]] = [], []
        for keys in _ranges(late, early, k_BGTN, v_BGTU):
            dq, of_late = rectangle(1, keys)
            of_slices[1].append(dq)
            of_early: Sequence[Tensor | None] = None, None
            if keys.start < early:
                dq, of_early = rectangle(0, slice(keys.start, min(keys.stop, early)))
                of_slices[0].append(dq)
            written = slice(keys.start, k_BGTN.shape[2] if keys.stop == late else keys.stop)
            parts = [KeyGradients(*each) for each in zip(own_BSX, of_late, of_early, strict=True)]
            write_key_gradients(
                [x.transpose(1, 2).flatten(2) for x in totals], parts, starts, written
            )
            del dq, of_late, of_early, parts  # before the next range's are made
        for of_slice, dq_BLHN in zip(
            of_slices, dq_BSHN.unflatten(1, (2, half)).unbind(1), strict=True
        ):
            if of_slice:
                out = dq_BLHN.transpose(1, 2)
                write_sum([*of_slice, out], out)
        return dq_BSHN.transpose(1, 2), *totals, None, None


def _squares(x_BHSN: Tensor) -> Tensor:
    """Return what the queries of both slices have, (B, H, S, N), as rows (2 B, H, L, N)."""
    return x_BHSN.transpose(1, 2).unflatten(1, (2, -1)).flatten(0, 1).transpose(1, 2)


def _of_rows(x_QHLN: Tensor) -> Tensor:
    """Return rows (2 B, H, L, N) as (B, S, H, N)."""
    return x_QHLN.transpose(1, 2).contiguous().unflatten(0, (-1, 2)).flatten(1, 2)


def _own(x_BGTN: Tensor, starts: tuple[int, int], half: int) -> Tensor:
    """Return the slices' own keys or values, (2 B, G, L, N); of one sequence without a copy."""
    early, late = starts
    batch, groups, _, width = x_BGTN.shape
    if batch == 1:
        _, of_group, of_key, of_column = x_BGTN.stride()
        return x_BGTN.as_strided(
            (2, groups, half, width),
            ((late - early) * of_key, of_group, of_key, of_column),
            x_BGTN.storage_offset() + early * of_key,
        )
    slices = [x_BGTN[:, :, start : start + half].transpose(1, 2) for start in starts]
    return torch.stack(slices, dim=1).flatten(0, 1).transpose(1, 2)


def _ranges(late: int, early: int, k_BGTN: Tensor, v_BGTU: Tensor) -> Iterator[slice]:
    """Yield ranges of the keys before the late slice, as few as `MOST_BYTES` allows; both slices
    have keys of those before the early slice."""
    bytes_of_key = sum(x[:, :, :1].numel() * x.element_size() for x in (k_BGTN, v_BGTU))
    sizes = (-(-late // number) for number in itertools.count(1))
    fit = (
        size
        for size in sizes
        if (size + min(size, early)) * bytes_of_key <= MOST_BYTES or size == 1
    )
    size = next(fit)
    for first in range(0, late, size):
        yield slice(first, min(first + size, late))
