"""The token columns of a batch, as tensors.

Letters: B sequences, S positions, L MoE layers of the main model, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.data.token_columns import TOKEN_COLUMNS
from lather.errors import DataError
from lather.shapes import Int

Columns = Mapping[str, Tensor]
"""Values (B, S, ...) by the name of the column."""


def padded_columns(columns: Columns, rows: int) -> dict[str, Tensor]:
    """Append `rows` sequences whose tokens lack the columns."""
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
    experts_BSLK: Int[Tensor, "b s l k"],
    num_layers: int,
    num_experts: int,
    num_chosen: int,
    origins: Sequence[str] = (),
) -> None:
    """Raise DataError unless every token has `num_chosen` different experts in every layer, or -1
    in all of their places. `origins`: where each sequence comes from, for the message; empty: not
    known."""

    def place(is_wrong_BS: Tensor) -> str:
        row = int(is_wrong_BS.flatten(1).any(1).int().argmax())
        return f"{origins[row]}: " if row < len(origins) else ""

    shape = tuple(experts_BSLK.shape[2:])
    if shape != (num_layers, num_chosen):
        raise DataError(
            f"{place(experts_BSLK >= 0)}routing has shape {shape} per token, but the model has "
            f"{num_layers} MoE layers and {num_chosen} experts per token: give ({num_layers}, "
            f"{num_chosen})"
        )
    if not experts_BSLK.numel():
        return
    least, most = torch.stack(experts_BSLK.aminmax()).tolist()
    if least < -1 or most >= num_experts:
        is_outside = (experts_BSLK < -1) | (experts_BSLK >= num_experts)
        raise DataError(
            f"{place(is_outside)}routing has expert {int(experts_BSLK[is_outside][0])}: give "
            f"experts from 0 to {num_experts - 1}, or -1 for all of a token's in a layer, where "
            "the router chooses"
        )
    given_BSLK = experts_BSLK >= 0
    is_partial_BSL = given_BSLK.any(-1) & ~given_BSLK.all(-1)
    twice_BSLx = (experts_BSLK.sort(-1).values.diff(dim=-1) == 0) & given_BSLK[..., :1]
    is_wrong_BSL = is_partial_BSL | twice_BSLx.any(-1)
    if is_wrong_BSL.any():
        raise DataError(
            f"{place(is_wrong_BSL)}routing has a token without an expert in some place, or with "
            f"the same expert twice: give {num_chosen} different experts, or -1 in place of all"
        )
