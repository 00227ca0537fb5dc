"""Scores of labels: the nats of each, and whether it was the most likely token; over a held-out set, per token and per byte.

The logits of a few labels at a time are made, in fp32 or wider whatever the rest is computed in.

Letters: B sequences, S positions, D hidden size, N labels, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.data.batches import Batch, Source, read_batch
from lather.data.sequences import IGNORE_INDEX
from lather.device import no_autocast
from lather.engine.engine import document_boundaries
from lather.models.decoder import Decoder
from lather.shapes import Bool, Float, Int

LOGITS_AT_A_TIME = 1 << 24


@torch.no_grad()
def score_labels(model: Decoder, batch: Batch) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
    """Nats of each label that is not `IGNORE_INDEX`, in row order, and whether it was the most likely token; on the model's device."""
    device = next(model.parameters()).device
    boundaries = None if batch.begins_BS is None else document_boundaries(batch.begins_BS)
    x_BSD, _ = model.hidden(batch.inputs_BS.to(device), cu_seqlens=boundaries)
    labels_BS = batch.labels_BS.to(device)
    is_label_BS = labels_BS != IGNORE_INDEX
    with no_autocast(x_BSD):
        return _score(x_BSD[is_label_BS], model.lm_head.weight, labels_BS[is_label_BS])


def _score(x_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(head_VD.dtype, torch.float32)
    size = max(1, LOGITS_AT_A_TIME // len(head_VD))
    nats, hits = [x_ND.new_zeros(0, dtype=wide)], [labels_N.new_zeros(0, dtype=torch.bool)]
    for some_ND, some_N in zip(x_ND.split(size), labels_N.split(size), strict=True):
        logits_NV = F.linear(some_ND.to(wide), head_VD.to(wide))
        nats.append(F.cross_entropy(logits_NV, some_N, reduction="none"))
        hits.append(logits_NV.argmax(-1) == some_N)
    return torch.cat(nats), torch.cat(hits)


@dataclass(frozen=True)
class Score:
    """The measure of how well a model predicts a held-out set."""

    sequences: int
    tokens: int
    """Labels: tokens that were predicted. Of conversations those of answers."""
    nats: float
    """Sum over the labels."""
    hits: int
    """Labels that were the most likely token."""
    num_bytes: int | None
    """UTF-8 bytes of the labels' text; None: the set has no tokenizer."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for each byte of the text: the same measure for any tokenizer. None if there are no bytes."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None

    @property
    def accuracy(self) -> float:
        """Part of the labels that were the most likely token."""
        return self.hits / self.tokens

    def as_row(self) -> dict[str, Any]:
        """Fields of a row of results; what is not finite is null."""
        row = {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "accuracy": self.accuracy,
        }
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def score_set(
    model: Decoder,
    source: Source,
    indices: Sequence[int],
    batch_size: int,
    *,
    apart: bool,
    bytes_V: Int[Tensor, " v"] | None,
    progress: Callable[[int], None] = lambda done: None,
) -> Score:
    """Score these sequences of a source. `apart`: attention stays within documents; `progress` is told how many sequences are done."""
    nats, hits, tokens, num_bytes = 0.0, 0, 0, 0
    for first in range(0, len(indices), batch_size):
        some = indices[first : first + batch_size]
        batch = read_batch([source], [(0, index) for index in some], apart=apart)
        nats_N, hits_N = score_labels(model, batch)
        labels_N = batch.labels_BS[batch.labels_BS != IGNORE_INDEX]
        nats += nats_N.double().sum().item()
        hits += int(hits_N.sum())
        tokens += len(labels_N)
        num_bytes += 0 if bytes_V is None else int(bytes_V[labels_N].sum())
        progress(first + len(some))
    return Score(len(indices), tokens, nats, hits, None if bytes_V is None else num_bytes)
