"""Tokenizers that are made in a moment."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer

from lather.data.documents import train_tokenizer

SAMPLES = (
    "def f(x):\n    return x + 1\n",
    "naïve café — “quoted” \N{GRINNING FACE}\N{FAMILY} 你好世界\n\n\tend",
    "    \n\n  spaces   ",
    "é",
)


@functools.cache
def byte_level(vocab_size: int = 280) -> Tokenizer:
    """As Lather makes it, on a few English words."""
    return train_tokenizer(iter(["def f(x): return x\n", "one two three END the cat\n"] * 4), vocab_size, "<|endoftext|>")
