"""The cache of keys and values, or of states, with which a forward pass processes only new tokens;
for inference.

Letters: B sequences, S new tokens, T slots.
"""

from __future__ import annotations

from torch import Tensor, nn

from lather.shapes import Int


class KeyValueCache:
    """The keys and values of all layers for the tokens that have been processed; of latent
    attention it holds the latent and its rotary key (arXiv:2405.04434, section 2.1.3). A recurrent
    layer has a state instead, which does not grow.

    Rows of a batch may have different lengths: shorter rows are padded on the left, so that all
    rows end in the same slot. T is the number of slots: of all cached tokens, including padding and
    the S new tokens.
    """

    def __init__(self, padding_B: Int[Tensor, " b"] | None = None) -> None:
        """`padding_B`: number of slots at the start of each row that hold no token; None: 0."""
        self.padding_B = padding_B
        self.most_padding = 0 if padding_B is None or not len(padding_B) else int(padding_B.max())
        """The largest number of these slots of any row, also of rows that have been dropped."""
        self.length = 0
        """Number of slots of every row."""
        self._rooms: dict[tuple[nn.Module, int], Tensor] = {}
        """The tensors (B, capacity, ...) of each layer by number; the capacity doubles when it is
        full."""
        self._states: dict[nn.Module, tuple[Tensor, ...]] = {}

    def extend(self, layer: nn.Module, *new_BS: Tensor) -> tuple[Tensor, ...]:
        """Append the layer's tensors for the new tokens, (B, S, ...) each, which `length` includes
        already; return those of all slots, (B, T, ...)."""
        for number, x_BS in enumerate(new_BS):
            start = self.length - x_BS.shape[1]
            room = self._rooms.get((layer, number))
            if room is None or room.shape[1] < self.length:
                earlier = x_BS[:, :0] if room is None else room[:, :start]
                room = self._rooms[layer, number] = x_BS.new_empty(
                    len(x_BS), max(self.length, 2 * start), *x_BS.shape[2:]
                )
                room[:, :start] = earlier
            room[:, start : self.length] = x_BS
        return tuple(self._rooms[layer, number][:, : self.length] for number in range(len(new_BS)))

    def state_of(self, layer: nn.Module) -> tuple[Tensor, ...] | None:
        """Return the tensors (B, ...) of a recurrent layer after the earlier tokens; None before
        the first."""
        return self._states.get(layer)

    def set_state(self, layer: nn.Module, *tensors_B: Tensor) -> None:
        """Set what `state_of` returns after the new tokens."""
        self._states[layer] = tensors_B

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self._rooms = {key: room[rows] for key, room in self._rooms.items()}
        self._states = {
            layer: tuple(x_B[rows] for x_B in state) for layer, state in self._states.items()
        }
        if self.padding_B is not None:
            self.padding_B = self.padding_B[rows]
