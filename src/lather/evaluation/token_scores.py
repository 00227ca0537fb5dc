"""Log-probabilities of given tokens, and the experts to which they go, document by document.

Letters: B documents, S positions, T tokens of a document, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.device import Read, read
from lather.evaluation.scoring import score_head
from lather.models.decoder import Decoder
from lather.shapes import Float, Int


@dataclass(frozen=True)
class ScoredTokens:
    """The scores of a document, on the host."""

    logprobs_T: Float[Tensor, " t"]
    """Log-probability of each token after those before it, in nats and fp32 or wider; NaN for the
    first, before which there is nothing."""
    routing_TLK: Int[Tensor, "t l k"]
    """The experts of each token in each MoE layer, the one with the best score first; int16."""


def score_tokens(
    model: Decoder, documents: Iterable[Sequence[int]], batch_size: int = 8
) -> Iterator[ScoredTokens]:
    """Yield the scores of each document, in order, which the model reads `batch_size` at a time.
    Documents have at least one token."""
    rest = iter(documents)
    while batch := list(islice(rest, batch_size)):
        yield from _score_batch(model, batch)


@torch.no_grad()
def _score_batch(model: Decoder, documents: list[Sequence[int]]) -> Iterator[ScoredTokens]:
    lengths = [len(document) for document in documents]
    tokens_BS = torch.full((len(documents), max(lengths) + 1), IGNORE_INDEX)
    for row, document in enumerate(documents):
        tokens_BS[row, : len(document)] = torch.tensor(document)
    batch = Batch.of_tokens(tokens_BS)
    inputs_BS, labels_BS = batch.inputs_BS.to(model.device), batch.labels_BS
    x_BSD, routings = model.hidden(inputs_BS, padding_BS=batch.padding_BS)
    with model.ready(model.lm_head):
        nats_N, _ = score_head(x_BSD, labels_BS, model.lm_head.weight)
    chosen = [routing.experts_TK.to(torch.int16) for routing in routings]
    routing_TLK = torch.stack(chosen, 1) if chosen else inputs_BS.new_empty(inputs_BS.numel(), 0, 0)
    routing_BSLK = read(routing_TLK, Read.SCORES).unflatten(0, inputs_BS.shape)
    of_documents = read(nats_N, Read.SCORES).split([length - 1 for length in lengths])
    for row, (length, nats_T) in enumerate(zip(lengths, of_documents, strict=True)):
        logprobs_T = torch.cat((nats_T.new_full((1,), torch.nan), -nats_T))
        yield ScoredTokens(logprobs_T, routing_BSLK[row, :length])
