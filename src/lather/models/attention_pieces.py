"""Attention on a CPU without a mask of queries by keys: in pieces, each a call of torch's fused
kernel for a block of queries and a slice of keys.

Every token attends to an interval of keys that ends with itself, because documents, windows and the
slices of context ranks are all of that kind. The interval is cut where that saves a mask:

    first tokens of a document, no more than a window     all earlier keys, and a causal square
    later tokens, `BLOCK` at a time                       one band of BLOCK + window - 1 keys

The pieces of a block are merged by their log-sum-exps. Backward needs no merging: with the output
and the log-sum-exp of all keys, the kernel's backward gives each piece's part of the gradients
(as in ring attention, Liu et al., arXiv:2310.01889). A sink (GPT-OSS, arXiv:2508.10925) is one more
logit without a value, in the log-sum-exp alone. The trade-off: a piece costs a call, about 0.1 ms,
so documents of few tokens take longer than one masked call for all would.

Letters: B sequences, S queries, T keys, H heads, G key-value heads, N width of a query, key and
value, Q queries of a block, K keys of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.models.fused_attention import Register
from lather.shapes import Bool, Float
from lather.torch_private import cpu_attention, cpu_attention_backward

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
    """Attend with torch's fused kernel for CPUs. Queries, keys and values have one dtype; of these,
    the output and its log-sum-exps (B, H, S) backward needs no more. `register` gets the first
    three, and the function that gives them the form that the kernel takes."""
    width = max(q_BHSN.shape[-1], v_BGTU.shape[-1])
    prepare = partial(_of_width, width=width)
    q, k, v = map(prepare, (q_BHSN, k_BGTN, v_BGTU))
    if register is not None:
        register((q, k, v), prepare)
    y_BHSN: Tensor = _InPieces.apply(q, k, v, sinks_H, pieces, scale)  # type: ignore[no-untyped-call]
    return y_BHSN[..., : v_BGTU.shape[-1]]


def _of_width(x_BGTU: Tensor, width: int) -> Tensor:
    """Return queries, keys or values as the kernel takes them: equally wide, and with neighboring
    elements side by side, on which it relies without a check."""
    if x_BGTU.shape[-1] < width:
        return F.pad(x_BGTU, (0, width - x_BGTU.shape[-1]))
    return x_BGTU if x_BGTU.stride(-1) == 1 else x_BGTU.contiguous()


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSN: Tensor,
        k_BGTN: Tensor,
        v_BGTN: Tensor,
        sinks_H: Tensor | None,
        pieces: Pieces,
        scale: float,
    ) -> Tensor:
        y_BHSN = _by_token(q_BHSN)
        lse_BHS = q_BHSN.new_empty(q_BHSN.shape[:3], dtype=_wide(q_BHSN))
        for block in pieces.blocks:
            at = block.rows, slice(None), block.tokens
            parts = []
            for piece in block.pieces:
                keys = block.rows, slice(None), piece.keys
                options = _options(piece, block, pieces.mask, scale)
                parts.append(cpu_attention(q_BHSN[at], k_BGTN[keys], v_BGTN[keys], **options))
            y_BHSN[at], lse_BHS[at] = _merged(parts, sinks_H)
        ctx.save_for_backward(q_BHSN, k_BGTN, v_BGTN, sinks_H, y_BHSN, lse_BHS)
        ctx.pieces, ctx.scale = pieces, scale
        return y_BHSN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSN: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSN, k_BGTN, v_BGTN, sinks_H, y_BHSN, lse_BHS = ctx.saved_tensors
        grad_BHSN = grad_BHSN if grad_BHSN.stride(-1) == 1 else grad_BHSN.contiguous()
        wide, mask = _wide(q_BHSN), ctx.pieces.mask
        dq_BHSN = _by_token(q_BHSN)
        dk_BGTN, dv_BGTN = (_by_token(x, wide).zero_() for x in (k_BGTN, v_BGTN))
        for block in ctx.pieces.blocks:
            at = block.rows, slice(None), block.tokens
            q, y, lse, grad = (x[at] for x in (q_BHSN, y_BHSN, lse_BHS, grad_BHSN))
            dq_pieces = []
            for piece in block.pieces:
                keys = block.rows, slice(None), piece.keys
                options = _options(piece, block, mask, ctx.scale)
                dq, dk, dv = cpu_attention_backward(
                    grad, q, k_BGTN[keys], v_BGTN[keys], y, lse, **options
                )
                dq_pieces.append(dq)
                dk_BGTN[keys] += dk
                dv_BGTN[keys] += dv
            dq_BHSN[at] = torch.stack(dq_pieces).sum(0) if len(dq_pieces) > 1 else dq_pieces[0]
        dsinks_H = None
        if sinks_H is not None:
            delta_BHS = (grad_BHSN * y_BHSN.to(wide)).sum(-1)
            share_BHS = (sinks_H.to(wide)[:, None] - lse_BHS).exp()
            dsinks_H = -(share_BHS * delta_BHS).sum((0, 2)).to(sinks_H.dtype)
        dk_BGTN, dv_BGTN = dk_BGTN.to(k_BGTN.dtype), dv_BGTN.to(v_BGTN.dtype)
        return dq_BHSN, dk_BGTN, dv_BGTN, dsinks_H, None, None


def _options(
    piece: KeyPiece, block: QueryBlock, mask: Tensor | None, scale: float
) -> dict[str, Any]:
    """Return the kernel's options for a piece."""
    corner = None
    if piece.masked:
        assert mask is not None
        num_queries = block.tokens.stop - block.tokens.start
        corner = mask[..., :num_queries, : piece.keys.stop - piece.keys.start]
    return {"dropout_p": 0.0, "is_causal": piece.causal, "attn_mask": corner, "scale": scale}


def _merged(
    parts: list[tuple[Tensor, Tensor]], sinks_H: Tensor | None
) -> tuple[Float[Tensor, "b h q n"], Float[Tensor, "b h q"]]:
    """Return the output and the log-sum-exp of all keys from those of each piece."""
    if len(parts) == 1 and sinks_H is None:
        return parts[0]
    logits = [lse_BHQ for _, lse_BHQ in parts]
    if sinks_H is not None:
        logits.append(sinks_H.to(logits[0].dtype)[:, None].expand_as(logits[0]))
    lse_BHQ = torch.stack(logits).logsumexp(0)
    weighted = [
        y_BHQN * (part_BHQ - lse_BHQ).exp().unsqueeze(-1)
        for (y_BHQN, _), part_BHQ in zip(parts, logits, strict=False)
    ]
    return torch.stack(weighted).sum(0) if len(weighted) > 1 else weighted[0], lse_BHQ


def _by_token(like_BHSN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of the same shape whose memory has the order of B, S, H, N."""
    b, h, s, n = like_BHSN.shape
    return like_BHSN.new_empty((b, s, h, n), dtype=dtype or like_BHSN.dtype).transpose(1, 2)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
