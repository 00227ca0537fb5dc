"""The token columns of a data set: what a token has besides its number, such as its weight in the
loss.

A column travels with the tokens through shards, packing, batches and micro-batches. A token whose
row, or whose data set, lacks a column has the value that changes nothing.

Letters: T tokens, L MoE layers of the main model, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WEIGHTS, ROUTING, PAIRS, LOGPROBS = "weights", "routing", "pairs", "logprobs"


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
    PAIRS: TokenColumn("<i8", 0, is_of_label=True),
    LOGPROBS: TokenColumn("<f4", math.nan, is_of_label=True),
}
"""`weights`: factor of the label's nats in the loss. `routing`, (L, K): the experts of the input in
each MoE layer of the main model, or -1: the router chooses. `pairs`: the number of the token's pair
of answers, negative in the rejected one; 0: none. `logprobs`: the token's log-probability under the
model that DPO compares with, which only pairs have."""
