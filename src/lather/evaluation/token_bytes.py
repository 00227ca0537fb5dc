"""Counts the UTF-8 bytes of text that each token of a vocabulary stands for.

With byte-level BPE (GPT-2's, and Lather's own) this is exact: the bytes of a text's tokens add up to the bytes of the text. With other
tokenizers, a token counts the bytes of its written form, in which SentencePiece's mark for a space is a space; if the tokenizer changes the
text (case, accents, a space before the first word, unknown characters), the sum is that of the changed text. Special tokens, such as the
end of a text, count no bytes, although their nats are part of the loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Tokenizer

from lather.shapes import Int

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's mark for a space."""
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""SentencePiece's token for a single byte."""
CONTINUED = "##"
"""Prefix of WordPiece's tokens that continue a word."""


def bytes_per_token(tokenizer: Tokenizer, vocab_size: int) -> Int[torch.Tensor, " v"]:
    """Return the bytes of each token; 0 for tokens that the tokenizer does not have."""
    kinds = set(_types(json.loads(tokenizer.to_str())))
    added = tokenizer.get_added_tokens_decoder()
    table = torch.zeros(vocab_size, dtype=torch.int64)
    for written, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token >= vocab_size:
            continue
        if token in added:
            table[token] = 0 if added[token].special else len(written.encode())
        elif "ByteLevel" in kinds:
            table[token] = len(written)  # a character for each byte
        else:
            table[token] = _written_bytes(written, "WordPiece" in kinds)
    return table


def _written_bytes(written: str, is_word_piece: bool) -> int:
    if BYTE.fullmatch(written):
        return 1
    text = written.replace(SPACE, " ")
    return len((text.removeprefix(CONTINUED) if is_word_piece else text).encode())


def _types(part: Any) -> Iterator[str]:
    """Yield the type names of a tokenizer's decoder, model and pre-tokenizer, and of their parts."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for name, value in part.items():
            if name not in ("vocab", "merges", "added_tokens"):
                yield from _types(value)
    elif isinstance(part, list):
        for value in part:
            yield from _types(value)
