"""Gives the token columns of a batch to its micro-batches: each rank takes the positions of its
slices, and of the routing the layers of its stages.

Letters: B sequences, S positions, T tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lather.data.batch_columns import Columns, check_routing
from lather.data.token_columns import ROUTING, WEIGHTS
from lather.device import to_device
from lather.models.context import Context
from lather.pipeline.chunk import MicroBatch
from lather.pipeline.model_part import ModelPart


def check_columns(columns: Columns, part: ModelPart) -> None:
    """Raise DataError if a routing is not one of the model of which `part` is a part."""
    if ROUTING in columns:
        num_layers = len(_main_layers(part, part.moe_layers))
        check_routing(columns[ROUTING], num_layers, part.num_experts, part.num_experts_per_tok)


def with_columns(
    micro_batches: list[MicroBatch],
    columns: Columns,
    part: ModelPart,
    context: Context | None,
    device: torch.device,
) -> list[MicroBatch]:
    """Return the micro-batches with their weights, and with the choices that this rank's routers
    repeat."""
    size = len(micro_batches[0].tokens_BS)

    def divided(x_BSx: Tensor) -> Sequence[Tensor]:
        local_BSx = x_BSx if context is None else context.local(x_BSx)
        return to_device(local_BSx, device).split(size)

    if WEIGHTS in columns:
        of_each = zip(micro_batches, divided(columns[WEIGHTS]), strict=True)
        micro_batches = [replace(each, weights_BS=weights_BS) for each, weights_BS in of_each]
    local = _main_layers(part, part.local_moe_layers())
    if ROUTING in columns and local:
        routers: list[nn.Module] = [*part.routers()[: len(local)]]
        indices = [part.moe_layers.index(layer) for layer in local]
        parts = divided(columns[ROUTING][:, :, indices])
        for number, experts_BSLK in enumerate(parts):
            routing = dict(zip(routers, experts_BSLK.flatten(0, 1).unbind(1), strict=True))
            layout = micro_batches[number].layout.with_routing(routing)
            micro_batches[number] = replace(micro_batches[number], layout=layout)
    return micro_batches


def _main_layers(part: ModelPart, layers: Iterable[int]) -> list[int]:
    """Return the layers without those of multi-token prediction, whose routers always choose."""
    return [layer for layer in layers if layer not in part.mtp_layers]
