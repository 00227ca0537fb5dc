"""Finds the places of messages in the text of a conversation, by changing them and rendering."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lather.data.conversations import ChatError, Messages
from lather.data.marks import (
    FIRST_MARK,
    MARKS,
    PARTS,
    common,
    marked,
    put,
    replaced,
    texts_of,
)

Render = Callable[[Messages, bool], str]
"""Renders messages; if the second argument is true, with the beginning of an answer after them.
Raises ChatError."""
WHOLE = r"<[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]"
"""Texts that stand for a token: two texts do not agree in a part of one."""


@dataclass(frozen=True)
class TextPlace:
    """Where a text depends on a message: from the first to the last character of its parts."""

    start: int
    stop: int
    marks: tuple[int, ...] = ()
    """Where its marks are, if it was found by these. A template may write the name of a call before
    the call's result as well."""


def _place_of(marks: list[int]) -> TextPlace:
    return TextPlace(marks[0], marks[-1], tuple(marks))


class RenderedMessages:
    """Messages, their text, and where each of them is in it."""

    def __init__(
        self,
        render: Render,
        messages: Messages,
        text: str,
        special_tokens: dict[str, str],
    ) -> None:
        """`text`: the rendered messages."""
        self._render, self._messages, self._text = render, messages, text
        self._special_tokens = special_tokens
        names = [re.escape(token) for token in sorted(special_tokens.values(), key=len)[::-1]]
        self._whole = re.compile("|".join([*names, WHOLE]))
        self._places: dict[int, TextPlace | None] = {}

    def _is_same_with(self, number: int, message: dict[str, Any]) -> bool:
        return self._try(put(self._messages, number, message)) == self._text

    @cached_property
    def _marked(self) -> tuple[str, bool]:
        """The text with marks in all messages, and whether it is the same without them."""
        messages = enumerate(self._messages)
        text = self._try([marked(message, number, PARTS) for number, message in messages])
        if text is None or MARKS.search(self._text):
            return "", False
        return text, MARKS.sub("", text) == self._text

    @cached_property
    def _all_places(self) -> dict[int, TextPlace]:
        """The places of the messages in the text by their marks; none if marks change it."""
        text, clean = self._marked
        marks: dict[int, list[int]] = {}
        for before, found in enumerate(MARKS.finditer(text) if clean else ()):
            number = (ord(found.group()) - FIRST_MARK) // len(PARTS)
            marks.setdefault(number, []).append(found.start() - before)
        return {number: _place_of(places) for number, places in marks.items()}

    @cached_property
    def _likely_places(self) -> dict[int, TextPlace]:
        """The places by their marks; if marks change the text, the places where the messages'
        texts are found one after the other."""
        _, clean = self._marked
        places, place = dict(self._all_places), 0
        for number, message in enumerate(() if clean else self._messages):
            ends: list[int] = []
            for text in texts_of(message):
                found = self._text.find(text, place)
                if found >= 0:
                    place = found + len(text)
                    ends += [found, place]
            if ends:
                places[number] = TextPlace(ends[0], ends[-1])
        return places

    def _place(self, number: int) -> TextPlace | None:
        """Return the place of a message in the text; None if it is not shown."""
        if number not in self._places:
            found = self._all_places.get(number)
            self._places[number] = found or self._place_in(self._text, self._messages, number)
        return self._places[number]

    def _place_in(
        self,
        text: str,
        messages: Messages,
        number: int,
        asking: bool = False,
    ) -> TextPlace | None:
        """Return the place of a message in the text of some messages, by changing the message."""
        other = self._try(put(messages, number, marked(messages[number], number, PARTS)), asking)
        if other is not None and MARKS.sub("", other) == text:
            found = [match.start() - before for before, match in enumerate(MARKS.finditer(other))]
            if found:
                return _place_of(found)
        other = self._try(put(messages, number, replaced(messages[number], number, PARTS)), asking)
        if other is None or other == text:
            return None
        start = common(text, other)
        most = min(len(text), len(other)) - start
        return TextPlace(start, len(text) - min(most, common(text[::-1], other[::-1])))

    def _agreed(self, one: str, text: str, place: int) -> int:
        """Return how many characters of `one` are in the text at this place, without a part of a
        token."""
        agreed, other = common(one, text[place : place + len(one)]), text[place:]
        for side in (one, other[: agreed + 100]):
            for match in self._whole.finditer(side):
                if match.start() < agreed < match.end():
                    agreed = match.start()
        return agreed

    def _agreed_before(self, one: str, other: str) -> int:
        """Return how many last characters two texts have in common, without a part of a token."""
        agreed = common(one[::-1], other[::-1])
        for side in (one, other):
            for match in self._whole.finditer(side, max(0, len(side) - agreed - 100)):
                if match.start() < len(side) - agreed < match.end():
                    agreed = len(side) - match.end()
        return agreed

    def _try(self, messages: Messages, asking: bool = False) -> str | None:
        try:
            return self._render(messages, asking)
        except ChatError:
            return None
