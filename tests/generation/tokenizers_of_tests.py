"""Makes tokenizers that take no time."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lather.data.documents import train_tokenizer

SAMPLES = (
    "def f(x):\n    return x + 1\n",
    "naïve café — “quoted” \N{GRINNING FACE}\N{FAMILY} 你好世界\n\n\tend",
    "    \n\n  spaces   ",
    "é",
)


WORDS = {"▁the": 0, "▁cat": 1, "s": 2, "<0xE4>": 3, "<0xBD>": 4, "<0xA0>": 5, "<unk>": 6, "▁": 7}


@functools.cache
def byte_level(vocab_size: int = 280) -> Tokenizer:
    """Train a tokenizer as Lather does, on a few English words."""
    return train_tokenizer(
        iter(["def f(x): return x\n", "one two three END the cat\n"] * 4),
        vocab_size,
        "<|endoftext|>",
    )


def word_pieces() -> Tokenizer:
    """Make a tokenizer like SentencePiece's: it writes spaces as ▁, and unknown characters as
    bytes."""
    tokenizer = Tokenizer(models.BPE(vocab=WORDS, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer
