"""Makes rows of a batch of a context rank's slices of the sequences, for layers in which a token
sees those before it through a state: what lies before a row, and what all ranks have of theirs.

Letters: B sequences, S positions of this rank, T positions of all ranks, N = 2 C slices of a
sequence for C context ranks, R = 2 B rows (the first and the second slice of the first sequence,
then those of the next), P = S / 2 positions of a row, E positions before it that a layer sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.device import to_device
from lather.models.context import Context
from lather.shapes import Bool, Float, Int


@dataclass(frozen=True)
class SequenceSlices:
    """This rank's rows, and the documents of their tokens."""

    context: Context
    num_earlier: int
    """E."""
    document_RU: Int[Tensor, "r u"] | None = None
    """Number of the document of each token of a row, behind those of the E tokens before the row,
    -1 before the sequence; U = E + P. None: every sequence is a document."""
    cu_seqlens: Int[Tensor, " l"] | None = None
    """Boundaries of the documents among the R * P tokens, from 0 to R * P; a row begins one."""
    continues_BN: Bool[Tensor, "b n"] | None = None
    """Whether the first token of a slice is of the same document as the token before it."""

    @classmethod
    def of_documents(
        cls,
        context: Context,
        num_earlier: int,
        document_BT: Int[Tensor, "b t"],
        bounds: Int[Tensor, " l"],
    ) -> SequenceSlices:
        """Return the slices of packed sequences; `bounds`, on the host, are the boundaries of the
        documents among the B * T tokens, which the ends of rows are, too."""
        padded_BT = F.pad(document_BT, (num_earlier, 0), value=-1)
        document_RU = _with_earlier(context, padded_BT, num_earlier)
        length = document_RU.shape[1] - num_earlier
        last_BN = document_BT[:, length - 1 :: length]
        continues_BN = document_BT[:, ::length] == F.pad(last_BN, (1, 0), value=-1)[:, :-1]
        boundaries = _boundaries(context, len(document_BT), document_BT.shape[1], bounds)
        cu_seqlens = to_device(boundaries, document_BT.device)
        return cls(context, num_earlier, document_RU, cu_seqlens, continues_BN)

    def rows(self, x_BSx: Tensor) -> Tensor:
        """Return a tensor (B, S, ...) as (R, P, ...)."""
        return x_BSx.unflatten(1, (2, -1)).flatten(0, 1)

    def positions(self, x_RPx: Tensor) -> Tensor:
        """Return a tensor (R, P, ...) as (B, S, ...)."""
        return x_RPx.unflatten(0, (-1, 2)).flatten(1, 2)

    def gather(self, x_Rx: Tensor) -> Tensor:
        """Return what the rows of all ranks have, (R, ...) each, in the order of the slices, as (B,
        N, ...). Collective, and differentiable like `Context.gather`."""
        return self.context.gather((x_Rx.unflatten(0, (-1, 2)),))[0]

    def local(self, x_BNx: Tensor) -> Tensor:
        """Return this rank's rows (R, ...) of what all slices have."""
        return self.context.local(x_BNx).flatten(0, 1)

    def earlier(self, tail_RLC: Float[Tensor, "r l c"]) -> Float[Tensor, "r e c"]:
        """Return what the E tokens before each row have, zeros before the sequence, from what the
        last E tokens of each row have, or all if there are fewer. Collective, and differentiable
        like `Context.gather`."""
        tails_BTC = self.context.gather((self.positions(tail_RLC),))[0]
        padded_BTC = F.pad(tails_BTC, (0, 0, self.num_earlier, 0))
        rows_RUC = _with_earlier(self.context, padded_BTC, self.num_earlier)
        return rows_RUC[:, : self.num_earlier].contiguous()


def _boundaries(context: Context, batch: int, length: int, bounds: Tensor) -> Tensor:
    """Return the boundaries of documents among the tokens of the rows."""
    found, place = [], 0
    for start in range(0, batch * length, length):
        for each in context.slices(length):
            first, size = start + each.start, each.stop - each.start
            inside = (bounds > first) & (bounds < first + size)
            found.append(F.pad(bounds[inside] - first, (1, 0)) + place)
            place += size
    return F.pad(torch.cat(found), (0, 1), value=place)


def _with_earlier(context: Context, padded_BTx: Tensor, num_earlier: int) -> Tensor:
    """Return the rank's rows, each behind the E positions before it, (R, E + P, ...), from whole
    sequences behind E positions, (B, E + T, ...)."""
    slices = context.slices(padded_BTx.shape[1] - num_earlier)
    rows = [padded_BTx[:, each.start : each.stop + num_earlier] for each in slices]
    return torch.stack(rows, dim=1).flatten(0, 1)
