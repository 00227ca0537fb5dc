"""Continues texts: generates tokens for several prompts side by side, and decodes these as they are
generated.

A character may consist of several tokens, and tokenizers like SentencePiece's write a space before
a word only if another token precedes it. So a token is decoded together with a few tokens before
it; its piece is the text that it adds. Text that later tokens may still change is held back: an
incomplete character, and the possible beginning of a stop text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from lather.models.decoder import Decoder
from lather.models.generate import Continuations, Sampling

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The character that tokenizers return for an incomplete character."""
TOKENS_BEFORE, MOST_TOKENS = 8, 64


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
    """True if a stop token or stop text ended the text; False if it reached the maximal number of
    tokens."""


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
    """Continue all prompts side by side, with one of `seeds` for each. `show` is called with a
    row's number and the next piece of its text as soon as that piece is final."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows = Continuations(
        model,
        prompts,
        context=context,
        sampling=sampling,
        generators=generators,
        stop_tokens=ending.stop_tokens,
    )
    streams = [TextStream(tokenizer, prompt, ending.stop_texts) for prompt in prompts]
    texts = [""] * len(prompts)

    def add(row: int, piece: str) -> None:
        if piece:
            texts[row] += piece
            show(row, piece)

    for _ in range(ending.num_tokens):
        before = list(rows.unfinished)
        chosen = rows.step()
        for row in before:
            add(row, streams[row].push(chosen[row]) if row in chosen else streams[row].rest())
            if row in chosen and streams[row].stopped:
                rows.end(row)
        if not rows.unfinished:
            break
    limited = set(rows.unfinished)
    for row in limited:
        add(row, streams[row].rest())
    return [
        ContinuedText(
            text,
            len(rows.tokens[row]) - len(prompts[row]),
            row not in limited or streams[row].stopped,
        )
        for row, text in enumerate(texts)
    ]


class TextStream:
    """Decodes the tokens that follow a prompt; special tokens add no text."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_texts: Sequence[str] = ()
    ) -> None:
        """The text ends before the first occurrence of any of `stop_texts`."""
        self._tokenizer, self._stop_texts = tokenizer, [text for text in stop_texts if text]
        self._tokens = list(prompt[-TOKENS_BEFORE:])
        self._done = len(self._tokens)
        """Number of tokens in `_tokens` whose text has been returned."""
        self._held = ""
        self.stopped = False
        """True once a stop text has occurred."""

    def push(self, token: int) -> str:
        """Add a token; return the text that it makes final. After a stop text, return nothing."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        grown = self._grown()
        if grown.endswith(UNKNOWN):
            return ""
        # after tokens without text alone, such as special ones, a word has no space
        if grown or len(self._tokens) > MOST_TOKENS:
            self._tokens = self._tokens[self._done :]
        self._done = len(self._tokens)
        return self._without_stop_text(grown)

    def rest(self) -> str:
        """Return the text that was held back; call it after the last token."""
        if self.stopped:
            return ""
        return self._without_stop_text(self._grown()) + self._held

    def _grown(self) -> str:
        before: str = self._tokenizer.decode(self._tokens[: self._done])
        after: str = self._tokenizer.decode(self._tokens)
        return after[len(before) :]

    def _without_stop_text(self, grown: str) -> str:
        text = self._held + grown
        places = [place for place in (text.find(stop) for stop in self._stop_texts) if place >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        most = max((len(stop) - 1 for stop in self._stop_texts), default=0)
        first = next(
            place
            for place in range(max(0, len(text) - most), len(text) + 1)
            if any(stop.startswith(text[place:]) for stop in self._stop_texts) or place == len(text)
        )
        self._held = text[first:]
        return text[:first]
