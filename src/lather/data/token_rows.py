"""Reads rows of tokens: records that have the numbers of a document's tokens, and what belongs to
each.

    tokens      the document's tokens, to which nothing is added
    weights     factor of each token's nats in the loss, or one for all; a token with 0 is not
                learned, and does not count among the labels by which the loss is divided
    advantages  further factors, or one for all; a token with 0 counts
    routing     for each token, and each MoE layer, the experts that it goes to, (T, L, K)
    logprobs    log-probability of each token, for DPO

or that have two such rows, "chosen" and "rejected", with an answer that is preferred and another.

Letters: T tokens, L MoE layers of the main model, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lather.data.records import Record, Skip
from lather.data.shards import Array
from lather.data.token_columns import LOGPROBS, PAIRS, ROUTING, TOKEN_COLUMNS, WEIGHTS

TOKENS, ADVANTAGES = "tokens", "advantages"
ANSWERS = ("chosen", "rejected")
ROW_FIELDS = (TOKENS, WEIGHTS, ADVANTAGES, ROUTING, LOGPROBS, *ANSWERS)
"""The fields of a row that are read."""


class RowError(Exception):
    """The record is not a row of tokens; the message says why."""


@dataclass(frozen=True)
class TokenRow:
    """A document of tokens."""

    tokens: Array
    learned: Array
    """Which of the tokens are trained on."""
    columns: dict[str, Array]
    """Values of the tokens, (T, ...) by name; columns whose values change nothing are left out."""


def read_rows(record: Record) -> list[TokenRow] | Skip:
    """Read a row of tokens, or the two of a pair; return the reason to skip it if it is none."""
    try:
        if isinstance(record.content, str):
            raise RowError("a text file")
        parts = parts_of(record.content)
        rows = [row_of(part) for part in parts]
        for row, sign in zip(rows, (1, -1), strict=False):
            if len(rows) == 2:
                _add_pair(row, sign, parts[0 if sign > 0 else 1].get(LOGPROBS))
        return rows
    except RowError as error:
        return Skip(record.line, "no row of tokens", str(error))


def parts_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of a row, or of the two rows of a pair. Raises RowError."""
    if not any(fields.get(name) is not None for name in ANSWERS):
        return [fields]
    parts = [fields.get(name) for name in ANSWERS]
    if not all(isinstance(part, dict) for part in parts):
        raise RowError("chosen and rejected are not two rows of tokens")
    return [part for part in parts if isinstance(part, dict)]


def _add_pair(row: TokenRow, sign: int, logprobs: Any) -> None:
    """Add the columns of an answer of a pair. Raises RowError."""
    length = len(row.tokens)
    if not row.learned[1:].any():
        raise RowError("an answer of the pair has no token that is learned")
    if WEIGHTS in row.columns:
        raise RowError("a pair has weights other than 0 and 1: DPO takes none")
    try:
        values = np.array(logprobs, dtype=np.float32)
    except (TypeError, ValueError):
        values = np.full(0, np.nan, np.float32)
    if values.shape != (length,) or not np.isfinite(values[1:]).all():
        raise RowError("an answer of the pair has no logprobs: `lather score` adds them")
    row.columns[PAIRS] = np.full(length, sign, np.int64)
    row.columns[LOGPROBS] = values


def row_of(fields: dict[str, Any]) -> TokenRow:
    """Return the row that a record's fields describe. Raises RowError."""
    tokens = _integers(TOKENS, fields.get(TOKENS), 1)
    if not len(tokens):
        raise RowError("tokens is empty")
    if tokens.min() < 0 or tokens.max() >= 2**32:
        raise RowError(f"tokens has {tokens.min() if tokens.min() < 0 else tokens.max()}")
    columns: dict[str, Array] = {}
    weights = _factors(WEIGHTS, fields.get(WEIGHTS), len(tokens))
    learned = weights != 0
    factors = weights * _factors(ADVANTAGES, fields.get(ADVANTAGES), len(tokens))
    if (factors[learned] != 1).any():
        with np.errstate(over="ignore"):  # it is refused
            columns[WEIGHTS] = factors.astype(np.float32)
        if not np.isfinite(columns[WEIGHTS]).all():
            raise RowError("weights times advantages is too large for fp32")
    if fields.get(ROUTING) not in (None, []):  # the only token of a row may have none
        columns[ROUTING] = _routing(fields[ROUTING], len(tokens))
    return TokenRow(tokens.astype(np.uint32), learned, columns)


def _integers(name: str, value: Any, num_dims: int) -> Array:
    try:
        values = np.array(value)
    except ValueError:  # lists of different lengths
        values = np.array(None)
    if values.ndim == num_dims and not values.size:
        return values.astype(np.int64)
    if values.ndim != num_dims or values.dtype.kind not in "iu":
        lists = "a list of integers" if num_dims == 1 else f"{num_dims} levels of lists of integers"
        raise RowError(f"{name} is not {lists}")
    return values.astype(np.int64)


def _factors(name: str, value: Any, length: int) -> Array:
    """Return the factor of each token, from those of all or from one number."""
    try:
        values = np.array(1.0 if value is None else value, dtype=np.float64)
    except (TypeError, ValueError):
        raise RowError(f"{name} is neither a number nor a list of numbers") from None
    if values.shape not in ((), (length,)):
        raise RowError(f"{name} has {len(values)} values for {length} tokens")
    if not np.isfinite(values).all():
        raise RowError(f"{name} has a value that is not finite")
    return np.broadcast_to(values, (length,))


def _routing(value: Any, length: int) -> Array:
    """Return the experts of each token. The last token, which an engine that generated it has not
    read, may have none."""
    experts_TLK = _integers(ROUTING, value, 3)
    if len(experts_TLK) not in (length, length - 1):
        raise RowError(f"routing has {len(experts_TLK)} entries for {length} tokens")
    column = TOKEN_COLUMNS[ROUTING]
    most = np.iinfo(column.dtype).max
    if experts_TLK.size and (experts_TLK.min() < -1 or experts_TLK.max() > most):
        raise RowError(f"routing has an expert that is not from -1 to {most:,}")
    missing = [(0, length - len(experts_TLK)), (0, 0), (0, 0)]
    padded_TLK = np.pad(experts_TLK, missing, constant_values=int(column.missing))
    return padded_TLK.astype(column.dtype)
