"""Tokens to text, piece by piece as they come.

A character may be of several tokens, and tokenizers like SentencePiece's write a space before a word only if something precedes it. So a
token is decoded together with some before it, and what the text has grown by is the token's piece. Whatever may still turn out otherwise
is held back: a character that is not whole, and what may be the beginning of a text that ends it all.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The character that tokenizers decode a part of one to."""
TOKENS_BEFORE = 8


class TextStream:
    """The text of tokens that follow a prompt. Special tokens have none."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_texts: Sequence[str] = ()) -> None:
        """`stop_texts`: the first that occurs ends the text, without it."""
        self._tokenizer, self._stop_texts = tokenizer, [text for text in stop_texts if text]
        self._tokens = list(prompt[-TOKENS_BEFORE:])
        self._done = len(self._tokens)
        """The number of these tokens that are in the text."""
        self._held = ""
        self.stopped = False
        """True once a stop text came."""

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; nothing after a stop text."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        grown = self._grown()
        if grown.endswith(UNKNOWN):
            return ""
        self._tokens, self._done = self._tokens[self._done :], len(self._tokens) - self._done
        return self._without_stop_text(grown)

    def rest(self) -> str:
        """The text that was held back, when no token follows."""
        if self.stopped:
            return ""
        text = self._without_stop_text(self._grown())
        text, self._held = text + self._held, ""
        self._tokens, self._done = [], 0
        return text

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
        longest = max((len(stop) - 1 for stop in self._stop_texts), default=0)
        sizes = range(min(longest, len(text)), 0, -1)
        held = next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stop_texts)), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
