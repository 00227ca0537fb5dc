"""Attention without a mask of queries by keys: in pieces, each a call of a fused kernel
(`lather.models.piece_kernels`) for a block of queries and a slice of keys. A CPU attends so to
whatever is not plain and causal.

Every token attends to an interval of keys that ends with the token itself; documents and windows
only say where it begins. The interval is cut where that saves a mask:

    first tokens of a document, no more than a window     all earlier keys, and a causal square
    later tokens, `BLOCK` at a time                       one band of BLOCK + window - 1 keys

The pieces of a block are merged by their log-sum-exps. Backward needs no merging: with the output
and the log-sum-exp of all keys, the kernel's backward gives each piece's part of the gradients
(as in ring attention, Liu et al., arXiv:2310.01889). A sink (GPT-OSS, arXiv:2508.10925) is one more
logit without a value, in the log-sum-exp alone. The trade-off: a piece costs a call, about 0.1 ms
on a CPU, so documents of few tokens take longer than one masked call for all would.

Gradients of keys are added up in fp32, since many bands may have the same keys.

Letters: B sequences, S queries, T keys, H heads, G key-value heads, N width of a query and key, U
of a value, Q queries of a block, K keys of a piece.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import wide_dtype
from lather.models.fused_attention import Register
from lather.models.piece_kernels import ON_CPU, PieceOptions
from lather.shapes import Bool, Float

BLOCK = 64
"""Most queries of a band."""


@dataclass(frozen=True)
class Segment:
    """Tokens of one document that lie one after the other among the keys of a row."""

    tokens: slice
    """Numbers of the tokens among those of the row."""
    start: int
    """Index of the first of them among the keys."""
    first: int
    """Index of the document's first key."""


@dataclass(frozen=True)
class KeyPiece:
    """Keys to which a block of queries attends."""

    keys: slice
    causal: bool = False
    """Query number i attends to the keys up to number i."""
    masked: bool = False
    """The mask tells which keys each query attends to."""


@dataclass(frozen=True)
class QueryBlock:
    """Queries, and all pieces of their keys."""

    rows: slice
    """Rows of the batch."""
    tokens: slice
    pieces: tuple[KeyPiece, ...]


@dataclass(frozen=True)
class Pieces:
    """All blocks of queries, which are together all queries."""

    blocks: tuple[QueryBlock, ...]
    mask: Float[Tensor, "#b 1 q k"] | None
    """0 where a query of a masked piece attends to a key, -inf elsewhere, in the dtype of the
    queries; smaller pieces take its upper left corner. None: no piece is masked."""

    @classmethod
    def of(
        cls,
        segments_of_rows: Sequence[Sequence[Segment]],
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Pieces:
        """Return the pieces for the segments of each row, or of one for all rows; a token attends
        to at most `window` tokens."""
        blocks = tuple(
            block
            for row, segments in enumerate(segments_of_rows)
            for segment in segments
            for block in _blocks_of(
                slice(row, row + 1) if len(segments_of_rows) > 1 else slice(None), segment, window
            )
        )
        if not any(piece.masked for block in blocks for piece in block.pieces):
            return cls(blocks, None)
        assert window is not None
        distance_QK = torch.arange(BLOCK + window - 1, device=device) - torch.arange(
            BLOCK, device=device
        ).unsqueeze(1)
        band_QK = (distance_QK >= 0) & (distance_QK < window)
        return cls(blocks, additive(band_QK[None, None], dtype))

    @classmethod
    def whole(cls, mask: Bool[Tensor, "#b 1 s t"], dtype: torch.dtype) -> Pieces:
        """Return one piece with a mask of all queries and keys."""
        keys = slice(0, mask.shape[-1])
        block = QueryBlock(slice(None), slice(0, mask.shape[-2]), (KeyPiece(keys, masked=True),))
        return cls((block,), additive(mask, dtype))


def additive(mask: Bool[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Return 0 where the mask is True, and -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _blocks_of(rows: slice, segment: Segment, window: int | None) -> Iterator[QueryBlock]:
    first, start, shift = segment.first, segment.start, segment.tokens.start - segment.start
    stop = segment.tokens.stop - shift
    reached = stop if window is None else min(stop, max(start, first + window))
    if reached > start:
        pieces = [KeyPiece(slice(start, reached), causal=True)]
        if reached - start == 1:
            pieces = [KeyPiece(slice(first, reached))]
        elif first < start:
            pieces.append(KeyPiece(slice(first, start)))
        yield QueryBlock(rows, slice(start + shift, reached + shift), tuple(pieces))
    if window is None:
        return
    for begin in range(reached, stop, BLOCK):
        end = min(begin + BLOCK, stop)
        piece = KeyPiece(slice(begin - window + 1, end), masked=end - begin > 1)
        yield QueryBlock(rows, slice(begin + shift, end + shift), (piece,))


def attend_in_pieces(
    q_BHSN: Float[Tensor, "b h s n"],
    k_BGTN: Float[Tensor, "b g t n"],
    v_BGTU: Float[Tensor, "b g t u"],
    pieces: Pieces,
    scale: float,
    sinks_H: Float[Tensor, " h"] | None,
    register: Register | None = None,
) -> Float[Tensor, "b h s u"]:
    """Attend with the kernels of a CPU. Queries, keys and values have one dtype; of these, the
    output and its log-sum-exps (B, H, S) backward needs no more. `register` gets the first three,
    and the function that gives them the form that the kernel takes."""
    prepare = functools.partial(of_width, width=max(q_BHSN.shape[-1], v_BGTU.shape[-1]))
    q, k, v = map(prepare, (q_BHSN, k_BGTN, v_BGTU))
    if register is not None:
        register((q, k, v), prepare)
    y_BHSU: Tensor = _InPieces.apply(q, k, v, sinks_H, pieces, scale)  # type: ignore[no-untyped-call]
    return y_BHSU[..., : v_BGTU.shape[-1]]


def of_width(x_BGTU: Tensor, width: int = 0) -> Tensor:
    """Return queries, keys or values as a kernel takes them: no narrower than `width`, and with
    neighboring elements side by side, on which the CPU's relies without a check."""
    if x_BGTU.shape[-1] < width:
        return F.pad(x_BGTU, (0, width - x_BGTU.shape[-1]))
    return x_BGTU if x_BGTU.stride(-1) == 1 else x_BGTU.contiguous()


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSN: Tensor,
        k_BGTN: Tensor,
        v_BGTU: Tensor,
        sinks_H: Tensor | None,
        pieces: Pieces,
        scale: float,
    ) -> Tensor:
        y_BHSU = by_token((*q_BHSN.shape[:3], v_BGTU.shape[-1]), q_BHSN)
        lse_BHS = q_BHSN.new_empty(q_BHSN.shape[:3], dtype=wide_dtype(q_BHSN))
        for block in pieces.blocks:
            at = block.rows, slice(None), block.tokens
            parts = []
            for piece in block.pieces:
                keys = block.rows, slice(None), piece.keys
                options = _options(piece, block, pieces.mask, scale)
                parts.append(ON_CPU.attend(q_BHSN[at], k_BGTN[keys], v_BGTU[keys], options))
            _merge(parts, sinks_H, y_BHSU[at], lse_BHS[at])
        ctx.save_for_backward(q_BHSN, k_BGTN, v_BGTU, sinks_H, y_BHSU, lse_BHS)
        ctx.pieces, ctx.scale = pieces, scale
        return y_BHSU

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSU: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSN, k_BGTN, v_BGTU, sinks_H, y_BHSU, lse_BHS = ctx.saved_tensors
        pieces: Pieces = ctx.pieces
        grad_BHSU = grad_BHSU if grad_BHSU.stride(-1) == 1 else grad_BHSU.contiguous()
        dq_BHSN = by_token(q_BHSN.shape, q_BHSN)
        dk_BGTN, dv_BGTU = (by_token(x.shape, x, wide_dtype(x)).zero_() for x in (k_BGTN, v_BGTU))
        for block in pieces.blocks:
            at = block.rows, slice(None), block.tokens
            q, y, grad = (x[at] for x in (q_BHSN, y_BHSU, grad_BHSU))
            lse, dq_pieces = lse_BHS[at].contiguous(), []
            for piece in block.pieces:
                keys = block.rows, slice(None), piece.keys
                options = _options(piece, block, pieces.mask, ctx.scale)
                dq, dk, dv = ON_CPU.differentiate(
                    grad, q, k_BGTN[keys], v_BGTU[keys], y, lse, options
                )
                dq_pieces.append(dq)
                dk_BGTN[keys] += dk
                dv_BGTU[keys] += dv
                del dk, dv  # before the next piece's are made
            write_sum(dq_pieces, dq_BHSN[at])
        dsinks_H = _gradient_of_sinks(sinks_H, grad_BHSU, y_BHSU, lse_BHS)
        dk_BGTN, dv_BGTU = dk_BGTN.to(k_BGTN.dtype), dv_BGTU.to(v_BGTU.dtype)
        return dq_BHSN, dk_BGTN, dv_BGTU, dsinks_H, None, None


def _options(piece: KeyPiece, block: QueryBlock, mask: Tensor | None, scale: float) -> PieceOptions:
    """Return the kernels' options for a piece."""
    corner = None
    if piece.masked:
        assert mask is not None
        num_queries = block.tokens.stop - block.tokens.start
        corner = mask[..., :num_queries, : piece.keys.stop - piece.keys.start]
    return PieceOptions(piece.causal, corner, scale)


def _merge(
    parts: list[tuple[Tensor, Tensor]], sinks_H: Tensor | None, y_BHQU: Tensor, lse_BHQ: Tensor
) -> None:
    """Write the output and the log-sum-exp of all keys, from those of one piece or two."""
    logits = [part_BHQ for _, part_BHQ in parts]
    if sinks_H is not None:
        logits.append(sinks_H.to(lse_BHQ.dtype)[:, None])
    if len(logits) == 1:
        y_BHQU.copy_(parts[0][0])
        lse_BHQ.copy_(logits[0])
        return
    *others, last = logits
    torch.logaddexp(functools.reduce(torch.logaddexp, others), last, out=lse_BHQ)
    terms = [(y, (part_BHQ - lse_BHQ).exp().unsqueeze(-1)) for y, part_BHQ in parts]
    if len(terms) == 1:
        torch.mul(*terms[0], out=y_BHQU)
    else:  # the weights, and so the first term, are wide; the sum is rounded once
        torch.addcmul(torch.mul(*terms[0]), *terms[1], out=y_BHQU)


def write_sum(parts: list[Tensor], out: Tensor) -> None:
    """Write the sum of the parts of a gradient, rounded once."""
    *others, last = parts
    if not others:
        out.copy_(last)
        return
    total = others[0]
    if len(others) > 1:
        total = total.to(wide_dtype(total), copy=True)
        for part in others[1:]:
            total.add_(part)
    torch.add(total, last, out=out)


def _gradient_of_sinks(
    sinks_H: Tensor | None, grad_BHSU: Tensor, y_BHSU: Tensor, lse_BHS: Tensor
) -> Tensor | None:
    if sinks_H is None:
        return None
    delta_BHS = (grad_BHSU * y_BHSU.to(lse_BHS.dtype)).sum(-1)
    share_BHS = (sinks_H.to(lse_BHS.dtype)[:, None] - lse_BHS).exp()
    return -(share_BHS * delta_BHS).sum((0, 2)).to(sinks_H.dtype)


def by_token(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of a shape (B, H, S, N) whose memory has the order of B, S, H, N."""
    b, h, s, n = shape
    return like.new_empty((b, s, h, n), dtype=dtype or like.dtype).transpose(1, 2)
