"""Conversations as prompts: the tokens that ask for an answer, and what ends an answer."""

from __future__ import annotations

from tokenizers import Tokenizer

from lather.data.chat import ChatError, ChatTemplate, Messages
from lather.errors import DataError

PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""A content that no template changes."""


class ConversationFormat:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Raises DataError if the template has no place for an answer."""
        self.template = template
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False  # a special token's name in the text is that token, as templates mean it
        closing = self._closing()
        tokens = self._encode(closing)
        special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        self.stop_tokens = frozenset(tokens[:1]) & special
        """The special token, if there is one, with which the template ends an answer."""
        self.stop_texts = () if self.stop_tokens or not closing else (closing,)
        """The text with which it does, if that is no such token."""

    def prompt(self, messages: Messages) -> list[int]:
        """The tokens of a conversation, and of what asks the assistant for an answer. Raises DataError if the template refuses it."""
        return self._encode(self.text(messages))

    def text(self, messages: Messages, *, asking: bool = True) -> str:
        """The conversation as the template writes it; `asking`: with what asks for an answer. Raises DataError if it refuses."""
        try:
            return self.template.render(messages, asking=asking)
        except ChatError as error:
            raise DataError(f"the conversation cannot be written: {error}") from None

    def _closing(self) -> str:
        """The text that follows an answer, without white space around it."""
        text = self.text([{"role": "user", "content": "x"}, {"role": "assistant", "content": PLACE}], asking=False)
        _, found, closing = text.rpartition(PLACE)
        if not found:
            raise DataError("the chat template does not show the assistant's messages: give a tokenizer with another template")
        return closing.strip()

    def _encode(self, text: str) -> list[int]:
        try:
            tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise DataError(f"message {text!r} is not valid Unicode: give text in UTF-8") from None
        return tokens
