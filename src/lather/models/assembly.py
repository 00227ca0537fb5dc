"""From a family's blocks to its model with fresh weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from lather.models.decoder import Block, Decoder


@runtime_checkable
class Outline(Protocol):
    """Fields of every family's configuration on the model around its blocks."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


def assemble(
    config: Outline, block: Callable[[int], Block], generator: torch.Generator | None, device: torch.device | None = None
) -> Decoder:
    """The model of `block(0)`, `block(1)` and so on, its weights drawn on CPU and moved to `device`.

    On the meta device nothing is drawn and no memory is used: for sizes, and for weights that are read later.
    """
    is_meta = device is not None and device.type == "meta"
    with torch.device("meta") if is_meta else contextlib.nullcontext():
        decoder = Decoder(
            [block(index) for index in range(config.num_hidden_layers)],
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    if is_meta:
        return decoder
    decoder.init_weights(config.initializer_range, generator)
    return decoder.to(device)
