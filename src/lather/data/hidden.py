"""Finds the parts of messages that a chat template does not show: their contents, their reasoning
and the tools that they call."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from lather.data.chat_program import mark
from lather.data.conversations import REASONING, ChatError, Messages, calls_of, is_learned

Note = tuple[str, str]
"""A kind of notice, and where it is, such as the number of the message."""
Slot = tuple[int, str, int]
"""Number of a message, name of one of its parts, and number of the call, 0 in other parts."""
SLOT_MARK = re.compile(mark("[a-z_]+-[0-9]+-[0-9]+"))


def parts_of(message: dict[str, Any]) -> set[str]:
    """Return the parts of a message that are not empty."""
    return {part for _, part, _ in _slots_of(message, 0)}


def hidden_parts(
    messages: Messages, text: str, render: Callable[[Messages], str]
) -> dict[int, set[str]]:
    """Return the parts that the template does not show, by number of the message. `text`: the
    rendered messages. A part is hidden if a mark in it is not in the text, and if the text stays
    the same with a mark in its place."""

    def with_marks(slots: list[Slot], change: Callable[[str, str], str]) -> str:
        try:
            return render(_changed(messages, slots, change))
        except ChatError:
            return ""

    slots = [slot for number, message in enumerate(messages) for slot in _slots_of(message, number)]
    seen = set(SLOT_MARK.findall(with_marks(slots, _around)))
    unseen = [slot for slot in slots if _mark_of(slot) not in seen]
    if unseen and with_marks(unseen, _instead) != text:
        unseen = [slot for slot in unseen if with_marks([slot], _instead) == text]
    hidden: dict[int, set[str]] = {}
    for number, part, _ in unseen:
        hidden.setdefault(number, set()).add(part)
    return hidden


def notes_of(messages: Messages, hidden: dict[int, set[str]]) -> list[Note]:
    """Return what the template does not show, and marks that cannot be obeyed, each kind once with
    the first message. Raises ChatError if a mark of what is learned is not valid."""
    notes: dict[str, str] = {}
    for number, message in enumerate(messages):
        role, parts = message["role"], hidden.get(number, set())
        kinds = [
            f"{part} of role {role!r} {'are not all' if part == 'tool_calls' else 'is not'} shown "
            "by the chat template"
            for part in sorted(parts)
        ]
        if parts and parts == parts_of(message) and "tool_calls" not in parts:
            kinds = [f"messages of role {role!r} are not shown by the chat template"]
        if is_learned(message, number) and role != "assistant":
            kinds.append(f"a mark to learn role {role!r} is not obeyed")
        for kind in kinds:
            notes.setdefault(kind, f"message {number}")
    return list(notes.items())


def _texts_of(message: dict[str, Any], part: str) -> list[tuple[dict[str, Any], str]]:
    """Return where the texts of a part are, or the names of calls: objects, and their keys."""
    content: Any = message.get("content")
    if part == "content":
        is_list = isinstance(content, list)
        return [(item, "text") for item in content] if is_list else [(message, "content")]
    if part == "reasoning":
        return [(message, name) for name in REASONING]
    return [(call, "name") for call in calls_of(message)]


def _slots_of(message: dict[str, Any], number: int) -> list[Slot]:
    calls = [(number, "tool_calls", place) for place in range(len(calls_of(message)))]
    return [
        (number, part, 0)
        for part in ("content", "reasoning")
        if any(_is_text(holder.get(key)) for holder, key in _texts_of(message, part))
    ] + calls


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _mark_of(slot: Slot) -> str:
    number, part, place = slot
    return mark(f"{part}-{number}-{place}")


def _around(text: str, sign: str) -> str:
    """Put a mark at both ends of a text, inside its white space, because templates strip that."""
    core = text.strip()
    return text.replace(core, sign + core + sign, 1) if core else text


def _instead(_: str, sign: str) -> str:
    return sign


def _changed(messages: Messages, slots: list[Slot], change: Callable[[str, str], str]) -> Messages:
    """Return the messages with `change(text, mark)` in place of the texts of these slots and of the
    names of these calls."""
    changed = list(messages)
    for number in {number for number, _, _ in slots}:
        changed[number] = copy.deepcopy(messages[number])
    for slot in slots:
        number, part, place = slot
        texts = _texts_of(changed[number], part)
        for holder, key in texts[place : place + 1] if part == "tool_calls" else texts:
            if isinstance(holder.get(key), str):
                holder[key] = change(holder[key], _mark_of(slot))
    return changed
