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
from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.data.token_columns import LOGPROBS, PAIRS, ROUTING, WEIGHTS
from lather.device import to_device
from lather.errors import DataError
from lather.models.context import Context
from lather.pipeline.chunk import MicroBatch
from lather.pipeline.model_part import ModelPart
from lather.pipeline.preference_loss import AnswerPairs
from lather.shapes import Int


def check_columns(batch: Batch, part: ModelPart, dpo_beta: float) -> None:
    """Raise DataError if a routing of the batch is not one of the model of which `part` is a part,
    or if there are pairs without DPO, or DPO without pairs."""
    columns = batch.columns
    if (PAIRS in columns) != (dpo_beta > 0):
        raise DataError(
            "the data has pairs of answers, which are trained by DPO: set train.dpo_beta, such as "
            "0.1"
            if PAIRS in columns
            else f"train.dpo_beta = {dpo_beta}, but the data has no pairs of answers: make it of "
            "rows with chosen and rejected, or set 0"
        )
    if ROUTING in columns:
        num_layers = len(_main_layers(part, part.moe_layers))
        sizes = num_layers, part.num_experts, part.num_experts_per_tok
        check_routing(columns[ROUTING], *sizes, batch.origins)


def with_columns(
    micro_batches: list[MicroBatch],
    columns: Columns,
    part: ModelPart,
    context: Context | None,
    device: torch.device,
    *,
    dpo_beta: float,
) -> list[MicroBatch]:
    """Return the micro-batches with their weights or pairs, and with the choices that this rank's
    routers repeat."""
    size = len(micro_batches[0].tokens_BS)

    def divided(x_BSx: Tensor) -> Sequence[Tensor]:
        local_BSx = x_BSx if context is None else context.local(x_BSx)
        return to_device(local_BSx, device).split(size)

    if WEIGHTS in columns:
        of_each = zip(micro_batches, divided(columns[WEIGHTS]), strict=True)
        micro_batches = [replace(each, weights_BS=weights_BS) for each, weights_BS in of_each]
    if PAIRS in columns:
        numbers = [_numbered(pairs_BS) for pairs_BS in columns[PAIRS].split(size)]
        index_BS = divided(torch.cat([index_BS for index_BS, _ in numbers]))
        sign_BS, logprobs_BS = divided(columns[PAIRS].sign()), divided(columns[LOGPROBS])
        for number, (_, num_pairs) in enumerate(numbers):
            of_labels = index_BS[number], sign_BS[number], logprobs_BS[number].nan_to_num()
            pairs = AnswerPairs(*of_labels, num_pairs, dpo_beta)
            micro_batches[number] = replace(micro_batches[number], pairs=pairs)
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


def learned_pairs(columns: Columns, labels_BS: Int[Tensor, "b s"]) -> dict[str, Tensor]:
    """Return the columns with pairs only where there is a label."""
    is_label_BS = labels_BS != IGNORE_INDEX
    return {**columns, PAIRS: columns[PAIRS].masked_fill(~is_label_BS, 0)}


def num_pairs_of(columns: Columns) -> int:
    """Return the number of pairs of a batch."""
    return sum(len(pairs_S[pairs_S > 0].unique()) for pairs_S in columns[PAIRS])


def _numbered(pairs_BS: Int[Tensor, "b s"]) -> tuple[Tensor, int]:
    """Return the number of each position's pair, from 0 in the first row that has one, and the
    number of pairs, which positions without one have. The answers of a pair are in one row."""
    index_BS, start = torch.zeros_like(pairs_BS), 0
    for index_S, pairs_S in zip(index_BS, pairs_BS.abs(), strict=True):
        numbers, index = pairs_S[pairs_S > 0].unique(return_inverse=True)
        index_S[pairs_S > 0] = start + index
        start += len(numbers)
    return index_BS.masked_fill(pairs_BS == 0, start), start


def _main_layers(part: ModelPart, layers: Iterable[int]) -> list[int]:
    """Return the layers without those of multi-token prediction, whose routers always choose."""
    return [layer for layer in layers if layer not in part.mtp_layers]
