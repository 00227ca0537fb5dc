"""Formats conversations as text with the tokenizer's own chat template, and finds the assistant's
answers in the text.

As in transformers, a template is a Jinja program, either `chat_template` in tokenizer_config.json
or a file chat_template.jinja beside it, and it runs in a sandbox, with the same filters, functions
and variables. An answer is what the template writes for an assistant's message, after the
beginning that it also writes to ask for an answer (`add_generation_prompt`). A template may mark
what is learned by `{% generation %}` blocks; otherwise differences of renderings tell
(`lather.data.answers`).
"""

from __future__ import annotations

import copy
import datetime
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lather.data.answers import AnswerFinder, Note, Span
from lather.data.conversations import (
    REASONING,
    ChatError,
    Messages,
    Tools,
    calls_of,
    messages_of,
    tools_of,
)
from lather.errors import DataError
from lather.files import read_text

__all__ = ["CHATML", "ChatError", "ChatTemplate", "Messages", "Tools", "messages_of", "tools_of"]
MOST_CHARACTERS, MOST_MESSAGES = 1 << 24, 2000
"""Longer conversations are skipped, because a conversation is encoded as a whole."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The ChatML template, for tokenizers without a template of their own."""
BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The beginning of a block of generated text, as transformers recognizes it."""


@dataclass(frozen=True)
class Formatted:
    """The text of a conversation."""

    text: str
    answers: list[Span]
    """Ranges of characters that are learned, as (start, stop)."""
    notes: list[Note]
    """Parts that the template does not show, and marks that are not obeyed: kind, detail."""


class _GenerationBlocks(Extension):
    """Notes what `{% generation %}` blocks write, and at which character of the text."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.tags = {"generation"}
        environment.extend(recording=self.recording)
        self._written: list[str] | None = None
        self._blocks: list[tuple[int, str]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text = caller()
        if self._written is not None:
            self._blocks.append((sum(map(len, self._written)), str(text)))
        return text

    @contextmanager
    def recording(self) -> Iterator[tuple[list[str], list[tuple[int, str]]]]:
        """Give a list to which the caller adds the pieces of text as they are written, and the
        list of blocks, each its place and its text."""
        self._written, self._blocks = [], []
        try:
            yield self._written, self._blocks
        finally:
            self._written = None


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, source: str, special_tokens: dict[str, str], for_tools: str = "") -> None:
        """`special_tokens`: values of the variables for special tokens in templates, such as
        bos_token. `for_tools`: another template for conversations with tools; empty: there is
        none. Raises DataError if one is not a Jinja template."""
        self.source, self.special_tokens, self.for_tools = source, special_tokens, for_tools
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
            self._tools_template = self._environment.from_string(for_tools or source)
        except TemplateError as error:
            raise DataError(f"chat template: not a Jinja template ({error})") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.special_tokens, self.for_tools)

    @classmethod
    def beside(cls, tokenizer: Path) -> ChatTemplate:
        """Read the template in the folder of a tokenizer.json; ChatML if there is none. Raises
        DataError if it is damaged."""
        file = tokenizer.parent / "chat_template.jinja"
        config = tokenizer.parent / "tokenizer_config.json"
        tools_file = tokenizer.parent / "additional_chat_templates" / "tool_use.jinja"
        place, for_tools = config, ""
        try:
            settings = json.loads(read_text(config)) if config.exists() else {}
            source = settings.get("chat_template") or CHATML
            if tools_file.exists():
                place = tools_file
                for_tools = read_text(tools_file)
            if file.exists():
                place = file
                source = read_text(file)
            if isinstance(source, list):  # a list of named templates
                named = {one.get("name"): one for one in source}
                for_tools = named["tool_use"]["template"] if "tool_use" in named else for_tools
                source = named["default"]["template"] if "default" in named else CHATML
            if not isinstance(source, str) or not isinstance(settings, dict):
                raise ValueError("no object with a chat template")
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise DataError(f"{place}: not readable ({error}): restore it") from None
        tokens = {}
        for name, value in settings.items():
            token = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token, str) and token:
                tokens[name] = token
        return cls(source, tokens, for_tools)

    def render(self, messages: Messages, *, asking: bool = False, tools: Tools = None) -> str:
        """Return the text of the messages, as `apply_chat_template` of transformers does. `asking`
        adds the beginning of an answer (`add_generation_prompt`); `tools`: definitions of the
        tools that the assistant may call.

        Raises ChatError.
        """
        return "".join(self._pieces(messages, asking, tools))

    def _pieces(self, messages: Messages, asking: bool, tools: Tools) -> Iterator[str]:
        template = self._tools_template if tools is not None else self._template
        try:
            yield from template.generate(
                messages=[_plain(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=asking,
                **self.special_tokens,
            )
        except TemplateError as error:
            raise ChatError(f"the chat template refuses it: {error}") from None
        except Exception as error:  # a template is a program
            raise ChatError(f"the chat template fails on it: {error}") from None

    def answers(self, messages: Messages, tools: Tools = None) -> tuple[str, list[Span]]:
        """Return the text of the messages, and the ranges of the assistant's answers in it, each
        including the template's end of an answer. Raises ChatError, as `format` does."""
        formatted = self.format(messages, tools)
        return formatted.text, formatted.answers

    def format(self, messages: Messages, tools: Tools = None) -> Formatted:
        """Return the text of the messages, the assistant's answers that are learned, and notes.

        Raises ChatError if the template refuses the conversation, if there is no answer, or if
        renderings do not tell where an answer begins and ends.
        """
        messages = self.fitting(messages, tools)
        text, blocks = self._with_blocks(messages, tools)
        finder = self._finder(messages, tools, text)
        spans = finder.answers() if blocks is None else finder.learned_of(blocks)
        if not spans:
            raise ChatError(finder.why_nothing_is_learned())
        return Formatted(text, spans, self._notes(finder, messages, tools))

    def notes(self, messages: Messages, tools: Tools = None, asking: bool = False) -> list[Note]:
        """Return what the template does not show of the messages and tools: kind, detail. Raises
        ChatError if the template refuses the conversation."""
        text = self.render(messages, asking=asking, tools=tools)
        return self._notes(self._finder(messages, tools, text, asking), messages, tools)

    def _notes(self, finder: AnswerFinder, messages: Messages, tools: Tools) -> list[Note]:
        notes = finder.notes()
        if tools and self._rendered(messages, tools) == self._rendered(messages, None):
            notes.append(("tools are not shown by the chat template", f"{len(tools)} tools"))
        return notes

    def _finder(
        self,
        messages: Messages,
        tools: Tools,
        text: str,
        asking: bool = False,
    ) -> AnswerFinder:
        def render(messages: Messages, is_asked: bool) -> str:
            return self.render(messages, asking=is_asked or asking, tools=tools)

        return AnswerFinder(render, messages, text, self.special_tokens)

    def _with_blocks(self, messages: Messages, tools: Tools) -> tuple[str, list[Span] | None]:
        """Return the text, and the ranges that the template's `{% generation %}` blocks wrote;
        None if it has no such blocks, or has them in macros, where their places are not known."""
        source = self.for_tools if tools is not None and self.for_tools else self.source
        if not BLOCK.search(source):
            return self.render(messages, tools=tools), None
        with self._environment.recording() as (written, blocks):  # type: ignore[attr-defined]
            for piece in self._pieces(messages, False, tools):
                written.append(piece)
        text = "".join(written)
        if any(not text.startswith(block, start) for start, block in blocks):
            return text, None
        return text, [(start, start + len(block)) for start, block in blocks if block]

    # --- what templates are given ---------------------------------------------------------------

    def fitting(self, messages: Messages, tools: Tools = None) -> Messages:
        """Return the messages with contents and arguments of calls as the template shows them
        rightly.

        Arguments are objects or JSON in a string. They stay as they are, unless the template would
        put the string into quotes once more, shows the object as Python does, or fails. An absent
        content becomes empty if the template fails without it. Raises ChatError if the template
        shows a list of text parts as Python does.
        """
        contents = [message.get("content") for message in messages]
        lists = [number for number, content in enumerate(contents) if isinstance(content, list)]
        if not (lists or None in contents or any(calls_of(message) for message in messages)):
            return messages
        text = self._rendered(messages, tools)
        if text is None or _shows_wrongly(text, messages):
            for other in _other_forms(messages, None in contents and text is None):
                changed = self._rendered(other, tools)
                if changed is not None and not _shows_wrongly(changed, other):
                    messages, text = other, changed
                    break
        for number in lists:
            if text is not None and repr(messages[number]["content"]) in text:
                where = f"as message {number} has"
                raise ChatError(f"the chat template shows no list of parts, {where}: give text")
        return messages

    def _rendered(self, messages: Messages, tools: Tools) -> str | None:
        try:
            return self.render(messages, tools=tools)
        except ChatError:
            return None


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as transformers gives it to templates: without the keys that are null,
    and with its reasoning under the names that templates read."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _shows_wrongly(text: str, messages: Messages) -> bool:
    """Tell whether the arguments of a call are in the text as a string that is quoted once more,
    or as Python shows an object."""
    for message in messages:
        for call in calls_of(message):
            arguments = call.get("arguments")
            if isinstance(arguments, str) and arguments:
                quoted = (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False))
                if any(form in text for form in quoted):
                    return True
            elif isinstance(arguments, dict) and arguments and repr(arguments) in text:
                return repr(arguments) != json.dumps(arguments, ensure_ascii=False)
    return False


def _other_forms(messages: Messages, fill: bool) -> Iterator[Messages]:
    """Yield the messages with the arguments of all calls as objects, and as JSON. `fill`: then the
    same with empty contents where there are none."""
    forms = [messages]
    if fill:
        empty = {"content": ""}
        forms.append([one if one.get("content") is not None else one | empty for one in messages])
    for form in forms:
        if form is not messages:
            yield form
        if (objects := _with_objects(form)) is not None:
            yield objects
        yield _with_strings(form)


def _with_objects(messages: Messages) -> Messages | None:
    """Return the messages with all arguments as objects; None if some are not JSON objects."""
    changed = copy.deepcopy(messages)
    for message in changed:
        for call in calls_of(message):
            if isinstance(call.get("arguments"), str):
                try:
                    call["arguments"] = json.loads(call["arguments"] or "{}")
                except (ValueError, RecursionError):
                    return None
                if not isinstance(call["arguments"], dict):
                    return None
    return changed


def _with_strings(messages: Messages) -> Messages:
    """Return the messages with all arguments as JSON."""
    changed = copy.deepcopy(messages)
    for message in changed:
        for call in calls_of(message):
            if isinstance(call.get("arguments"), dict):
                call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    return changed


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja's sandbox with the filters and functions that transformers gives templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    # data sets must not depend on the date
    environment.globals["strftime_now"] = datetime.datetime(2025, 1, 1).strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)
