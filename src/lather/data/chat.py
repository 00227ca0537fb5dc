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

import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError

from lather.data.answers import AnswerFinder
from lather.data.chat_program import NUMBERS, MarkedText, Program, Span, read_marks
from lather.data.conversations import REASONING, ChatError, Messages, Tools, calls_of
from lather.data.hidden import Note, hidden_parts, notes_of
from lather.errors import DataError
from lather.files import read_text
from lather.hub import TOOLS_TEMPLATE_FILE

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


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, source: str, special_tokens: dict[str, str], for_tools: str = "") -> None:
        """`special_tokens`: values of the variables for special tokens in templates, such as
        bos_token. `for_tools`: another template for conversations with tools; empty: there is
        none. Raises DataError if one is not a Jinja template."""
        self.source, self.special_tokens, self.for_tools = source, special_tokens, for_tools
        try:
            self._program = Program(source)
            self._program_for_tools = Program(for_tools) if for_tools else self._program
        except TemplateError as error:
            raise DataError(f"chat template: not a Jinja template ({error})") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.special_tokens, self.for_tools)

    @classmethod
    def beside(cls, tokenizer: Path) -> ChatTemplate:
        """Read the template in the folder of a tokenizer.json; ChatML if there is none. Raises
        DataError if it is damaged."""
        folder = tokenizer.parent
        config, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        older = folder / "special_tokens_map.json"
        place = config
        try:
            settings = json.loads(read_text(config)) if config.exists() else {}
            named = settings.get("chat_template") or CHATML
            if not isinstance(named, list):  # of templates with names
                named = [{"name": "default", "template": named}]
            sources = {template.get("name"): template["template"] for template in named}
            for name, path in (("tool_use", folder / TOOLS_TEMPLATE_FILE), ("default", file)):
                if path.exists():
                    place = path
                    sources[name] = read_text(path)
            source, for_tools = sources.get("default", CHATML), sources.get("tool_use", "")
            if not isinstance(source, str) or not isinstance(settings, dict):
                raise ValueError("no object with a chat template")
            place = older
            tokens = dict(json.loads(read_text(older))) if older.exists() else {}
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise DataError(f"{place}: not readable ({error}): restore it") from None
        return cls(source, _special_tokens(settings, tokens), for_tools)

    def render(self, messages: Messages, *, asking: bool = False, tools: Tools = None) -> str:
        """Return the text of the messages, as `apply_chat_template` of transformers does. `asking`
        adds the beginning of an answer (`add_generation_prompt`); `tools`: definitions of the
        tools that the assistant may call.

        Raises ChatError.
        """
        return self._written(self._program_for(tools).plain, messages, asking, tools)

    def _program_for(self, tools: Tools) -> Program:
        return self._program if tools is None else self._program_for_tools

    def _written(self, template: Template, messages: Messages, asking: bool, tools: Tools) -> str:
        given = [_plain(message) for message in messages]
        variables: dict[str, Any] = {
            "messages": given,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": asking,
            NUMBERS: {id(message): number for number, message in enumerate(given)},
        }
        try:
            return template.render(**variables, **self.special_tokens)
        except TemplateError as error:
            raise ChatError(f"the chat template refuses it: {error}") from None
        except Exception as error:  # a template is a program
            raise ChatError(f"the chat template fails on it: {error}") from None

    def format(self, messages: Messages, tools: Tools = None) -> Formatted:
        """Return the text of the messages, the assistant's answers that are learned, and notes.

        Raises ChatError if the template refuses the conversation, if there is no answer, or if
        renderings do not tell where an answer begins and ends.
        """
        program = self._program_for(tools)

        def render(messages: Messages, asking: bool) -> MarkedText:
            return read_marks(self._written(program.marked, messages, asking, tools))

        messages = self.fitting(messages, tools)
        text, rendered = self.render(messages, tools=tools), render(messages, False)
        if rendered.text != text:  # the template reads what it has written, with the marks
            rendered = MarkedText(text, {}, [])
        hidden = self._hidden(messages, tools, text)
        finder = AnswerFinder(render, messages, rendered, hidden, self.special_tokens)
        has_blocks = BLOCK.search(program.source)
        spans = finder.learned_of(rendered.blocks) if has_blocks else finder.answers()
        if not spans:
            raise ChatError(finder.why_nothing_is_learned())
        return Formatted(text, spans, self._notes(messages, tools, text, hidden))

    def notes(self, messages: Messages, tools: Tools = None) -> list[Note]:
        """Return what the template does not show of the messages and tools when it asks for an
        answer: kind, detail. Raises ChatError if the template refuses the conversation."""
        text = self.render(messages, asking=True, tools=tools)
        hidden = self._hidden(messages, tools, text, asking=True)
        return self._notes(messages, tools, self.render(messages, tools=tools), hidden)

    def _hidden(
        self, messages: Messages, tools: Tools, text: str, asking: bool = False
    ) -> dict[int, set[str]]:
        return hidden_parts(messages, text, lambda m: self.render(m, asking=asking, tools=tools))

    def _notes(
        self, messages: Messages, tools: Tools, text: str, hidden: dict[int, set[str]]
    ) -> list[Note]:
        notes = notes_of(messages, hidden)
        if tools and self._rendered(messages, None) == text:
            notes.append(("tools are not shown by the chat template", f"{len(tools)} tools"))
        return notes

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


def _special_tokens(settings: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that transformers gives to templates, by name: those in
    tokenizer_config.json, among them the named extra ones. `older`: special_tokens_map.json, which
    counts, and goes first, where the settings have no added_tokens_decoder."""
    given = settings if "added_tokens_decoder" in settings else {**settings, **older}
    values = {name: value for name, value in given.items() if name.endswith("_token")}
    if isinstance(extra := given.get("extra_special_tokens"), dict):
        values |= extra
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return {name: token for name, token in tokens.items() if isinstance(token, str) and token}


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
        forms.append([{**m, "content": ""} if m.get("content") is None else m for m in messages])
    for form in forms:
        if form is not messages:
            yield form
        with contextlib.suppress(ValueError, RecursionError):  # some are not JSON objects
            yield _with_arguments(form, _as_object)
        yield _with_arguments(form, _as_json)


def _with_arguments(messages: Messages, change: Callable[[Any], Any]) -> Messages:
    changed = copy.deepcopy(messages)
    for call in (call for message in changed for call in calls_of(message)):
        if "arguments" in call:
            call["arguments"] = change(call["arguments"])
    return changed


def _as_object(arguments: Any) -> Any:
    arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError
    return arguments


def _as_json(arguments: Any) -> Any:
    is_object = isinstance(arguments, dict)
    return json.dumps(arguments, ensure_ascii=False) if is_object else arguments
