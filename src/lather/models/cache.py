"""The memory of a decoder of the tokens that it has read, so that the next ones are read alone.

A layer's keys and values go into a `KeyValueCache`, those of latent attention as the latent and the one rotary key (arXiv:2405.04434,
section 2.1.3). Rows of a batch may be of different lengths: the shorter ones are padded on the left, so that all of them end in the same
slot. What is read next is a `CachedLayout`: a `SequenceLayout` whose tokens also see those of before. A cache is for inference alone.

Letters: B sequences, S tokens of each that are read now, T slots of each: all that was read, padding and the S tokens included.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.models.token_positions import SequenceLayout
from lather.shapes import Bool, Int


class KeyValueCache:
    """The keys and values of all layers, for tokens that were read in one go or in several."""

    def __init__(self, padding_B: Int[Tensor, " b"] | None = None) -> None:
        """`padding_B`: with how many slots each row begins that hold no token; None: with none."""
        self.padding_B = padding_B
        self.length = 0
        """Slots that were read, of every row."""
        self._buffers: dict[nn.Module, tuple[_Buffer, ...]] = {}

    def extend(self, layer: nn.Module, *new_BS: Tensor) -> tuple[Tensor, ...]:
        """Append what `layer` has made of the tokens that are read now, (B, S, ...) each; returns those of all slots, (B, T, ...)."""
        buffers = self._buffers.setdefault(layer, tuple(_Buffer() for _ in new_BS))
        return tuple(buffer.append(x_BS) for buffer, x_BS in zip(buffers, new_BS, strict=True))

    def keep_rows(self, rows: list[int]) -> None:
        """Go on with these rows only, in this order."""
        for buffer in (buffer for buffers in self._buffers.values() for buffer in buffers):
            buffer.keep_rows(rows)
        if self.padding_B is not None:
            self.padding_B = self.padding_B[rows]


class _Buffer:
    """A tensor (B, T, ...) that grows along T; it has room for as much again when it has to move."""

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
    """Where the next tokens of a batch stand: behind those of a cache, which grows by them."""

    takes_block_masks = False  # flex attention would be compiled anew as T grows

    def __init__(self, cache: KeyValueCache, batch: int, length: int, device: torch.device) -> None:
        """Raises ValueError outside `torch.no_grad()`, or if the batch has not as many rows as the cache's padding."""
        if torch.is_grad_enabled():
            raise ValueError("a key-value cache is for inference: read inside torch.no_grad()")
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
        """Which of the S queries sees which of the T keys, as (B or 1, 1, 1 + S, 1 + T): row and column 0 are for a sink.

        A slot of padding sees itself, so that what comes out is finite; nobody else sees it.
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
