"""Conversations as prompts: encodes a conversation, up to the start of the assistant's answer, and finds the marker that ends an answer."""

from __future__ import annotations

from tokenizers import Tokenizer

from lather.data.chat import ChatError, ChatTemplate, Messages
from lather.errors import DataError

PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Content of a probe message; no chat template changes this character."""


class ConversationFormat:
    """Formats conversations with a tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Raises DataError if the template leaves out the assistant's messages."""
        self.template = template
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False  # templates write special tokens by name
        closing = self._closing()
        tokens = self._encode(closing)
        special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        self.stop_tokens = frozenset(tokens[:1]) & special
        """The special token that the template writes after an answer, if there is one."""
        self.stop_texts = () if self.stop_tokens or not closing else (closing,)
        """The text that the template writes after an answer, if that is not a special token."""

    def prompt(self, messages: Messages) -> list[int]:
        """Encode a conversation and the template's beginning of an answer. Raises DataError if the template refuses the conversation."""
        return self._encode(self.text(messages))

    def text(self, messages: Messages, *, asking: bool = True) -> str:
        """Format the conversation; `asking` adds the template's beginning of an answer. Raises DataError if the template refuses it."""
        try:
            return self.template.render(messages, asking=asking)
        except ChatError as error:
            raise DataError(f"the conversation cannot be written: {error}") from None

    def _closing(self) -> str:
        """Find the text that the template writes after an answer, stripped of white space."""
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
