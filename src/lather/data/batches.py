"""The batches of a run: the sequences of each step and data rank, as a function of the seed and the
step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.data.batch_columns import Columns, columns_ahead, padded_columns
from lather.data.batch_sizes import BatchSizes
from lather.data.order import Order
from lather.data.sequences import IGNORE_INDEX, PADDING, SequenceArrays, Sequences
from lather.data.shards import Array
from lather.data.token_columns import TOKEN_COLUMNS
from lather.errors import DataError
from lather.models.mtp import look_ahead
from lather.profiled import profiled
from lather.shapes import Bool, Int


@dataclass(frozen=True)
class Batch:
    """The sequences of a global batch that one data rank trains on: B sequences of S positions."""

    inputs_BS: Int[Tensor, "b s"]
    labels_BS: Int[Tensor, "b s"]
    """The token after each input; `IGNORE_INDEX` where the loss leaves it out."""
    begins_BS: Bool[Tensor, "b s"] | None = None
    """True at the first token of a document, if attention stays within documents; None: attention
    spans the whole sequence."""
    labels_of_all: int | None = None
    """Number of labels in the global batch; None: unknown, so that the ranks add up theirs."""
    padding_BS: Bool[Tensor, "b s"] | None = None
    """True at positions without a token, which experts and their balance leave out; None: every
    position has a token. A position without a label may have one."""
    tokens_of_all: int | None = None
    """Number of inputs in the global batch, without padding; None: unknown, like
    `labels_of_all`."""
    columns: Columns = field(default_factory=dict)
    """Token columns, (B, S, ...) by name; those of labels at the label's position."""
    origins: tuple[str, ...] = ()
    """Data set and number of each sequence, for messages; none: not known."""

    @classmethod
    def of_tokens(cls, tokens_BS: Int[Tensor, "b s"]) -> Batch:
        """Split sequences of S + 1 tokens into inputs and labels. `IGNORE_INDEX` among the tokens
        is padding: it is left out of the loss, and becomes input 0."""
        padding_BS = tokens_BS[:, :-1] == IGNORE_INDEX
        inputs_BS = tokens_BS[:, :-1].masked_fill(padding_BS, 0)
        return cls(inputs_BS, tokens_BS[:, 1:], padding_BS=padding_BS if padding_BS.any() else None)

    @property
    def num_labels(self) -> int:
        return int((self.labels_BS != IGNORE_INDEX).sum())

    @property
    def num_tokens(self) -> int:
        """Number of inputs, without padding."""
        return sum(self.tokens_of_parts(len(self.inputs_BS)))

    def tokens_of_parts(self, size: int) -> list[int]:
        """Return the number of inputs, without padding, of each `size` sequences."""
        lengths_B = torch.full((len(self.inputs_BS),), self.inputs_BS.shape[1])
        if self.padding_BS is not None:
            lengths_B = lengths_B - self.padding_BS.sum(1).to(lengths_B)
        return [int(lengths.sum()) for lengths in lengths_B.split(size)]

    def ahead(self, depth: int) -> Batch:
        """Return the batch as a depth of multi-token prediction sees it (`look_ahead`); its numbers
        of all ranks are unknown."""
        documents_BS = None if self.begins_BS is None else self.begins_BS.cumsum(1)
        inputs_BS, labels_BS, missing_BS = look_ahead(
            self.inputs_BS, self.labels_BS, depth, documents_BS, self.padding_BS
        )
        columns = columns_ahead(self.columns, depth)
        return Batch(inputs_BS, labels_BS, self.begins_BS, padding_BS=missing_BS, columns=columns)

    def padded(self, rows: int) -> Batch:
        """Append this number of sequences that are padding."""
        if not rows:
            return self
        below = (0, 0, 0, rows)
        padding_BS = self.padding_BS
        if padding_BS is None:
            padding_BS = torch.zeros_like(self.inputs_BS, dtype=torch.bool)
        return replace(
            self,
            inputs_BS=F.pad(self.inputs_BS, below),
            labels_BS=F.pad(self.labels_BS, below, value=IGNORE_INDEX),
            begins_BS=None if self.begins_BS is None else F.pad(self.begins_BS, below),
            padding_BS=F.pad(padding_BS, below, value=True),
            columns=padded_columns(self.columns, rows),
        )


class Source:
    """The sequences of one split of a data set; `name` appears in messages."""

    def __init__(self, name: str, sequences: Sequences, vocab_size: int) -> None:
        self.name, self.sequences, self.vocab_size = name, sequences, vocab_size

    def __len__(self) -> int:
        return len(self.sequences)


def read_batch(sources: Sequence[Source], samples: Sequence[tuple[int, int]]) -> Batch:
    """Read `samples`, pairs of (number of the source, number of the sequence).

    Raises DataError if a shard is truncated or has a token outside the vocabulary.
    """
    length = sources[0].sequences.length
    inputs_BS = np.full((len(samples), length), PADDING, dtype=np.int64)
    labels_BS = np.full_like(inputs_BS, IGNORE_INDEX)
    begins_BS = np.zeros((len(samples), length), dtype=bool)
    columns = _missing_columns(sources, len(samples))
    for row, (number, index) in enumerate(samples):
        source = sources[number]
        own = {name: columns[name][row] for name in source.sequences.columns}
        arrays = SequenceArrays(inputs_BS[row], labels_BS[row], begins_BS[row], own)
        source.sequences.fill(index, arrays)
        highest = max(int(inputs_BS[row].max()), int(labels_BS[row].max()))
        if highest >= source.vocab_size:
            raise DataError(
                f"{source.name}: token {highest} in sequence {index} is outside the vocabulary "
                f"({source.vocab_size}): a shard is damaged; `lather data check` says which"
            )
    is_padding_BS = inputs_BS == PADDING
    inputs_BS[is_padding_BS] = 0
    is_per_document = sources[0].sequences.is_per_document
    return Batch(
        torch.from_numpy(inputs_BS),
        torch.from_numpy(labels_BS),
        begins_BS=torch.from_numpy(begins_BS) if is_per_document else None,
        padding_BS=torch.from_numpy(is_padding_BS) if is_padding_BS.any() else None,
        columns={name: torch.from_numpy(values) for name, values in columns.items()},
        origins=tuple(f"{sources[number].name}, sequence {index}" for number, index in samples),
    )


def _missing_columns(sources: Sequence[Source], rows: int) -> dict[str, Array]:
    """Return the columns that a source has, (B, S, ...), of sequences that lack them."""
    columns: dict[str, Array] = {}
    for source in sources:
        for name, of_token in source.sequences.columns.items():
            shape = (rows, source.sequences.length, *of_token)
            kind = TOKEN_COLUMNS[name]
            columns.setdefault(name, np.full(shape, kind.missing, kind.dtype))
            if columns[name].shape != shape:
                raise DataError(
                    f"{source.name}: {name} has shape {of_token} per token, and "
                    f"{columns[name].shape[2:]} in another data set: do not mix them"
                )
    return columns


class Batches:
    """The training batches of a run."""

    def __init__(self, sources: Sequence[Source], order: Order, sizes: BatchSizes) -> None:
        self.sources, self.order, self.sizes = sources, order, sizes

    @profiled("data")
    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Read the sequences of step `step` (counted from 1) for data rank `rank` of `ranks`. A
        batch may span two epochs; no sequence is dropped."""
        samples = self.samples(step)
        each = len(samples) // ranks
        batch = read_batch(self.sources, samples[rank * each : (rank + 1) * each])
        sequences = [(self.sources[source].sequences, index) for source, index in samples]
        counts = [of_source.num_labels(index) for of_source, index in sequences]
        known = [count for count in counts if count is not None]
        return replace(
            batch,
            labels_of_all=sum(known) if len(known) == len(counts) else None,
            tokens_of_all=sum(of_source.num_tokens(index) for of_source, index in sequences),
        )

    def samples(self, step: int) -> list[tuple[int, int]]:
        """Return the sequences of a step (counted from 1), as pairs of (number of the source,
        number of the sequence)."""
        start = self.sizes.before(step)
        return self.order.samples(start, start + self.sizes.of(step))


class HeldOut:
    """Held-out sequences, the same at every validation, spread evenly over a source; a shorter last
    sequence is left out."""

    def __init__(self, source: Source, most: int) -> None:
        """`most`: maximal number of sequences."""
        self.source = source
        last = source.sequences.num_labels(len(source) - 1)
        size = max(1, len(source) - (last is not None and last < source.sequences.length))
        number = min(most, size)
        self.indices = [index * size // number for index in range(number)]
        """Numbers of the sequences in the source."""

    def first_tokens(self) -> list[int]:
        """The tokens of the source's first sequence."""
        tokens: list[int] = read_batch([self.source], [(0, 0)]).inputs_BS[0].tolist()
        return tokens

    def batch(self, rank: int = 0, ranks: int = 1) -> Batch:
        """Read the sequences of a data rank. Every rank gets the same number, with padding for
        missing sequences."""
        each = -(-len(self.indices) // ranks)
        samples = [(0, index) for index in self.indices[rank * each : (rank + 1) * each]]
        return read_batch([self.source], samples).padded(each - len(samples))
