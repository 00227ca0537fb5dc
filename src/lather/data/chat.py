"""Formats conversations as text with the tokenizer's own chat template, and finds the assistant's answers in the text.

As in transformers, a template is a Jinja program, either `chat_template` in tokenizer_config.json or a file chat_template.jinja beside it,
and it runs in a sandbox. An answer is the text that the template adds for an assistant's message. Its beginning, which the template also
writes to ask for an answer (`add_generation_prompt`), is not trained on.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lather.errors import DataError
from lather.files import read_text

Messages = list[dict[str, Any]]
Tools = list[Any] | None
MOST_CHARACTERS, MOST_MESSAGES = 1 << 24, 2000
"""Longer conversations are skipped, because a conversation is encoded as a whole and rendered once for each answer."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The ChatML template, for tokenizers without a template of their own."""
FIRST_MARK = 0xF0000
"""The mark of the first message: the first private-use character of a range with more characters than `MOST_MESSAGES`."""
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""Names of roles in published data sets, and their standard names."""


class ChatError(Exception):
    """The record is not a conversation; the message says why."""


def messages_of(record: dict[str, Any]) -> Messages:
    """Read the messages of a record: a list "messages" or "conversations" of objects with role and content (or from and value), or the
    fields "prompt" and "completion".

    Raises ChatError.
    """
    for name in ("messages", "conversations"):
        if record.get(name) is not None:  # in a table, rows without a field have a null
            if not isinstance(record[name], list) or not record[name]:
                raise ChatError(f"{name} is not a list of messages")
            return [_message(one, number) for number, one in enumerate(record[name])]
    if "prompt" in record and "completion" in record:
        parts = [_part(record[name], name, role) for name, role in (("prompt", "user"), ("completion", "assistant"))]
        return [_message(one, number) for number, one in enumerate([*parts[0], *parts[1]])]
    raise ChatError(f"neither messages nor prompt and completion, but {', '.join(map(str, record)) or 'nothing'}")


def tools_of(record: dict[str, Any]) -> Tools:
    """Read the tools of a record, given as a list or as JSON. Raises ChatError."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ChatError(f"tools is not JSON: {error}") from None
    if tools and not isinstance(tools, list):
        raise ChatError(f"tools is {type(tools).__name__}, not a list")
    return tools or None


def _part(value: Any, name: str, role: str) -> list[Any]:
    """Return the messages of a prompt or completion, which is either the text of one message or a list of messages."""
    if not isinstance(value, str | list):
        raise ChatError(f"{name} is {type(value).__name__}, not text")
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _message(one: Any, number: int) -> dict[str, Any]:
    if not isinstance(one, dict):
        raise ChatError(f"message {number} is not an object")
    message = dict(one)
    if "role" not in message and "from" in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", None)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ChatError(f"message {number} has no role")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ChatError(f"message {number} has no text as content")
    return {**message, "role": ROLES.get(role, role)}


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """`special_tokens`: values of the variables for special tokens in templates, such as bos_token. Raises DataError if `source` is not
        a Jinja template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise
        # data sets must not depend on the date
        environment.globals["strftime_now"] = datetime.datetime(2025, 1, 1).strftime
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(f"chat template: not a Jinja template ({error})") from None
        self.source, self.special_tokens = source, special_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.special_tokens)

    @classmethod
    def beside(cls, tokenizer: Path) -> ChatTemplate:
        """Read the template in the folder of a tokenizer.json; ChatML if there is none. Raises DataError if it is damaged."""
        file, config = tokenizer.parent / "chat_template.jinja", tokenizer.parent / "tokenizer_config.json"
        place = config
        try:
            settings = json.loads(read_text(config)) if config.exists() else {}
            source = settings.get("chat_template") or CHATML
            if file.exists():
                place = file
                source = read_text(file)
            if isinstance(source, list):  # a list of named templates
                source = next((one["template"] for one in source if one.get("name") == "default"), CHATML)
            if not isinstance(source, str) or not isinstance(settings, dict):
                raise ValueError("no object with a chat template")
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise DataError(f"{place}: not readable ({error}): restore it") from None
        named = {name: value for name, value in settings.items() if name.endswith("_token")}
        tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
        return cls(source, {name: token for name, token in tokens.items() if token and isinstance(token, str)})

    def render(self, messages: Messages, *, asking: bool = False, tools: Tools = None) -> str:
        """Return the text of the messages. `asking` adds the beginning of an answer, as `add_generation_prompt` does; `tools`: definitions
        of the tools that the assistant may call.

        Raises ChatError.
        """
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=asking, tools=tools, **self.special_tokens))
        except TemplateError as error:
            raise ChatError(f"the chat template refuses it: {error}") from None
        except Exception as error:  # a template is a program
            raise ChatError(f"the chat template fails on it: {error}") from None

    def answers(self, messages: Messages, tools: Tools = None) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the messages, and the ranges of the assistant's answers in it, each including the template's end of an answer.

        The ends of contents are found by rendering the messages with a mark after each content. An answer starts after the end of the
        message before it and after the template's beginning of an answer, as far as the text contains that. Raises ChatError if there is no
        answer, or if the template leaves out messages.
        """
        text = self.render(messages, tools=tools)
        ends, spans = self._content_ends(text, messages, tools), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not isinstance(message.get("content"), str):
                continue
            if number not in ends:
                raise ChatError(f"the chat template does not show message {number}")
            start = self._end(text, messages, number - 1, ends, tools)
            start += _agreement(self._asked(messages[:number], tools), text[start:])
            spans.append((start, self._end(text, messages, number, ends, tools)))
        if not spans:
            raise ChatError("no message is the assistant's")
        return text, spans

    def _content_ends(self, text: str, messages: Messages, tools: Tools) -> dict[int, int]:
        """Return the end of each message's content in the text, without messages that the template leaves out. Raises ChatError if marks
        change the text."""
        marked, ends = self.render(_marked(messages), tools=tools), {}
        for number in range(len(messages)):
            place = marked.find(chr(FIRST_MARK + number))
            if place >= 0:
                ends[number] = place
                marked = marked[:place] + marked[place + 1 :]
        if marked != text:
            raise ChatError("the chat template changes the contents of messages")
        return ends

    def _end(self, text: str, messages: Messages, number: int, ends: dict[int, int], tools: Tools) -> int:
        """Return the end of a message in the text, including the text that the template writes after a last message."""
        if number not in ends:
            return max((end for other, end in ends.items() if other < number), default=0)
        closing = self.render(_marked(messages[: number + 1]), tools=tools).rpartition(chr(FIRST_MARK + number))[2]
        return ends[number] + _agreement(closing, text[ends[number] :])

    def _asked(self, messages: Messages, tools: Tools) -> str:
        """Return the beginning of an answer that the template writes after these messages."""
        if not messages:
            return ""
        before, asking = self.render(messages, tools=tools), self.render(messages, asking=True, tools=tools)
        return asking.removeprefix(before) if asking.startswith(before) else ""


def _marked(messages: Messages) -> Messages:
    """Add a different mark to each content, before its trailing white space, because templates may strip that."""
    marked = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            kept = content.rstrip()
            content = kept + chr(FIRST_MARK + number) + content[len(kept) :]
        marked.append({**message, "content": content})
    return marked


def _agreement(one: str, two: str) -> int:
    """Return the length of the common prefix."""
    return next((number for number, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), min(len(one), len(two)))


def _raise(message: str) -> None:
    raise TemplateError(message)
