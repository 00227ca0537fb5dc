"""The token columns of a data set: what a token has besides its number, such as its weight in the
loss.

A column travels with the tokens through shards, packing, batches and micro-batches. A token whose
row, or whose data set, lacks a column has the value that changes nothing.

Letters: B sequences, S positions, L MoE layers of the main model, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.errors import DataError
from lather.shapes import Int

WEIGHTS, ROUTING = "weights", "routing"


@dataclass(frozen=True)
class TokenColumn:
    """A column: how its values are stored, and to which position of a sequence they belong."""

    dtype: str
    """numpy's dtype of the values."""
    missing: float
    """Value of tokens that lack the column."""
    is_of_label: bool
    """Whether a token's value belongs to the position whose label the token is; otherwise to the
    position whose input it is."""


TOKEN_COLUMNS = {
    WEIGHTS: TokenColumn("<f4", 1, is_of_label=True),
    ROUTING: TokenColumn("<i2", -1, is_of_label=False),
}
"""`weights`: factor of the label's nats in the loss. `routing`, (L, K): the experts of the input in
each MoE layer of the main model, or -1: the router chooses."""

Columns = Mapping[str, Tensor]
"""Values (B, S, ...) by the name of the column."""


def padded_columns(columns: Columns, rows: int) -> dict[str, Tensor]:
    """Append values of this number of sequences that lack the columns."""
    return {
        name: F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows), value=TOKEN_COLUMNS[name].missing)
        for name, x in columns.items()
    }


def columns_ahead(columns: Columns, depth: int) -> dict[str, Tensor]:
    """Return the columns of labels that are `depth` positions later; positions behind the end of a
    sequence lack them."""
    return {
        name: F.pad(x, (0, depth), value=TOKEN_COLUMNS[name].missing)[:, depth:]
        for name, x in columns.items()
        if TOKEN_COLUMNS[name].is_of_label
    }


def check_routing(
    experts_BSLK: Int[Tensor, "b s l k"], num_layers: int, num_experts: int, num_chosen: int
) -> None:
    """Raise DataError unless each token has in each layer `num_chosen` different experts, or -1 in
    place of all."""
    shape = tuple(experts_BSLK.shape[2:])
    if shape != (num_layers, num_chosen):
        raise DataError(
            f"routing has shape {shape} per token, but the model has {num_layers} MoE layers and "
            f"{num_chosen} experts per token: give ({num_layers}, {num_chosen})"
        )
    if not experts_BSLK.numel():
        return
    least, most = torch.stack(experts_BSLK.aminmax()).tolist()
    if least < -1 or most >= num_experts:
        raise DataError(
            f"routing has expert {least if least < -1 else most}: give experts from 0 to "
            f"{num_experts - 1}, or -1 for all of a token's in a layer, where the router chooses"
        )
    given_BSLK = experts_BSLK >= 0
    is_partial = (given_BSLK.any(-1) & ~given_BSLK.all(-1)).any()
    twice_BSL1 = (experts_BSLK.sort(-1).values.diff(dim=-1) == 0) & given_BSLK[..., :1]
    if is_partial or twice_BSL1.any():
        raise DataError(
            "routing has a token without an expert in some place, or with the same expert twice: "
            f"give {num_chosen} different experts, or -1 in place of all"
        )
