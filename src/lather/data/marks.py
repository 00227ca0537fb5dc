"""Changes messages, so that differences of renderings tell where they are in a text.

A mark is a private-use character, which stands for a part of one message of a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lather.data.conversations import REASONING, Messages, calls_of

FIRST_MARK = 0xF0000
"""The first of the marks, of which each message has `len(PARTS)`."""
MARKS = re.compile("[\U000f0000-\U000ffffd]")
PARTS = ("content", "reasoning", "tool_calls")


def parts_of(message: dict[str, Any]) -> list[str]:
    """Return the parts of a message that are not empty, of `PARTS`."""
    content = message.get("content")
    texts = content if isinstance(content, list) else [{"text": content}]
    there = {
        "content": any(_is_text(one.get("text")) for one in texts),
        "reasoning": any(_is_text(message.get(name)) for name in REASONING),
        "tool_calls": bool(calls_of(message)),
    }
    return [part for part in PARTS if there[part]]


def texts_of(message: dict[str, Any]) -> list[str]:
    """Return the content of a message without white space around it, and the names of its calls."""
    content = message.get("content")
    parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    names = [call.get("name") for call in calls_of(message)]
    return [text.strip() for text in (*parts, *names) if isinstance(text, str) and text.strip()]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def mark_of(number: int, part: str) -> str:
    return chr(FIRST_MARK + number * len(PARTS) + PARTS.index(part))


def put(messages: Messages, number: int, message: dict[str, Any]) -> Messages:
    return [*messages[:number], message, *messages[number + 1 :]]


def marked(message: dict[str, Any], number: int, parts: tuple[str, ...]) -> dict[str, Any]:
    """Return the message with marks at the start and end of its texts, inside their white space,
    because templates strip that, and after the names of its calls: one mark after the first name,
    two after the second, and so on, which tells what is shown (`shown_in`)."""

    def mark(text: Any, part: str) -> Any:
        if not _is_text(text):
            return text
        core, sign = text.strip(), mark_of(number, part)
        start = text.index(core)
        return text[:start] + sign + core + sign + text[start + len(core) :]

    sign = mark_of(number, "tool_calls")
    return _changed(message, parts, mark, lambda name, place: name + sign * (place + 1))


def shown_in(text: str, number: int, message: dict[str, Any], part: str) -> bool:
    """Tell whether the marks of a part of a message, and of each of its calls, are in a text."""
    sign = mark_of(number, part)
    if part != "tool_calls" or len(calls_of(message)) == 1:
        return sign in text
    runs = {len(run) for run in re.findall(f"{sign}+", text)}
    return runs >= set(range(1, len(calls_of(message)) + 1))


def replaced(message: dict[str, Any], number: int, parts: tuple[str, ...]) -> dict[str, Any]:
    """Return the message with a mark in place of its texts and of the names of its calls."""

    def replace(text: Any, part: str) -> Any:
        return mark_of(number, part) if isinstance(text, str) else text

    return _changed(message, parts, replace, lambda *_: mark_of(number, "tool_calls"))


def _changed(
    message: dict[str, Any],
    parts: tuple[str, ...],
    change: Callable[[Any, str], Any],
    rename: Callable[[str, int], str],
) -> dict[str, Any]:
    """Return the message with its texts and the names of its calls changed."""
    changed = dict(message)
    content = message.get("content")
    if "content" in parts and isinstance(content, list):
        texts = [change(part.get("text"), "content") for part in content]
        pairs = zip(content, texts, strict=True)
        changed["content"] = [{**part, "text": text} for part, text in pairs]
    elif "content" in parts and content is not None:
        changed["content"] = change(content, "content")
    if "reasoning" in parts:
        named = {name: message[name] for name in REASONING if message.get(name)}
        changed.update({name: change(text, "reasoning") for name, text in named.items()})
    if "tool_calls" in parts:
        for key in ("tool_calls", "function_call"):
            if message.get(key):
                changed[key] = _renamed(message[key], rename)
    return changed


def _renamed(calls: Any, rename: Callable[[str, int], str], place: int = 0) -> Any:
    """Return the calls with other names, which depend on the place of the call among them."""
    if isinstance(calls, list):
        return [_renamed(call, rename, place) for place, call in enumerate(calls)]
    if not isinstance(calls, dict):
        return calls
    changed = dict(calls)
    if isinstance(calls.get("function"), dict):
        changed["function"] = _renamed(calls["function"], rename, place)
    if isinstance(calls.get("name"), str):
        changed["name"] = rename(calls["name"], place)
    return changed


def with_one_call_less(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return copies of the message, each without one of its calls."""
    calls = message["tool_calls"]
    fewer = [calls[:number] + calls[number + 1 :] for number in range(len(calls))]
    return [{**message, "tool_calls": some} for some in fewer]


def common(one: str, two: str) -> int:
    """Return the length of the common beginning, by halves."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
