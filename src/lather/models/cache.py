"""The key-value cache of a decoder: a forward pass processes only new tokens, which attend to the cached ones.

A `KeyValueCache` holds the keys and values of all layers; latent attention caches the latent and its rotary key (arXiv:2405.04434, section
2.1.3). Rows of a batch may have different lengths: shorter rows are padded on the left, so that all rows end in the same slot. A
`CachedLayout` is the `SequenceLayout` of new tokens, which also attend to the cached ones. A cache is only for inference.

Letters: B sequences, S new tokens of each, T slots of each: all cached tokens, including padding and the S new ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lather.models.token_positions import SequenceLayout
from lather.shapes import Int


class KeyValueCache:
    """The keys and values of all layers for the tokens that have been processed."""

    def __init__(self, padding_B: Int[Tensor, " b"] | None = None) -> None:
        """`padding_B`: number of slots at the start of each row that hold no token; None: 0."""
        self.padding_B = padding_B
        self.length = 0
        """Number of slots of every row."""
        self._rooms: dict[tuple[nn.Module, int], Tensor] = {}
        """The tensors (B, capacity, ...) of each layer by number; the capacity doubles when it is full."""

    def extend(self, layer: nn.Module, *new_BS: Tensor) -> tuple[Tensor, ...]:
        """Append the layer's tensors for the new tokens, (B, S, ...) each, which `length` includes already; return those of all slots,
        (B, T, ...)."""
        for number, x_BS in enumerate(new_BS):
            start = self.length - x_BS.shape[1]
            room = self._rooms.get((layer, number), x_BS[:, :0])
            if room.shape[1] < self.length:
                earlier = room[:, :start]
                room = self._rooms[layer, number] = x_BS.new_empty(len(x_BS), max(self.length, 2 * start), *x_BS.shape[2:])
                room[:, :start] = earlier
            room[:, start : self.length] = x_BS
        return tuple(self._rooms[layer, number][:, : self.length] for number in range(len(new_BS)))

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self._rooms = {key: room[rows] for key, room in self._rooms.items()}
        if self.padding_B is not None:
            self.padding_B = self.padding_B[rows]


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

    def _rows_differ(self) -> bool:
        return self.cache.padding_B is not None

    def _sees(self, window: int | None) -> Callable[..., Tensor]:
        """Return the predicate of new and cached tokens. A padding slot attends only to itself, so that its output is finite, and no other
        slot attends to it."""
        sees = super()._sees(window)
        if self.cache.padding_B is None:
            return sees
        padding_B = self.cache.padding_B.to(self.device)
        return lambda batch, head, query, key: sees(batch, head, query, key) & (key >= padding_B[batch]) | (key == query)
