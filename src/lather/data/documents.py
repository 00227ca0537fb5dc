"""Makes documents from records, and tokens from documents.

A document is a text and, for conversations, the ranges of it that are trained on. Documents are
encoded in batches, because the library encodes a batch in parallel; a long text is encoded in parts
that end with a line or a word, so that memory stays flat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from lather.data.chat import MOST_CHARACTERS, MOST_MESSAGES, ChatTemplate
from lather.data.conversations import ChatError, length_of, messages_of, tools_of, unread_fields
from lather.data.hidden import Note
from lather.data.records import Record, Skip
from lather.data.shards import Array
from lather.data.texts import cut
from lather.data.token_rows import TokenRow
from lather.errors import DataError
from lather.files import read_text, unreadable

PART_CHARACTERS = 1 << 20
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024


@dataclass(frozen=True)
class Document:
    """A text to train on."""

    text: str
    learned: list[tuple[int, int]] | None = None
    """Ranges of characters that are trained on, as (start, stop); None: the whole text."""
    num_bytes: int = 0
    """The length of the text in UTF-8."""
    split: str = "train"
    notes: list[Note] = field(default_factory=list)
    """Parts of the record that the document lacks: kind, detail."""
    rows: list[TokenRow] = field(default_factory=list)
    """Tokens in place of a text: of a document, or of the two of a pair."""


def document_of(record: Record, field: str, template: ChatTemplate | None) -> Document | Skip:
    """Return the document of a record, or the reason to skip the record. `field`: name of the field
    that holds the text; with a `template`, records are conversations instead."""
    document = _text(record, field) if template is None else _conversation(record, template)
    if isinstance(document, Skip):
        return document
    if not document.text.strip():
        return Skip(record.line, "empty")
    try:
        return replace(document, num_bytes=len(document.text.encode("utf-8")))
    except UnicodeEncodeError as error:
        detail = f"a lone surrogate at character {error.start}"
        return Skip(record.line, "not valid Unicode", detail)


def _conversation(record: Record, template: ChatTemplate) -> Document | Skip:
    if isinstance(record.content, str):
        return Skip(record.line, "no conversation", "a text file")
    try:
        messages, tools = messages_of(record.content), tools_of(record.content)
        length = length_of(messages)
        if length > MOST_CHARACTERS or len(messages) > MOST_MESSAGES:
            size = f"a conversation of {len(messages):,} messages, {length:,} characters"
            return Skip(record.line, "too long", size)
        formatted = template.format(messages, tools)
    except ChatError as error:
        return Skip(record.line, "no conversation", str(error))
    unread = [(f"field {name!r} is not read", "") for name in unread_fields(record.content)]
    return Document(formatted.text, formatted.answers, notes=[*formatted.notes, *unread])


def _text(record: Record, field: str) -> Document | Skip:
    if isinstance(record.content, str):
        return Document(record.content)
    if field not in record.content:
        names = ", ".join(map(str, record.content)) or "none"
        return Skip(record.line, f"no field {field!r}", f"it has {names}")
    value = record.content[field]
    if value is None:
        return Skip(record.line, f"{field!r} is null")
    if not isinstance(value, str):
        return Skip(record.line, f"{field!r} is no text", type(value).__name__)
    return Document(value)


@dataclass(frozen=True)
class TokenRun:
    """The tokens of a document, or of a part of a long one."""

    split: str
    tokens: Array
    is_last: bool
    learned: Array | None = None
    """Which of the tokens are trained on; None: all."""
    text_bytes: int = 0
    """Bytes of the whole document's text; 0 if unknown."""
    columns: dict[str, Array] = field(default_factory=dict)
    """Token columns of the tokens, by name."""


def encode(
    documents: Iterable[Document], tokenizer: Tokenizer, end: int | None, *, chat: bool
) -> Iterator[TokenRun]:
    """Encode documents in batches, and add the token `end` to each, if it is given; yield their
    tokens in order. `chat`: the name of a special token in a text is encoded as that token, for
    chat templates; otherwise as plain characters.

    A text that ends with `end`, or with `end` and white space, as a chat template may write it,
    gets no second one."""
    tokenizer.encode_special_tokens = not chat
    encode_batch = tokenizer.encode_batch if chat else tokenizer.encode_batch_fast
    for batch in _in_batches(_parts(documents, chat=chat)):
        encodings = encode_batch([text for _, text, _ in batch], add_special_tokens=False)
        for (document, text, is_last), encoding in zip(batch, encodings, strict=True):
            is_open = is_last and end is not None and not (chat and _is_ended(encoding, text, end))
            ids, spans = encoding.ids + ([end] if is_open else []), document.learned
            learned = None if spans is None else _learned(encoding, spans, len(ids))
            tokens = np.array(ids, dtype=np.uint32)
            yield TokenRun(document.split, tokens, is_last, learned, document.num_bytes)


def _parts(documents: Iterable[Document], *, chat: bool) -> Iterator[tuple[Document, str, bool]]:
    for document in documents:
        parts = [document.text] if chat else list(cut(document.text, PART_CHARACTERS))
        for number, text in enumerate(parts, 1):
            yield document, text, number == len(parts)


def _is_ended(encoding: Encoding, text: str, end: int) -> bool:
    """Tell whether `end` is the last token that is not white space."""
    for token, (start, stop) in zip(encoding.ids[::-1], encoding.offsets[::-1], strict=True):
        if token == end or text[start:stop].strip():
            return token == end
    return False


def _learned(encoding: Encoding, spans: Iterable[tuple[int, int]], length: int) -> Array:
    """Return which of `length` tokens are trained on: those that start within a span, and the
    end-of-text token, which the encoding does not have, after such a token."""
    starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
    learned = np.zeros(length, dtype=bool)
    for start, stop in spans:
        learned[: len(starts)] |= (starts >= start) & (starts < stop)
    learned[len(starts) :] = learned[len(starts) - 1] if len(starts) else False
    return learned


def _in_batches(
    parts: Iterable[tuple[Document, str, bool]],
) -> Iterator[list[tuple[Document, str, bool]]]:
    """Yield batches of about `BATCH_CHARACTERS` characters."""
    batch: list[tuple[Document, str, bool]] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part[1])
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# --- tokenizers -----------------------------------------------------------------------------------


def load_tokenizer(path: Path, remedy: str) -> Tokenizer:
    """Load a `tokenizer.json`. Raises DataError, with the path and this remedy, if it is missing or
    damaged, and with another if it may not be read."""
    try:
        tokenizer = Tokenizer.from_str(read_text(path))
    except Exception as error:  # the library raises nothing narrower
        text = unreadable(path, error) or f"{path}: not a usable tokenizer ({error}): {remedy}"
        raise DataError(text) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def train_tokenizer(texts: Iterator[str], vocab_size: int, end_of_text: str) -> Tokenizer:
    """Train a byte-level BPE tokenizer: it encodes any text, and decodes it to the same text. Token
    0 is `end_of_text`. Raises DataError if the texts make the same token of their characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    if any("".join(pair) == end_of_text for pair in merges):
        raise DataError(
            f"end_of_text = {end_of_text!r} is also a token of the texts: give one that they do "
            "not have, such as '<|endoftext|>'"
        )
    tokenizer.encode_special_tokens = True
    return tokenizer
