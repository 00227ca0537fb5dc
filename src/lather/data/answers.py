"""Finds the assistant's answers in the text of a conversation by differences of renderings.

T is the text of all messages. For the answer in message i, P is the text of the messages before it
with the template's beginning of an answer, and E that of the messages up to it. As a rule both are
beginnings of T: the answer is T[len(P):len(E)]. Some templates write earlier messages otherwise
once others follow (they remove reasoning, or put tools into the last question), or close the last
message otherwise. P and E then agree with T only near the answer. The place of a message in a text
is found by changing the message, and what P has after the message before, and E after the message
itself, is looked up in T at the same place. If that does not tell, messages are left out. If
nothing tells, the conversation is refused: a wrong mask is worse than none.

A long conversation is rendered once with a mark in every message. Where the text around an answer
is the same as around earlier ones, which were found as above, the answer is taken to be alike, so
that time stays in proportion to the number of messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import cached_property
from typing import Any

from lather.data.conversations import ChatError, Messages, is_learned
from lather.data.marks import (
    MARKS,
    mark_of,
    marked,
    parts_of,
    replaced,
    shown_in,
    with_one_call_less,
)
from lather.data.places import Render, RenderedMessages, TextPlace

Span = tuple[int, int]
Note = tuple[str, str]
"""A thing that was noticed, which is counted, and where, such as the number of the message."""
Known = dict[Hashable, Counter[tuple[str, str, str]]]
"""Beginnings and endings of answers and what follows them, each with its number, by kind."""
LONG = 32
"""In conversations of more messages, answers are taken to be like earlier ones around which the
text is the same."""
ALIKE = 2
"""Answers that are found exactly before others are taken to be like them."""


def without(spans: list[Span], others: list[Span]) -> list[Span]:
    """Return the parts of the spans that lie outside `others`."""
    for start, stop in others:
        cut = [(max(low, stop), high) for low, high in spans if high > stop]
        spans = sorted([(low, min(high, start)) for low, high in spans if low < start] + cut)
    return spans


def _is_in(place: TextPlace | None, span: Span) -> bool:
    return place is not None and span[0] <= place.start <= place.stop <= span[1]


class AnswerFinder(RenderedMessages):
    """The answers in the text of one conversation."""

    def __init__(
        self,
        render: Render,
        messages: Messages,
        text: str,
        special_tokens: dict[str, str],
    ) -> None:
        """`text`: the rendered messages. Raises ChatError if marks of messages are not valid."""
        super().__init__(render, messages, text, special_tokens)
        self._marks = [is_learned(message, number) for number, message in enumerate(messages)]
        self._found: dict[int, Span] = {}

    # --- which answers are learned --------------------------------------------------------------

    def answers(self) -> list[Span]:
        """Return the learned answers. Raises ChatError if renderings do not tell where one is."""
        known: Known = {}
        for number in self._answered:
            is_hidden = set(parts_of(self._messages[number])) == self._hidden.get(number)
            if is_hidden and "content" in self._hidden[number] and self._is_learned(number):
                raise ChatError(f"the chat template does not show message {number}")
        numbers = [number for number in self._answered if self._is_learned(number)]
        spans = [self._alike(number, known) or self._find(number) for number in numbers]
        return [(start, stop) for start, stop in spans if start < stop]

    def learned_of(self, blocks: list[Span]) -> list[Span]:
        """Return what is learned of the blocks that the template marks: not the answers that are
        shown but not learned, each with the beginning that the template writes for it. Raises
        ChatError if renderings do not tell where one is."""
        learned = {number for number in self._answered if self._is_learned(number)}
        places = self._all_places
        for number in self._answered:
            if number in learned:
                continue
            own = [block for block in blocks if _is_in(places.get(number), block)]
            if own and not any(_is_in(places.get(other), own[0]) for other in learned):
                blocks = [block for block in blocks if block != own[0]]
            elif self._is_written(number):
                blocks = without(blocks, [self._with_beginning(number)])
        return blocks

    def _is_written(self, number: int) -> bool:
        """Tell whether the template writes anything for a message, be it empty."""
        if self._place(number):
            return True
        others = [*self._messages[:number], *self._messages[number + 1 :]]
        return self._try(others) != self._text

    def _with_beginning(self, number: int) -> Span:
        start, stop = self._find(number)
        before = self._try(self._messages[:number]) if number else ""
        is_start = before is not None and self._text.startswith(before)
        return (min(start, len(before or "")) if is_start else start), stop

    def why_nothing_is_learned(self) -> str:
        """Return the reason why there is no learned answer."""
        if not self._answered:
            return "no message is the assistant's"
        if not any(self._is_learned(number) for number in self._answered):
            if all(self._marks[number] is False for number in self._answered):
                return "every answer is marked as not learned"
            return "the chat template shows neither calls of tools nor other answers"
        return "the chat template writes nothing for the answers, or marks nothing as generated"

    @property
    def _answered(self) -> list[int]:
        return [n for n, message in enumerate(self._messages) if message["role"] == "assistant"]

    def _is_learned(self, number: int) -> bool:
        """Tell whether an answer is learned: unless it is marked otherwise, or the template does
        not show the tools that it calls, or the reasoning that is all it has. It would be another
        answer without them."""
        hidden = self._hidden.get(number, set())
        is_empty = hidden == {"reasoning"} == set(parts_of(self._messages[number]))
        return self._marks[number] is not False and "tool_calls" not in hidden and not is_empty

    def notes(self) -> list[Note]:
        """Return what the template does not show, and marks that cannot be obeyed, each kind once
        with the first message."""
        notes: dict[str, str] = {}
        for number, message in enumerate(self._messages):
            role, hidden = message["role"], self._hidden.get(number, set())
            if hidden and hidden >= set(parts_of(message)) and "tool_calls" not in hidden:
                kind = f"messages of role {role!r} are not shown by the chat template"
                notes.setdefault(kind, f"message {number}")
                hidden = set()
            for part in sorted(hidden):
                verb = "are not all" if part == "tool_calls" else "is not"
                kind = f"{part} of role {role!r} {verb} shown by the chat template"
                notes.setdefault(kind, f"message {number}")
            if self._marks[number] and role != "assistant":
                kind = f"a mark to learn role {role!r} is not obeyed"
                notes.setdefault(kind, f"message {number}")
        return list(notes.items())

    @cached_property
    def _hidden(self) -> dict[int, set[str]]:
        """The parts of messages that the template does not show: their marks are not in the marked
        text, and the text stays the same if they are changed."""
        text, clean = self._marked
        there, hidden = set(MARKS.findall(text)), dict[int, set[str]]()
        times = Counter[Hashable]()
        for number, message in enumerate(self._messages):
            for part in parts_of(message):
                is_there = mark_of(number, part) in there
                if is_there and shown_in(text, number, message, part):
                    continue
                kind = message["role"], part
                if (clean and times[kind] > ALIKE) or self._is_hidden(number, part):
                    hidden.setdefault(number, set()).add(part)
                    times[kind] += 1
        return hidden

    def _is_hidden(self, number: int, part: str) -> bool:
        """Tell whether the text stays the same if the part, or one of several calls, is changed."""
        message = self._messages[number]
        if part == "tool_calls" and len(message.get("tool_calls") or ()) > 1:
            return any(self._is_same_with(number, other) for other in with_one_call_less(message))
        changes = (marked(message, number, (part,)), replaced(message, number, (part,)))
        return all(self._is_same_with(number, other) for other in changes)

    # --- one answer -----------------------------------------------------------------------------

    def _alike(self, number: int, known: Known) -> Span | None:
        """Return the answer if it is like `ALIKE` earlier ones, found exactly: with the same text
        before it, from the end of the message before, the same ending, and the same text from its
        end to the message after it. `known`: what the earlier ones begin and end with, and what
        is after them, by kind."""
        places, text = self._likely_places, self._text
        previous, own, following = (places.get(number + step) for step in (-1, 0, 1))
        if len(self._messages) <= LONG or not (previous and own and following):
            return None
        roles = [self._messages[number + step]["role"] for step in (-1, 1)]
        kind = (*roles, text[previous.stop : own.start])
        forms = known.setdefault(kind, Counter())
        spans = set()
        for (opening, ending, after), times in forms.items():
            stop = following.start - len(after)
            is_after = text.endswith(after, own.start, following.start)
            if times >= ALIKE and is_after and self._ending(number, own, stop) == ending:
                spans.add((previous.stop + len(opening), stop))
        if len(spans) == 1:
            return spans.pop()
        start, stop = self._find(number)
        if previous.stop <= start <= own.start <= stop <= following.start:
            ending, after = self._ending(number, own, stop), text[stop : following.start]
            forms[text[previous.stop : start], ending, after] += 1
        return start, stop

    def _ending(self, number: int, own: TextPlace, stop: int) -> str:
        """Return what the template writes after the content of an answer that ends at `stop`; of
        one with calls, whose arguments follow the last mark, the last token and what follows it."""
        if "tool_calls" not in parts_of(self._messages[number]):
            return self._text[own.stop : stop]
        tokens = [match.start() for match in self._whole.finditer(self._text, own.start, stop)]
        return self._text[tokens[-1] : stop] if tokens else ""

    def _find(self, number: int) -> Span:
        """Return the answer in message `number`. Raises ChatError if renderings do not tell it."""
        if number not in self._found:
            before, text = self._messages[:number], self._text
            asked = self._try(before, asking=True)
            is_start = bool(asked) and text.startswith(asked or "")
            start = len(asked or "") if is_start else self._start(number, asked)
            usual = self._usual_head
            if usual and is_start and text.startswith(usual, start) and asked == self._try(before):
                start += len(usual)  # the template asks for no answer here, as where none is before
            stop = self._stop(number, asked)
            if stop < start:
                raise ChatError(f"renderings do not tell where the answer in message {number} is")
            self._found[number] = start, stop
        return self._found[number]

    def _start(self, number: int, asked: str | None) -> int:
        """Return the start of an answer whose P is not the beginning of the text."""
        own, head = self._place(number), self._head(asked, self._messages[:number])
        limit = own.start if own else len(self._text)
        previous, opening = self._opening(number, asked)
        if opening is not None and self._text.startswith(opening, previous):
            return previous + len(opening)
        place = self._text.rfind(head, previous, limit) if head else -1
        if place >= 0:
            return place + len(head)
        if opening is not None:
            agreed = self._agreed(opening, self._text, previous)
            # the template asks for reasoning as well, or a call follows without the white space
            rest = self._whole.match(opening, agreed) or not opening[agreed:].strip()
            is_asked = bool(head) and agreed > len(opening) - len(head)
            # it asks for nothing after a result, but closes the results unless a call follows
            is_unasked = agreed > 0 and asked == self._try(self._messages[:number])
            if (rest or previous + agreed >= limit) and (is_asked or is_unasked):
                return min(previous + agreed, limit)
        if number and self._messages[number - 1]["role"] == "assistant":
            return self._find(number - 1)[1]  # the template joins them to one answer
        usual = self._usual_head
        sign = self._whole.match(usual)
        place = self._text.rfind(sign.group(), previous, limit) if sign else -1
        agreed = self._agreed(usual, self._text, place) if place >= 0 else 0
        if agreed and (agreed == len(usual) or self._whole.match(usual, agreed)):
            return place + agreed
        tokens = sorted(self._special_tokens.values(), key=len)[::-1]
        first = next((len(token) for token in tokens if self._text.startswith(token)), 0)
        if number == 0 and not usual and not self._text[first:limit].strip():
            return first
        raise ChatError(f"renderings do not tell where the answer in message {number} begins")

    def _opening(self, number: int, asked: str | None) -> tuple[int, str | None]:
        """Return the end of the last message before the answer that is shown, and what P has after
        it; None if there is none."""
        before = self._messages[:number]
        for other in range(number - 1, -1, -1) if asked is not None else ():
            place = self._place(other)
            in_asked = self._place_in(asked or "", before, other, asking=True) if place else None
            if place and in_asked:
                return place.stop, (asked or "")[in_asked.stop :]
        return 0, None

    @cached_property
    def _usual_head(self) -> str:
        """The text that asks for an answer after a question; empty if it is not known."""
        question = [{"role": "user", "content": "x"}]
        return self._head(self._try(question, asking=True), question)

    def _head(self, asked: str | None, messages: Messages) -> str:
        """Return what the template adds to ask for an answer; empty if it is not known."""
        plain = self._try(messages)
        if asked is None or plain is None or not asked.startswith(plain):
            return ""
        return asked[len(plain) :]

    def _stop(self, number: int, asked: str | None) -> int:
        """Return the end of an answer, before which the template has written `asked`."""
        is_last, text = number == len(self._messages) - 1, self._text
        before = self._messages[:number]
        if is_last and before and before[-1]["role"] != "assistant" and asked == self._try(before):
            # a beginning of an answer may follow every last message
            more = [*self._messages, before[-1]]
            continued = self._try(more)
            if continued is not None and not continued.startswith(text):
                longer = AnswerFinder(self._render, more, continued, self._special_tokens)
                return min(longer._stop(number, None), len(text))
        if is_last:
            return len(text)
        ended = self._try(self._messages[: number + 1])
        if ended is not None and text.startswith(ended):
            return len(ended)
        own = self._place(number)
        if own is None:
            raise ChatError(f"the chat template does not show message {number}")
        closing = None
        if ended is not None:
            in_ended = self._place_in(ended, self._messages[: number + 1], number)
            closing = ended[in_ended.stop :] if in_ended else None
        if closing is not None and text.startswith(closing, own.stop):
            return own.stop + len(closing)
        ends = {place for place in own.marks if closing and text.startswith(closing, place)}
        if closing and len(ends) == 1:
            return ends.pop() + len(closing)
        return self._stop_before_next(number, own, closing)

    def _stop_before_next(self, number: int, own: TextPlace, closing: str | None) -> int:
        """Return the end of an answer as the start of the message after it. `closing`: what the
        template writes after the answer if that is the last message; None: it is not known."""
        text, messages, following = self._text, self._messages, self._place(number + 1)
        upto, question = messages[: number + 1], {"role": "user", "content": "x"}
        start = self._start_of(messages[number + 1], text, following, number)
        if start is not None and start >= own.stop:
            return start
        asked_more = self._try([*upto, question])
        if asked_more is not None:
            place = self._place_in(asked_more, [*upto, question], number)
            after = self._place_in(asked_more, [*upto, question], number + 1)
            start = self._start_of(question, asked_more, after, number)
            if place and start is not None and start >= place.stop:
                ending = asked_more[place.stop : start]
                if text.startswith(ending, own.stop):
                    return own.stop + len(ending)
        agreed = own.stop + (self._agreed(closing, text, own.stop) if closing else 0)
        alone = self._try(messages[number + 1 :])
        place = self._place_in(alone, messages[number + 1 :], 0) if alone is not None else None
        if following and alone is not None and place:
            agreed_end = self._agreed_before(alone[: place.stop], text[: following.stop])
            start = following.stop - agreed_end
            rest = alone[: place.stop - agreed_end]  # before the message where it is the first
            if start >= own.stop and rest in ("", *self._special_tokens.values()):
                return min(start, agreed) if rest and agreed > own.stop else start
        if following and messages[number + 1]["role"] == "assistant":
            gap = text[own.stop : following.start]
            head = self._head(self._try(messages[:number], asking=True), messages[:number])
            if head and head.strip() not in gap and not self._whole.search(gap):
                return following.start  # the template joins them to one answer
        raise ChatError(f"renderings do not tell where the answer in message {number} ends")

    def _start_of(
        self,
        message: dict[str, Any],
        text: str,
        place: TextPlace | None,
        number: int,
    ) -> int | None:
        """Return where the message, which has this place in the text, begins: its text is what it
        adds where it follows the messages before the answer, or fewer. None if it is not known."""
        for count in dict.fromkeys((number, max(0, number - 1), 0)) if place else ():
            short = [*self._messages[:count], message]
            before, added = self._try(short[:-1]), self._try(short)
            if before is None or added is None or not added.startswith(before):
                continue
            found = self._place_in(added, short, count)
            piece = added[len(before) : found.stop] if found else ""
            if place and piece and text[: place.stop].endswith(piece):
                return place.stop - len(piece)
        return None
