"""The key-value cache of a decoder: a forward pass processes only new tokens, which attend to the cached ones.

A `KeyValueCache` holds the keys and values of all layers; latent attention caches the latent and its rotary key (arXiv:2405.04434, section
2.1.3). Rows of a batch may have different lengths: shorter rows are padded on the left, so that all rows end in the same slot. A
`CachedLayout` is the `SequenceLayout` of new tokens, which also attend to the cached ones. A cache is only for inference.

Letters: B sequences, S new tokens of each, T slots of each: all cached tokens, including padding and the S new ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.models.token_positions import SequenceLayout
from lather.shapes import Bool, Int


class KeyValueCache:
    """The keys and values of all layers for the tokens that have been processed."""

    def __init__(self, padding_B: Int[Tensor, " b"] | None = None) -> None:
        """`padding_B`: number of slots at the start of each row that hold no token; None: 0."""
        self.padding_B = padding_B
        self.length = 0
        """Number of slots of every row."""
        self._buffers: dict[nn.Module, tuple[_Buffer, ...]] = {}

    def extend(self, layer: nn.Module, *new_BS: Tensor) -> tuple[Tensor, ...]:
        """Append the layer's tensors for the new tokens, (B, S, ...) each; return those of all slots, (B, T, ...)."""
        buffers = self._buffers.setdefault(layer, tuple(_Buffer() for _ in new_BS))
        return tuple(buffer.append(x_BS) for buffer, x_BS in zip(buffers, new_BS, strict=True))

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        for buffer in (buffer for buffers in self._buffers.values() for buffer in buffers):
            buffer.keep_rows(rows)
        if self.padding_B is not None:
            self.padding_B = self.padding_B[rows]


class _Buffer:
    """A tensor (B, T, ...) that grows along T; its capacity doubles when it is full."""

    def __init__(self) -> None:
        self._room: Tensor | None = None
        self._length = 0

    def append(self, x_BS: Tensor) -> Tensor:
        end = self._length + x_BS.shape[1]
        if self._room is None or end > self._room.shape[1]:
            room = x_BS.new_empty(len(x_BS), max(end, 2 * self._length), *x_BS.shape[2:])
            if self._room is not None:
                room[:, : self._length] = self._room[:, : self._length]
            self._room = room
        self._room[:, self._length : end] = x_BS
        self._length = end
        return self._room[:, :end]

    def keep_rows(self, rows: list[int]) -> None:
        if self._room is not None:
            self._room = self._room[rows]


class CachedLayout(SequenceLayout):
    """The layout of new tokens after those of a cache; it extends the cache's length."""

    takes_block_masks = False  # flex attention would be compiled again as T grows

    def __init__(self, cache: KeyValueCache, batch: int, length: int, device: torch.device) -> None:
        """Raises ValueError outside `torch.no_grad()`, or if the batch and the cache's padding have different numbers of rows."""
        if torch.is_grad_enabled():
            raise ValueError("a key-value cache is for inference: call the model inside torch.no_grad()")
        if cache.padding_B is not None and len(cache.padding_B) != batch:
            raise ValueError(f"the batch has {batch} rows and the cache's padding {len(cache.padding_B)}: give one number per row")
        super().__init__(batch, length, device)
        self.cache, self.start = cache, cache.length
        cache.length += length
        slot_S = torch.arange(self.start, self.start + length, device=device)
        padding_B1 = 0 if cache.padding_B is None else cache.padding_B.to(device).unsqueeze(1)
        self.positions = (slot_S - padding_B1).clamp(min=0).view(-1, length)

    def is_plain(self, window: int | None) -> bool:
        return self.start == 0 and self.cache.padding_B is None and super().is_plain(window)

    def mask(self, window: int | None) -> Bool[Tensor, "b 1 s t"]:
        """Return which of the S queries attend to which of the T keys, as (B or 1, 1, 1 + S, 1 + T); row and column 0 are for a sink.

        A padding slot attends only to itself, so that its output is finite, and no other slot attends to it.
        """
        window = self._effective(window)

        def make() -> Tensor:
            query_S1 = torch.arange(self.start, self.start + self.length, device=self.device).unsqueeze(1)
            key_T = torch.arange(self.start + self.length, device=self.device)
            seen_BST = (key_T <= query_S1).unsqueeze(0)
            if window is not None:
                seen_BST = seen_BST & (key_T > query_S1 - window)
            if self.cache.padding_B is not None:
                is_token_B1T = key_T >= self.cache.padding_B.to(self.device)[:, None, None]
                seen_BST = seen_BST & is_token_B1T | (key_T == query_S1)
            mask = F.pad(seen_BST, (1, 0, 1, 0))
            mask[..., 0] = True
            return mask.unsqueeze(1)

        made: Tensor = self._once(("mask", window), make)
        return made

    def _effective(self, window: int | None) -> int | None:
        return None if window is None or window >= self.start + self.length else window
