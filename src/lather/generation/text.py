"""Continues texts: encodes prompts, generates tokens for all of them side by side, and decodes these as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from lather.errors import DataError
from lather.generation.stream import TextStream
from lather.models.decoder import Decoder
from lather.models.generate import Continuations, Sampling


@dataclass(frozen=True)
class Ending:
    """Conditions that end a text."""

    num_tokens: int
    """Maximal number of tokens to add."""
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the text; they add no text."""
    stop_texts: tuple[str, ...] = ()
    """Strings that end the text; they are left out of it."""


@dataclass(frozen=True)
class ContinuedText:
    """The text that follows a prompt."""

    text: str
    num_tokens: int
    """Number of generated tokens, including those of a stop text."""
    stopped: bool
    """True if a stop token or stop text ended the text; False if it reached the maximal number of tokens."""


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode a text. Raises DataError if it is not valid Unicode, or has no token."""
    try:
        tokens: list[int] = tokenizer.encode(prompt).ids
    except TypeError:
        raise DataError(f"prompt {prompt!r} is not valid Unicode: give text in UTF-8") from None
    if not tokens:
        raise DataError(f"prompt {prompt!r} encodes to no token: give at least one character")
    return tokens


def continue_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    ending: Ending,
    *,
    context: int,
    sampling: Sampling,
    seeds: Sequence[int],
    show: Callable[[int, str], None] = lambda row, piece: None,
) -> list[ContinuedText]:
    """Continue all prompts side by side, with one of `seeds` for each. `show` is called with a row's number and the next piece of its text
    as soon as that piece is final."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    stop_tokens = ending.stop_tokens
    rows = Continuations(model, prompts, context=context, sampling=sampling, generators=generators, stop_tokens=stop_tokens)
    streams = [TextStream(tokenizer, prompt, ending.stop_texts) for prompt in prompts]
    texts = [""] * len(prompts)

    def add(row: int, piece: str) -> None:
        if piece:
            texts[row] += piece
            show(row, piece)

    for _ in range(ending.num_tokens):
        before = list(rows.going)
        chosen = rows.step()
        for row in before:
            add(row, streams[row].push(chosen[row]) if row in chosen else streams[row].rest())
            if row in chosen and streams[row].stopped:
                rows.end(row)
        if not rows.going:
            break
    limited = set(rows.going)
    for row in limited:
        add(row, streams[row].rest())
    counts = [len(tokens) - len(prompt) for tokens, prompt in zip(rows.tokens, prompts, strict=True)]
    return [ContinuedText(text, counts[row], row not in limited or streams[row].stopped) for row, text in enumerate(texts)]
