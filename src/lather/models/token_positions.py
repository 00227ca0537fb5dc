"""The positions and documents of the tokens of a batch, and the masks and rotary tables that
attention derives from them.

They are computed once per forward pass and shared by all layers. Plain causal attention of whole
sequences needs no mask. With windows, documents and slices each token attends to an interval of
keys, of which attention's pieces, and flex attention's block mask on CUDA, are made for each
distinct window, without (S, T) elements.

Under context parallelism a layout has the tokens of a rank's slices, with the positions, documents
and indices that they have in the whole sequences; keys are those of the whole sequences.

Letters: B sequences, S positions, T = B * S tokens (in masks: keys, which are all slots of a
cache, or those of all context ranks), P rotary pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, or_masks

from lather.device import Read, read, to_device
from lather.models.attention_pieces import Pieces, Segment
from lather.models.block_masks import block_mask_of
from lather.models.context import Context
from lather.models.document_boundaries import check_boundaries
from lather.models.key_value_cache import KeyValueCache
from lather.models.rotary import Rotary
from lather.models.sequence_slices import SequenceSlices
from lather.shapes import Bool, Float, Int

Made = TypeVar("Made")
SHORT = 128
"""Most keys of rows for which attention on a CPU has a mask of all pairs."""


@dataclass(frozen=True)
class Padding:
    """The positions of a micro-batch that hold no token: they go to no expert, and count in no loss
    and no load."""

    mask_T: Bool[Tensor, " t"]
    """True at these positions."""
    num_tokens: int
    """Number of the other positions."""
    num_tokens_of_all: int
    """The same for all context ranks together."""

    @classmethod
    def at(
        cls, mask_BT: Bool[Tensor, "b t"], device: torch.device, context: Context | None = None
    ) -> Padding:
        """Return the padding at the positions that are True, on `device`; with a context, of whole
        sequences, at this rank's positions."""
        mask_BS = mask_BT if context is None else context.local(mask_BT)
        local, of_all = (mask.numel() - int(mask.sum()) for mask in (mask_BS, mask_BT))
        return cls(to_device(mask_BS.flatten(), device), local, of_all)

    def fill(self, x_TN: Tensor, value: float) -> Tensor:
        """Return `x_TN` with this value in the rows of the padding, which get no gradient."""
        return x_TN.masked_fill(self.mask_T.unsqueeze(1), value)


class SequenceLayout:
    """The positions and documents of the tokens of a (B, S) batch, with the masks and rotary tables
    that follow from them.

    `cu_seqlens` packs several documents into the batch, as in flash-attention's varlen functions:
    it has the boundaries of the documents among the B * S tokens in row order, from 0 to B * S, not
    descending (a repeated boundary is an empty document). A token attends only to its document,
    and positions restart with each. The ends of rows are always boundaries. The values are read on
    the host, which waits for the device unless the tensor is on CPU.

    With a `cache` the tokens come after those of the cache, whose length they extend, and attend to
    them as well.

    With a `context`, `length` and `cu_seqlens` are those of the whole sequences, of which the
    layout has the positions of a rank's slices.

    Raises TypeError if `cu_seqlens` does not hold integers, and ValueError if its values are not
    boundaries as described, if the cache does not fit (outside `torch.no_grad()`, with packed
    documents, or with padding for another number of rows), or if `length` cannot be cut into the
    slices of the context.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        device: torch.device,
        cu_seqlens: Int[Tensor, " n"] | None = None,
        cache: KeyValueCache | None = None,
        context: Context | None = None,
    ) -> None:
        self.batch, self.device, self.cache, self.context = batch, device, cache, context
        self.length = length if context is None else context.length_of(length)
        """Number of positions, S."""
        self.num_keys = length
        """Number of keys of a row, T."""
        self.start = 0
        """Number of slots before the tokens, to which they attend as well; above 0 only with a
        cache."""
        self.padding_B: Int[Tensor, " b"] | None = None
        """Number of slots at the start of each row of the cache that hold no token; None: 0."""
        self._whole_positions: Int[Tensor, "b t"] = torch.arange(length, device=device)[None]
        """Position of each token of all context ranks in its document; (1, T) if each row is a
        single document."""
        self.documents: Int[Tensor, "b t"] | None = None
        """Number of each key's document; None if each row is a single document."""
        self.cu_seqlens: Int[Tensor, " n"] | None = None
        """The boundaries of these documents among all tokens, from 0 to B * S; None as above."""
        self._bounds: Int[Tensor, " n"] | None = None
        """The same on the host."""
        self.padding: Padding | None = None
        """The positions that hold no token, at which the router looks; None: there is none."""
        self.routing: Mapping[nn.Module, Int[Tensor, "t k"]] = {}
        """The experts that a router sends each token to, by router; those that are absent, and at
        tokens with -1 all, choose themselves."""
        self._made: dict[Any, Any] = {}
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError(
                    "cu_seqlens and a cache were given: a cache does not support packed documents, "
                    "give one of the two"
                )
            self._append_to(cache)
        elif cu_seqlens is not None:
            self._pack(cu_seqlens)
        self.positions: Int[Tensor, "b s"] = self._local(self._whole_positions)
        """Position of each token in its document; (1, S) if each row is a single document."""

    def _local(self, x_BT: Tensor) -> Tensor:
        return x_BT if self.context is None else self.context.local(x_BT)

    @property
    def indices(self) -> Int[Tensor, " s"]:
        """Index of each token among the keys of its row."""
        if self.context is not None:
            return self.context.indices(self.num_keys, self.device)
        return torch.arange(self.start, self.start + self.length, device=self.device)

    def runs(self) -> list[tuple[slice, int]]:
        """Return the runs of tokens that lie one after the other among the keys: their numbers, and
        the index of the first."""
        if self.context is None:
            return [(slice(0, self.length), self.start)]
        half = self.length // 2
        of_keys = self.context.slices(self.num_keys)
        return [
            (slice(number * half, (number + 1) * half), keys.start)
            for number, keys in enumerate(of_keys)
        ]

    def slices(self, num_earlier: int) -> SequenceSlices | None:
        """Return this rank's slices as rows, for a layer that sees this number of tokens before a
        token; None without a context."""
        context = self.context
        if context is None:
            return None
        documents, bounds = self.documents, self._bounds
        if documents is None or bounds is None:
            return SequenceSlices(context, num_earlier)
        make = partial(SequenceSlices.of_documents, context, num_earlier, documents, bounds)
        return self._once(("slices", num_earlier), make)

    def _append_to(self, cache: KeyValueCache) -> None:
        if torch.is_grad_enabled():
            raise ValueError(
                "a key-value cache is for inference: call the model inside torch.no_grad()"
            )
        if cache.padding_B is not None and len(cache.padding_B) != self.batch:
            raise ValueError(
                f"the batch has {self.batch} rows and the cache's padding {len(cache.padding_B)}: "
                "give one number per row"
            )
        self.start = cache.length
        cache.length += self.length
        self.num_keys = cache.length
        self._whole_positions = self._whole_positions + self.start
        if cache.padding_B is not None:
            self.padding_B = cache.padding_B.to(self.device)
            place_BS = self._whole_positions - self.padding_B.unsqueeze(1)
            self._whole_positions = place_BS.clamp(min=0)
            if self.start < cache.most_padding:  # on a GPU the values are waited for
                self.padding = Padding.at(place_BS < 0, self.device)

    def _pack(self, cu_seqlens: Tensor) -> None:
        length = self.num_keys
        check_boundaries(cu_seqlens, self.batch * length)
        rows = torch.arange(0, self.batch * length + 1, max(length, 1), device="cpu")
        bounds = read(cu_seqlens, Read.BOUNDS).long()
        host_bounds = torch.cat((bounds, rows)).unique()
        bounds = to_device(host_bounds, self.device)
        starts = bounds[:-1]
        if len(starts) > self.batch:
            self.cu_seqlens, self._bounds = bounds, host_bounds
            token_T = torch.arange(self.batch * length, device=self.device)
            document_T = torch.searchsorted(starts, token_T, right=True) - 1
            self._whole_positions = (token_T - starts[document_T]).view(self.batch, length)
            self.documents = document_T.view(self.batch, length)

    def with_padding(self, padding_BT: Bool[Tensor, "b t"] | None) -> SequenceLayout:
        """Return the same layout, with the same masks and tables, where `padding_BT`, of whole
        sequences, is True at positions that hold no token.

        Experts and their balance leave these out. Attention does not: a token attends to earlier
        tokens, and padding comes last or is a document by itself. The values are read on the host.
        Raises ValueError if the shape is not that of the sequences.
        """
        shape = (self.batch, self.num_keys)
        if padding_BT is not None and tuple(padding_BT.shape) != shape:
            raise ValueError(
                f"padding_BS has shape {tuple(padding_BT.shape)}: it must be {shape}, like the "
                "tokens'"
            )
        if padding_BT is None or not padding_BT.any():
            return self
        layout = copy.copy(self)
        layout.padding = Padding.at(padding_BT, self.device, self.context)
        return layout

    def with_routing(self, routing: Mapping[nn.Module, Int[Tensor, "t k"]]) -> SequenceLayout:
        """Return the same layout, with the same masks and tables, where routers repeat the given
        choices."""
        layout = copy.copy(self)
        layout.routing = routing
        return layout

    def forget(self) -> None:
        """Free masks and tables of packed documents, which only this micro-batch of a step has;
        they are computed again when needed. Without documents all micro-batches share a layout, and
        nothing is freed."""
        if self.documents is not None:
            self._made.clear()

    def rotary_tables(
        self, rotary: Rotary, dtype: torch.dtype, *, of_keys: bool = False
    ) -> tuple[Float[Tensor, "b s p"], Float[Tensor, "b s p"]]:
        """Return cosines and sines for this rotary embedding, in fp32 or wider, of the tokens, or
        with a context also `of_keys` (B, T, P)."""
        wide = torch.promote_types(dtype, torch.float32)

        def make() -> tuple[Tensor, Tensor]:
            cos_BSP, sin_BSP = rotary.tables(self._whole_positions if of_keys else self.positions)
            return cos_BSP.to(wide), sin_BSP.to(wide)

        return self._once(("rotary", rotary, wide, of_keys), make)

    def is_plain(self, window: int | None) -> bool:
        """Tell whether the keys are the tokens, and every token attends to all earlier tokens of
        its row."""
        are_the_tokens = self.start == 0 and self.context is None
        return are_the_tokens and not self._rows_differ() and self._effective(window) is None

    def is_sliced(self, window: int | None) -> bool:
        """Tell whether the tokens are a context rank's slices, and every token attends to all
        earlier tokens of its row."""
        is_divided = self.context is not None and self.cache is None
        return is_divided and not self._rows_differ() and self._effective(window) is None

    def _rows_differ(self) -> bool:
        """Tell whether the rows of the batch have different masks."""
        return self.documents is not None or self.padding_B is not None

    def first_keys(self, window: int | None) -> Int[Tensor, "#b s"] | None:
        """Return the first of the keys to which each token attends, itself being the last, or T at
        positions that hold no token; without a cache. None if each is the first of its row."""
        if self.padding is None and self.is_plain(window):
            return None
        first_BS = self._first_keys(window)
        if self.padding is not None:
            mask_BS = self.padding.mask_T.view(self.batch, self.length)
            first_BS = first_BS.masked_fill(mask_BS, self.num_keys)
        return first_BS

    def _first_keys(self, window: int | None) -> Int[Tensor, "#b s"]:
        token_S = self.indices
        first_BS = token_S - self.positions
        return first_BS if window is None else torch.maximum(first_BS, token_S - window + 1)

    def is_short(self) -> bool:
        """Tell whether rows are so short that one mask of all pairs takes less time than pieces."""
        return self.num_keys <= SHORT

    def mask(self, window: int | None) -> Bool[Tensor, "b 1 s t"]:
        """Return which queries (rows) attend to which keys, as (B or 1, 1, S, T): for short rows, a
        cache, and kernels that take neither pieces nor block masks."""
        window = self._effective(window)

        def make() -> Tensor:
            key_T = torch.arange(self.num_keys, device=self.device)
            batch_B = torch.arange(self.batch if self._rows_differ() else 1, device=self.device)
            visible_BST = self._sees(window)(
                batch_B[:, None, None], 0, self.indices[:, None], key_T
            )
            return visible_BST.expand(len(batch_B), -1, -1).unsqueeze(1)

        return self._once(("mask", window), make)

    def pieces(self, window: int | None, dtype: torch.dtype) -> Pieces:
        """Return the same as pieces for queries of this dtype. Only where rows of a cache are
        padded do they have a mask of S x T elements."""
        window = self._effective(window)

        def make() -> Pieces:
            if self.padding_B is not None:
                return Pieces.whole(self.mask(window), dtype)
            return Pieces.of(self._segments(), window, dtype, self.device)

        return self._once(("pieces", window, dtype), make)

    def _segments(self) -> list[list[Segment]]:
        """Return the segments of each row, or of one for all rows if they do not differ."""
        return [
            [
                Segment(
                    slice(tokens.start + begin - start, tokens.start + end - start), begin, first
                )
                for tokens, start in self.runs()
                for first, stop in pairwise(edges)
                if (begin := max(first, start))
                < (end := min(stop, start + tokens.stop - tokens.start))
            ]
            for edges in self._edges()
        ]

    def _edges(self) -> list[list[int]]:
        """Return where the documents of each row begin and end among its keys, or those of one row
        for all if they do not differ."""
        bounds, length = self._bounds, self.num_keys
        if bounds is None:
            return [[0, length]]
        return [
            (bounds[(bounds >= start) & (bounds <= start + length)] - start).tolist()
            for start in range(0, self.batch * length, length)
        ]

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the same for flex attention."""
        window = self._effective(window)

        def make() -> BlockMask:
            sees = self._sees(window)
            if self.context is not None:
                sees = _of_tokens(sees, self.indices)
            runs = [tokens for tokens, _ in self.runs()]
            first_BS = self._first_keys(window)
            return block_mask_of(first_BS, self.indices, runs, self.num_keys, sees)

        return self._once(("blocks", window), make)

    def _sees(self, window: int | None) -> Callable[..., Tensor]:
        """Return flex attention's predicate of (batch, head, query, key), where a query is the
        index of a token among the keys. It consists of lambdas, because flex attention counts the
        arguments, which the wrapper of a type-checked function would hide.

        A padding slot attends only to itself, so that its output is finite, and no other slot
        attends to it."""
        rules: list[Callable[..., Tensor]] = [lambda batch, head, query, key: key <= query]
        if window is not None:
            rules.append(lambda batch, head, query, key: key > query - window)
        documents, padding_B = self.documents, self.padding_B
        if documents is not None:
            rules.append(
                lambda batch, head, query, key: documents[batch, query] == documents[batch, key]
            )
        if padding_B is None:
            return and_masks(*rules)
        rules.append(lambda batch, head, query, key: key >= padding_B[batch])
        return or_masks(and_masks(*rules), lambda batch, head, query, key: key == query)

    def _effective(self, window: int | None) -> int | None:
        return None if window is None or window >= self.num_keys else window

    def _once(self, key: Any, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _of_tokens(sees: Callable[..., Tensor], index_S: Tensor) -> Callable[..., Tensor]:
    """Return the predicate of queries that are numbers of tokens, with these indices among the
    keys."""
    return lambda batch, head, query, key: sees(batch, head, index_S[query], key)
