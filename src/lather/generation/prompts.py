"""Prompts: texts to continue and conversations to answer, read from files and encoded as tokens.

A conversation is encoded up to the start of the assistant's answer; its format also says what ends
the answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lather.data.chat import ChatTemplate
from lather.data.conversations import ChatError, Messages, Tools, messages_of, tools_of
from lather.data.hidden import Note
from lather.errors import DataError
from lather.files import read_text

Prompt = str | Messages
"""A text to continue, or a conversation to answer."""
PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Content of a probe message; no chat template changes this character."""


class Conversation(list[dict[str, Any]]):
    """Messages, with the tools that the assistant may call."""

    def __init__(self, messages: Messages, tools: Tools = None) -> None:
        super().__init__(messages)
        self.tools = tools


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file. Each line of a .jsonl file is an object with "prompt", "messages"
    or "conversations", and perhaps "tools"; each line of any other file is a text.

    Empty lines are skipped. Raises DataError, with the line number, for a line that is not a
    prompt, and for a file without prompts."""
    try:
        lines = read_text(path).split("\n")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"--prompts {path}: cannot be read ({reason}): give a .jsonl or text file"
        ) from None
    lines = [line.removeprefix("\ufeff") for line in lines]  # files with marks may be joined
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"--prompts {path}: it holds no prompt: give one on each line")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_of_line(line, f"--prompts {path}, line {number}") for number, line in numbered]


def _of_line(line: str, place: str) -> Prompt:
    remedy = "give an object with prompt or messages"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error}): {remedy}") from None
    record = record if isinstance(record, dict) else {}
    if isinstance(record.get("prompt"), str) and "completion" not in record:
        return str(record["prompt"])
    try:
        return Conversation(messages_of(record), tools_of(record))
    except ChatError as error:
        raise DataError(f"{place}: {error}: {remedy}") from None


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text. Raises DataError if it is not valid Unicode, or has no token."""
    tokens = _encode(tokenizer, text, "prompt")
    if not tokens:
        raise DataError(f"prompt {text!r} encodes to no token: give at least one character")
    return tokens


def _encode(tokenizer: Tokenizer, text: str, noun: str, **options: Any) -> list[int]:
    try:
        return tokenizer.encode(text, **options).ids
    except TypeError:
        raise DataError(f"{noun} {text!r} is not valid Unicode: give text in UTF-8") from None


class ConversationFormat:
    """Formats conversations with a tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Raises DataError if the template leaves out the assistant's messages."""
        self.template = template
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False  # templates write special tokens by name
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PLACE}]
        _, place, closing = self.text(probe, asking=False).rpartition(PLACE)
        if not place:
            raise DataError(
                "the chat template does not show the assistant's messages: give a tokenizer with "
                "another template"
            )
        closing = closing.strip()
        tokens = self._encode(closing)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        self.stop_tokens = frozenset(tokens[:1]) & special
        """The special token that the template writes after an answer, if there is one."""
        self.stop_texts = () if self.stop_tokens or not closing else (closing,)
        """The text that the template writes after an answer, if that is not a special token."""

    def _encode(self, text: str) -> list[int]:
        return _encode(self._tokenizer, text, "message", add_special_tokens=False)

    def prompt(self, messages: Messages) -> list[int]:
        """Encode a conversation and the template's beginning of an answer. Raises DataError if the
        template refuses the conversation."""
        return self._encode(self.text(messages))

    def notes(self, messages: Messages) -> list[Note]:
        """Return what the template does not show of the conversation: kind, detail. Raises
        DataError if the template refuses it."""
        with _refusals():
            return self.template.notes(*self._fitting(messages))

    def text(self, messages: Messages, *, asking: bool = True) -> str:
        """Format the conversation; `asking` adds the template's beginning of an answer. Raises
        DataError if the template refuses it."""
        with _refusals():
            fitting, tools = self._fitting(messages)
            return self.template.render(fitting, asking=asking, tools=tools)

    def _fitting(self, messages: Messages) -> tuple[Messages, Tools]:
        tools = messages.tools if isinstance(messages, Conversation) else None
        return self.template.fitting(messages, tools), tools


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except ChatError as error:
        raise DataError(f"the conversation cannot be written: {error}") from None
