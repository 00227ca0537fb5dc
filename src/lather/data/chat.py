"""Conversations to text, by the tokenizer's own chat template, and which of the text is an answer.

A template is a Jinja program in `chat_template` of a tokenizer_config.json, or a file chat_template.jinja beside it, as transformers has
them. It is run in a sandbox, as there. What the template adds with an assistant's message, when the messages are given to it one more at a
time, is that assistant's answer; of it the part after what the template asks the assistant with (`add_generation_prompt`) is learned.
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

Messages = list[dict[str, Any]]
Tools = list[Any] | None
MOST_CHARACTERS, MOST_MESSAGES = 1 << 24, 2000
"""A longer conversation is not taken: it is encoded as a whole, and rendered once for each answer."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The ChatML template, for tokenizers that bring none."""
FIRST_MARK = 0xF0000
"""The mark of the first message: a character for private use, of which there are more here than messages that are taken."""
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""Names that collections of conversations give to roles."""


class ChatError(Exception):
    """A record that is no conversation; the message says why."""


def messages_of(record: dict[str, Any]) -> Messages:
    """The messages of a record: "messages" or "conversations", lists of role and content (or from and value), or "prompt" and "completion".

    Raises ChatError.
    """
    for name in ("messages", "conversations"):
        if name in record:
            if not isinstance(record[name], list) or not record[name]:
                raise ChatError(f"{name} is not a list of messages")
            return [_message(one, number) for number, one in enumerate(record[name])]
    if "prompt" in record and "completion" in record:
        parts = [_part(record[name], name, role) for name, role in (("prompt", "user"), ("completion", "assistant"))]
        return [_message(one, number) for number, one in enumerate([*parts[0], *parts[1]])]
    raise ChatError(f"neither messages nor prompt and completion, but {', '.join(map(str, record)) or 'nothing'}")


def tools_of(record: dict[str, Any]) -> Tools:
    """The tools of a record, as a list or as JSON. Raises ChatError."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ChatError(f"tools is no JSON: {error}") from None
    if tools and not isinstance(tools, list):
        raise ChatError(f"tools is {type(tools).__name__}, not a list")
    return tools or None


def _part(value: Any, name: str, role: str) -> list[Any]:
    """The messages of a prompt or completion, which is one message's text or a list of messages."""
    if not isinstance(value, str | list):
        raise ChatError(f"{name} is {type(value).__name__}, not text")
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _message(one: Any, number: int) -> dict[str, Any]:
    if not isinstance(one, dict):
        raise ChatError(f"message {number} is no object")
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
        """`special_tokens`: those that templates name, such as bos_token. Raises DataError if it is no Jinja template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime(2025, 1, 1).strftime(form)  # the same text at any time
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(f"chat template: not a Jinja template ({error})") from None
        self.source, self.special_tokens = source, special_tokens

    @classmethod
    def beside(cls, tokenizer: Path) -> ChatTemplate:
        """The template in the folder of a tokenizer.json; ChatML if there is none. Raises DataError if it is damaged."""
        file, config = tokenizer.parent / "chat_template.jinja", tokenizer.parent / "tokenizer_config.json"
        try:
            settings = json.loads(config.read_text("utf-8")) if config.exists() else {}
            source = file.read_text("utf-8") if file.exists() else settings.get("chat_template") or CHATML
            if isinstance(source, list):  # several by name
                source = next((one["template"] for one in source if one.get("name") == "default"), CHATML)
            if not isinstance(source, str) or not isinstance(settings, dict):
                raise ValueError("no object with a chat template")
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise DataError(f"{config}: not readable ({error}): restore it") from None
        tokens = {name: _token(value) for name, value in settings.items() if name.endswith("_token") and value}
        return cls(source, {name: token for name, token in tokens.items() if token})

    def render(self, messages: Messages, *, asking: bool = False, tools: Tools = None) -> str:
        """The text of the messages; `asking`: with what asks the assistant for an answer; `tools`: those that the assistant is told of.

        Raises ChatError.
        """
        try:
            text = self._template.render(messages=messages, add_generation_prompt=asking, tools=tools, **self.special_tokens)
            return str(text)
        except TemplateError as error:
            raise ChatError(f"the chat template refuses it: {error}") from None
        except Exception as error:  # a template is a program
            raise ChatError(f"the chat template fails on it: {error}") from None

    def answers(self, messages: Messages, tools: Tools = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of the messages, and from where to where in it the assistant's answers are, each with what ends it.

        Where contents end is found by marks after them. An answer begins after what ends the message before it and, as far as the text has
        it, what the template asks the assistant with. Raises ChatError if there is no answer, or the template does not show the messages.
        """
        text, ends = self.render(messages, tools=tools), self._content_ends(messages, tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not isinstance(message["content"], str):
                continue
            if number not in ends:
                raise ChatError(f"the chat template does not show message {number}")
            start = self._end(text, messages, number - 1, ends, tools)
            start += _agreement(self._asked(messages[:number], tools), text[start:])
            spans.append((start, self._end(text, messages, number, ends, tools)))
        if not spans:
            raise ChatError("no message is the assistant's")
        return text, spans

    def _content_ends(self, messages: Messages, tools: Tools) -> dict[int, int]:
        """Where in the text the content of each message ends that is shown. Raises ChatError if marks change the text."""
        marked, ends = self.render(_marked(messages), tools=tools), {}
        for number in range(len(messages)):
            place = marked.find(chr(FIRST_MARK + number))
            if place >= 0:
                ends[number] = place
                marked = marked[:place] + marked[place + 1 :]
        if marked != self.render(messages, tools=tools):
            raise ChatError("the chat template shows contents otherwise than they are")
        return ends

    def _end(self, text: str, messages: Messages, number: int, ends: dict[int, int], tools: Tools) -> int:
        """Where a message ends, with what the template puts after it when it is the last one."""
        if number not in ends:
            return max((end for other, end in ends.items() if other < number), default=0)
        closing = self.render(_marked(messages[: number + 1]), tools=tools).rpartition(chr(FIRST_MARK + number))[2]
        return ends[number] + _agreement(closing, text[ends[number] :])

    def _asked(self, messages: Messages, tools: Tools) -> str:
        """The text with which the template asks the assistant after these messages."""
        if not messages:
            return ""
        before, asking = self.render(messages, tools=tools), self.render(messages, asking=True, tools=tools)
        return asking.removeprefix(before) if asking.startswith(before) else ""


def _marked(messages: Messages) -> Messages:
    """With a mark of its own after each content, but before the white space that it ends with, which templates may drop."""
    marked = []
    for number, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str):
            kept = content.rstrip()
            content = kept + chr(FIRST_MARK + number) + content[len(kept) :]
        marked.append({**message, "content": content})
    return marked


def _agreement(one: str, two: str) -> int:
    """How many characters at the beginning are the same."""
    return next((number for number, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), min(len(one), len(two)))


def _token(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _raise(message: str) -> None:
    raise TemplateError(message)
