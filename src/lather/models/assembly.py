"""Builds a family's model, with fresh weights, from its blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from lather.models.decoder import Block, Decoder


@runtime_checkable
class Outline(Protocol):
    """Fields of every family's configuration that describe the model outside its blocks."""

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
    """Build the model of `block(0)`, `block(1)` and so on; its weights are drawn on CPU and moved to `device`.

    On the meta device no weights are drawn and no memory is used; this gives the sizes, or a model whose weights are loaded later.
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
