"""`lather score RUN ROWS OUT`: writes rows of tokens again with their log-probabilities, and with
the experts to which they go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from lather.argument import Argument
from lather.commands.chosen_model import ChosenModel
from lather.commands.parsing import parse_arguments
from lather.data.records import FilePart, RecordReader, Skip
from lather.data.token_rows import RowError, TokenRow, parts_of, row_of
from lather.errors import DataError, UserError
from lather.evaluation.token_scores import ScoredTokens, score_tokens
from lather.files import whole_file
from lather.optim.options import Count
from lather.train.published_model import find_model
from lather.train.trained_model import Running

LOGPROBS = "logprobs"
Line = tuple[dict[str, Any], list[TokenRow]]
"""A record, and the row, or the two rows of a pair, that it describes."""


@dataclass(frozen=True)
class ScoreArguments(ChosenModel):
    """Score rows of tokens with a checkpoint of a run, in one process."""

    run: Annotated[str, Argument(positional=True, metavar="RUN")]
    """Run directory, whose newest checkpoint scores; or RUN@STEP or RUN@best for another one; or a
    Hugging Face folder."""
    rows: Annotated[Path, Argument(positional=True, metavar="ROWS")]
    """JSONL file, also .gz or .zst, whose lines have "tokens", or "chosen" and "rejected" that
    have."""
    out: Annotated[Path, Argument(positional=True, metavar="OUT")]
    """JSONL file that gets the same lines with "logprobs": the log-probability of each token in
    nats, null for the first."""
    routing: bool = False
    """Also write "routing": the experts of each token in each MoE layer."""
    batch_size: Count = 8
    """Rows per batch."""


def score_command(arguments: list[str]) -> None:
    """Score the rows batch by batch; OUT appears when it is complete."""
    parsed = parse_arguments(ScoreArguments, "lather score", arguments)
    trained = find_model(parsed.run, parsed.step, parsed.weights)
    model = trained.config.model
    if parsed.routing and all(map(model.is_dense, range(model.num_hidden_layers))):
        raise UserError(f"--routing needs MoE layers, and {trained.run} has none: leave it out")
    vocab_size, longest = model.vocab_size, model.max_position_embeddings
    for _, row in _rows(parsed.rows, vocab_size, longest):  # before the model is loaded
        del row
    rows, done = _rows(parsed.rows, vocab_size, longest), 0
    with (
        trained.running(Running(parsed.dtype, parsed.layerwise)) as decoder,
        whole_file(parsed.out, "OUT") as aside,
        aside.open("w", encoding="utf-8") as file,
        Console(stderr=True).status("") as status,
        trained.precision(decoder.device, parsed.dtype),
    ):
        while batch := list(islice(rows, parsed.batch_size)):
            documents = [row.tokens.tolist() for _, rows_of_line in batch for row in rows_of_line]
            scores = score_tokens(decoder, documents, parsed.batch_size)
            for fields, _ in batch:
                for part in parts_of(fields):  # of this line: the answers of a pair
                    part.update(_fields(next(scores), with_routing=parsed.routing))
                file.write(json.dumps(fields, ensure_ascii=False) + "\n")
            done += len(batch)
            status.update(f"{done:,} rows")
    print(f"{parsed.out}: {done:,} rows, scored by {trained.checkpoint}")


def _fields(scored: ScoredTokens, *, with_routing: bool) -> dict[str, Any]:
    fields = {LOGPROBS: [None, *scored.logprobs_T[1:].tolist()]}
    return fields | {"routing": scored.routing_TLK.tolist()} if with_routing else fields


def _rows(path: Path, vocab_size: int, longest: int) -> Iterator[Line]:
    """Yield the rows of a file. Raises DataError for the first line that is none, or that the model
    cannot read."""
    if not path.is_file():
        raise DataError(f"{path}: no such file: give a JSONL file of rows of tokens")
    for record in RecordReader(FilePart(str(path), "jsonl")):
        place = f"{path}, line {record.line}"
        if isinstance(record, Skip):
            raise DataError(f"{place}: {record.reason} {record.detail}: correct the line")
        assert isinstance(record.content, dict)
        try:
            rows = [row_of(part) for part in parts_of(record.content)]
        except RowError as error:
            raise DataError(f"{place}: no row of tokens: {error}: correct the line") from None
        for row in rows:
            if row.tokens.max() >= vocab_size:
                raise DataError(
                    f"{place}: token {row.tokens.max()} is outside the model's vocabulary of "
                    f"{vocab_size}: give the run's own tokens"
                )
            if len(row.tokens) > longest:
                raise DataError(
                    f"{place}: {len(row.tokens):,} tokens, but the model reads {longest:,} "
                    "(model.max_position_embeddings): make the row shorter"
                )
        yield record.content, rows
