"""Scores labels: the nats of each, and whether it was the most likely token; sums them over a
held-out set, per token and per byte.

Logits are computed for a few labels at a time to save memory, and always in fp32 or wider.

With byte-level BPE (GPT-2's, and Lather's own) the count of bytes is exact: the bytes of a text's
tokens add up to the bytes of the text. With other tokenizers, a token counts the bytes of its
written form, in which SentencePiece's mark for a space is a space; if the tokenizer changes the
text (case, accents, a space before the first word, unknown characters), the sum is that of the
changed text. Special tokens, such as the end of a text, count no bytes, although their nats are
part of the loss.

Letters: B sequences, S positions, D hidden size, N labels, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor

from lather.data.batches import Batch, Source, read_batch
from lather.data.sequences import IGNORE_INDEX
from lather.device import no_autocast
from lather.models.decoder import Decoder
from lather.models.document_boundaries import document_boundaries
from lather.models.token_positions import SequenceLayout
from lather.shapes import Bool, Float, Int

LOGITS_AT_A_TIME = 1 << 24
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's mark for a space."""
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""SentencePiece's token for a single byte."""
CONTINUED = "##"
"""Prefix of WordPiece's tokens that continue a word."""


@torch.no_grad()
def states_of(
    model: Decoder, batches: Iterable[Batch]
) -> Iterator[tuple[Batch, Float[Tensor, "b s d"]]]:
    """Yield each batch with the head's inputs, while the head is ready. As many batches are read
    ahead as the model takes at a time; the first is the largest."""
    left = iter(batches)
    for first in left:
        more = model.batches_at_a_time(first.inputs_BS.numel()) - 1
        group = [first, *itertools.islice(left, more)]
        states = model.hidden_of([_tokens_and_layout(model, batch) for batch in group])
        with model.ready(model.lm_head):
            yield from zip(group, states, strict=True)


def _tokens_and_layout(model: Decoder, batch: Batch) -> tuple[Tensor, SequenceLayout]:
    boundaries = None if batch.begins_BS is None else document_boundaries(batch.begins_BS)
    number, length = batch.inputs_BS.shape
    layout = SequenceLayout(number, length, model.device, boundaries)
    return batch.inputs_BS.to(model.device), layout.with_padding(batch.padding_BS)


@torch.no_grad()
def score_head(
    x_BSD: Float[Tensor, "*b d"], labels_BS: Int[Tensor, "*b"], head_VD: Float[Tensor, "v d"]
) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
    """Return for inputs of the model's head and its weights the nats of each label that is not
    `IGNORE_INDEX`, in order, and whether it was the most likely token; both on the model's
    device."""
    labels_BS = labels_BS.to(x_BSD.device)
    is_label_BS = labels_BS != IGNORE_INDEX
    x_ND, labels_N = x_BSD[is_label_BS], labels_BS[is_label_BS]
    wide = torch.promote_types(head_VD.dtype, torch.float32)
    size = max(1, LOGITS_AT_A_TIME // len(head_VD))
    nats, hits = [x_ND.new_zeros(0, dtype=wide)], [labels_N.new_zeros(0, dtype=torch.bool)]
    with no_autocast(x_ND):
        for chunk_ND, chunk_N in zip(x_ND.split(size), labels_N.split(size), strict=True):
            logits_NV = F.linear(chunk_ND.to(wide), head_VD.to(wide))
            nats.append(F.cross_entropy(logits_NV, chunk_N, reduction="none"))
            hits.append(logits_NV.argmax(-1) == chunk_N)
    return torch.cat(nats), torch.cat(hits)


@dataclass(frozen=True)
class Score:
    """Sums over a held-out set that measure how well a model predicts it."""

    sequences: int
    tokens: int
    """Number of labels: all predicted tokens; in conversations, only tokens of answers."""
    nats: float
    """Sum of the labels' nats."""
    hits: int
    """Number of labels that were the most likely token."""
    num_bytes: int | None
    """UTF-8 bytes of the labels' text; None: the set has no tokenizer."""

    def as_row(self) -> dict[str, Any]:
        """Return the fields of a row of results; values that are not finite, or not known without
        tokens, become null.

        `loss`: nats per token; `perplexity`: exp(loss); `bits_per_byte`: bits per byte of text,
        which compares models with different tokenizers, null if there are no bytes; `accuracy`:
        fraction of the labels that were the most likely token.
        """
        loss = self.nats / self.tokens if self.tokens else math.nan
        row = {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "loss": loss,
            "perplexity": math.inf if loss >= 700 else math.exp(loss),
            "bits_per_byte": self.nats / math.log(2) / self.num_bytes if self.num_bytes else None,
            "accuracy": self.hits / self.tokens if self.tokens else math.nan,
        }
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }


def score_set(
    model: Decoder,
    source: Source,
    indices: Sequence[int],
    batch_size: int,
    bytes_V: Int[Tensor, " v"] | None,
    progress: Callable[[int], None] = lambda done: None,
) -> Score:
    """Score the sequences `indices` of a source. `bytes_V`: bytes of each token; None: unknown.
    `progress` gets the number scored."""
    nats, hits, tokens, num_bytes, done = 0.0, 0, 0, 0, 0
    batches = (
        read_batch([source], [(0, index) for index in indices[first : first + batch_size]])
        for first in range(0, len(indices), batch_size)
    )
    for batch, x_BSD in states_of(model, batches):
        nats_N, hits_N = score_head(x_BSD, batch.labels_BS, model.lm_head.weight)
        labels_N = batch.labels_BS[batch.labels_BS != IGNORE_INDEX]
        nats += nats_N.double().sum().item()
        hits += int(hits_N.sum())
        tokens += len(labels_N)
        num_bytes += 0 if bytes_V is None else int(bytes_V[labels_N].sum())
        done += len(batch.inputs_BS)
        progress(done)
    return Score(len(indices), tokens, nats, hits, None if bytes_V is None else num_bytes)


# --- bytes ----------------------------------------------------------------------------------------


def bytes_per_token(tokenizer: Tokenizer, vocab_size: int) -> Int[Tensor, " v"]:
    """Return the bytes of each token; 0 for tokens that the tokenizer does not have."""
    # not in a token, whose quotes would be escaped
    kinds = set(re.findall(r'"type":"(\w+)"', tokenizer.to_str()))
    added = tokenizer.get_added_tokens_decoder()
    table = torch.zeros(vocab_size, dtype=torch.int64)
    for written, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token >= vocab_size:
            continue
        if token in added:
            table[token] = 0 if added[token].special else len(written.encode())
        elif "ByteLevel" in kinds:
            table[token] = len(written)  # a character for each byte
        elif BYTE.fullmatch(written):
            table[token] = 1
        else:
            text = written.removeprefix(CONTINUED) if "WordPiece" in kinds else written
            table[token] = len(text.replace(SPACE, " ").encode())
    return table
