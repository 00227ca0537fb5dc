"""Lists the tensors that each layer of a model keeps from the forward to the backward pass of a
micro-batch.

One rank runs a training step with one micro-batch, or its slices of it, on the stand-in device
(`lather.memory.dry_rank`). A tensor counts if the forward pass makes its storage, and the storage
is alive when the backward pass starts; each storage counts once, with all of its bytes.

    layer    the last one of which a module was called before the storage was made; the final norm
             counts with the head
    segment  the segment of the layer that made the storage, as in a memory plan
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lather.config.config import Config, ParallelConfig
from lather.memory.dry_rank import LedgerMode, dry_rank
from lather.memory.ledger import BETWEEN_SEGMENTS, StorageRecord, segment_title
from lather.memory.workers import Assumed
from lather.standin.operations import RanOperation

EMBEDDING = "embed_tokens"
"""Layer of the embedding, which a forward pass begins with."""
HEAD = "head"
"""Layer and segment of the final norm, the head and the loss."""
SEGMENTS = ("attention", "shared_experts", "experts", BETWEEN_SEGMENTS, HEAD, "mtp")
"""Segments in the order of a forward pass."""


@dataclass(frozen=True)
class KeptTensor:
    """A storage that is kept for backward, and the tensor with which it was made."""

    layer: str
    segment: str
    made_by: str
    """Name of the operation."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    is_weight: bool
    """Whether it is a weight rounded for products, whose bytes do not grow with the tokens."""


@dataclass(frozen=True)
class Profile:
    """The tensors that a forward pass keeps for backward."""

    tensors: tuple[KeptTensor, ...]
    num_tokens: int
    has_experts: bool = True
    """Whether the model has routed experts."""

    def title(self, segment: str) -> str:
        """Return the name of a segment for a reader."""
        return segment_title(segment, has_experts=self.has_experts)

    def bytes(
        self, layer: str | None = None, segment: str | None = None, *, weights: bool = False
    ) -> int:
        """Return the bytes of activations, or of rounded weights, of a layer and segment; None: of
        all."""
        return sum(
            tensor.bytes
            for tensor in self.tensors
            if tensor.is_weight == weights
            and layer in (None, tensor.layer)
            and segment in (None, tensor.segment)
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers in the order of the forward pass."""
        return tuple(dict.fromkeys(tensor.layer for tensor in self.tensors))

    def by_segment(self, layer: str | None = None) -> dict[str, int]:
        """Return the bytes of activations of a layer, or of the model, in each segment that keeps
        any."""
        sizes = {segment: self.bytes(layer, segment) for segment in SEGMENTS}
        return {segment: size for segment, size in sizes.items() if size}


class _OriginMode(LedgerMode):
    """Also records with which layer, operation and tensor each storage was made."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layer = EMBEDDING
        self.origins: dict[int, tuple[StorageRecord, Mapping[str, Any]]] = {}
        """By the `id` of the record, which the ledger keeps."""

    def enter(self, path: str, *_: object) -> None:
        """Called before a module is called."""
        self.layer = layer_of(path)

    def ran(self, operation: RanOperation) -> None:
        super().ran(operation)
        name = operation.name
        for x in operation.made:
            record = self.ledger.record_of(x)
            if record is None or id(record) in self.origins:
                continue
            source = self.ledger.record_of(operation.inputs[0]) if name == "_to_copy" else None
            origin = {
                "layer": self.layer,
                "segment": record.segment or BETWEEN_SEGMENTS,
                "made_by": name,
                "shape": tuple(x.shape),
                "dtype": str(x.dtype).removeprefix("torch."),
                "is_weight": source is not None and source.kind == "parameters",
            }
            self.origins[id(record)] = record, origin


def profile(config: Config, assumed: Assumed) -> Profile:
    """Return what the forward pass of one micro-batch keeps; the process must have no other use.

    Documents and padding are those of a memory plan."""
    size = micro_batch_size(config)
    train = config.train.with_batches(size, size)
    cp = config.parallel.cp
    config = replace(config, parallel=ParallelConfig(cp=cp), train=train)
    with dry_rank(config, cp, assumed, 0, make_mode=_OriginMode) as dry:
        mode = dry.mode
        assert isinstance(mode, _OriginMode)
        for path, module in dry.engine.part.named_modules():
            if path not in ("", "layers"):
                module.register_forward_pre_hook(partial(mode.enter, path))
        dry.engine.launch_gradients(dry.batch)
        end = next(mark.time for mark in mode.ledger.marks if mark.name == "0B0") + 1
        tensors = (
            KeptTensor(**origin, bytes=record.size_at(end))
            for record, origin in mode.origins.values()
            if record.phase == "0F0"
        )
        return Profile(
            tuple(tensor for tensor in tensors if tensor.bytes),
            size * train.sequence_length // cp,
            config.model.num_routed_experts > 0,
        )


def layer_of(path: str) -> str:
    """Return the layer of a module by its path: "embed_tokens", "layers.3" or `HEAD`."""
    first, *others = path.split(".")
    return HEAD if first in ("norm", "lm_head") else ".".join([first, *others[:1]])


def micro_batch_size(config: Config) -> int:
    """Return the sequences of a micro-batch on the smallest mesh, whose dp is
    `parallel.replicas`."""
    ranks = config.parallel.ep * config.parallel.replicas
    return config.train.batch_size // (ranks * config.num_micro_batches(ranks))
