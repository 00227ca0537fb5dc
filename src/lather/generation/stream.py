"""Decodes tokens to text piece by piece, as they are generated.

A character may consist of several tokens, and tokenizers like SentencePiece's write a space before a word only if another token precedes
it. So a token is decoded together with a few tokens before it; its piece is the text that it adds. Text that later tokens may still change
is held back: an incomplete character, and the possible beginning of a stop text.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The character that tokenizers return for an incomplete character."""
TOKENS_BEFORE = 8


class TextStream:
    """Decodes the tokens that follow a prompt; special tokens add no text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_texts: Sequence[str] = ()) -> None:
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
        self._tokens, self._done = self._tokens[self._done :], len(self._tokens) - self._done
        return self._without_stop_text(grown)

    def rest(self) -> str:
        """Return the text that was held back; call it after the last token."""
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
