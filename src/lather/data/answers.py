"""Finds the assistant's answers in the text of a conversation by differences of renderings.

T is the text of all messages. For the answer in message i, P is the text of the messages before it
with the template's beginning of an answer, and E that of the messages up to it. As a rule both are
beginnings of T: the answer is T[len(P):len(E)]. Some templates write earlier messages otherwise
once others follow (they remove reasoning, or put tools into the last question), or close the last
message otherwise. Then the answer is the segment of the message: the text that the template writes
in the message's turn of the loop (`lather.data.chat_program`), without the beginning that the
template also writes to ask for an answer. If neither tells where the answer is, the conversation is
refused: a wrong mask is worse than none.

In a long conversation, answers between messages of the same roles are cut out of their segments as
earlier ones were, so that time stays in proportion to the number of messages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable
from functools import cached_property
from itertools import takewhile

from lather.data.chat_program import MarkedText, Span
from lather.data.conversations import ChatError, Messages, calls_of, is_learned
from lather.data.hidden import parts_of

Render = Callable[[Messages, bool], MarkedText]
"""Renders messages; if the second argument is true, with the beginning of an answer after them.
Raises ChatError."""
TOKEN = r"<[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]"
"""Texts that look like a special token: two texts do not agree in a part of it."""
LONG = 32
"""Number of messages above which a conversation is long."""
ALIKE = 2
"""Answers that are found by renderings before others are cut out as these were."""


def without(spans: list[Span], removed: Span) -> list[Span]:
    """Return the parts of the spans that lie outside a range."""
    start, stop = removed
    parts = [
        part for low, high in spans for part in ((low, min(high, start)), (max(low, stop), high))
    ]
    return [(low, high) for low, high in parts if low < high]


class AnswerFinder:
    """Finds the answers in the text of a conversation."""

    def __init__(
        self,
        render: Render,
        messages: Messages,
        rendered: MarkedText,
        hidden: dict[int, set[str]],
        special_tokens: dict[str, str],
    ) -> None:
        """`rendered`: the messages; `hidden`: parts that the template does not show, by message.
        Raises ChatError if marks of what is learned are not valid."""
        self._render, self._messages, self._rendered = render, messages, rendered
        self._text, self._hidden = rendered.text, hidden
        self._marks = [is_learned(message, number) for number, message in enumerate(messages)]
        self._answered = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        self._learned = [number for number in self._answered if self._is_learned(number)]
        self._special_tokens = sorted(special_tokens.values(), key=len)[::-1]
        names = [re.escape(token) for token in self._special_tokens]
        self._token = re.compile("|".join([*names, TOKEN]))

    # --- which answers are learned --------------------------------------------------------------

    def _is_learned(self, number: int) -> bool:
        """Tell whether an answer is learned: unless it is marked otherwise, or the template does
        not show the tools that it calls, or the reasoning that is all it has. It would be another
        answer without them."""
        hidden = self._hidden.get(number, set())
        is_empty = hidden == {"reasoning"} == parts_of(self._messages[number])
        return self._marks[number] is not False and "tool_calls" not in hidden and not is_empty

    def answers(self) -> list[Span]:
        """Return the learned answers. Raises ChatError if renderings do not tell where one is."""
        for number in self._learned:
            hidden = self._hidden.get(number, set())
            if "content" in hidden and hidden == parts_of(self._messages[number]):
                raise ChatError(f"the chat template does not show message {number}")
        forms: dict[Hashable, Counter[tuple[str, str, int]]] = {}
        spans = [self._find_alike(number, forms) for number in self._learned]
        return [(start, stop) for start, stop in spans if start < stop]

    def learned_of(self, blocks: list[Span]) -> list[Span]:
        """Return the blocks that the template marks, without those of answers that are not
        learned. Raises ChatError if renderings do not tell where such an answer is."""
        for number in set(self._answered) - set(self._learned):
            is_looped = bool(self._rendered.segments)
            segment = self._segment(number) if is_looped else self._find(number)
            blocks = without(blocks, segment) if segment else blocks
        return blocks

    def why_nothing_is_learned(self) -> str:
        """Return the reason why there is no learned answer."""
        if not self._answered:
            return "no message is the assistant's"
        if self._learned:
            return "the chat template writes nothing for the answers, or marks nothing as generated"
        if all(self._marks[number] is False for number in self._answered):
            return "every answer is marked as not learned"
        return "the chat template shows neither calls of tools nor other answers"

    # --- one answer -----------------------------------------------------------------------------

    def _find_alike(
        self, number: int, forms: dict[Hashable, Counter[tuple[str, str, int]]]
    ) -> Span:
        """Return the answer in message `number`. In a long conversation, cut it out of its segment
        as `ALIKE` earlier answers between messages of the same roles were cut out. `forms` counts
        the cuts: the beginning of the segment before the answer, and the text and number of
        characters between the ends of segment and answer."""
        segment = self._segment(number)
        if len(self._messages) <= LONG or not segment:
            return self._find(number)
        roles = [message["role"] for message in self._messages[max(0, number - 1) : number + 2]]
        counts = forms.setdefault((*roles, bool(calls_of(self._messages[number]))), Counter())
        first, last = segment
        spans = {
            (first + len(head), last + shift)
            for (head, between, shift), times in counts.items()
            if times >= ALIKE
            and self._text.startswith(head, first)
            and self._between(last, last + shift) == between
        }
        if len(spans) == 1:
            return spans.pop()
        start, stop = self._find(number)
        if first <= start:
            counts[self._text[first:start], self._between(last, stop), stop - last] += 1
        return start, stop

    def _between(self, place: int, other: int) -> str:
        return self._text[min(place, other) : max(place, other)]

    def _find(self, number: int) -> Span:
        start, stop = self._start(number), self._stop(number)
        if stop < start:
            raise ChatError(f"renderings do not tell where the answer in message {number} is")
        return start, stop

    def _segment(self, number: int) -> Span | None:
        """Return the segment of a message. That of a last message that no loop writes is the text
        after the loop."""
        segment = self._rendered.segments.get(number)
        if segment is None and number == len(self._messages) - 1 and self._rendered.segments:
            return self._rendered.end, len(self._text)
        return segment

    def _start(self, number: int) -> int:
        before, segment = self._messages[:number], self._segment(number)
        asked, usual = self._try(before, asking=True), self._usual_head
        if asked and asked.text and self._text.startswith(asked.text):
            start = len(asked.text)
            if usual and self._text.startswith(usual, start) and asked == self._try(before):
                start += len(usual)  # the template asks for no answer here, as where none is before
            return start
        head = self._head(asked, before) or usual
        if segment and head is not None:
            first, text = segment[0], self._text[slice(*segment)]
            if not number:  # the loop may begin with a special token
                token = next((t for t in self._special_tokens if text.startswith(t)), "")
                first, text = first + len(token), text.removeprefix(token)
            agreed = self._agreed(head, text, number)
            if agreed is not None:
                return first + agreed
        raise ChatError(f"renderings do not tell where the answer in message {number} begins")

    @cached_property
    def _usual_head(self) -> str | None:
        """The text that asks for an answer after a question; None if it is not known."""
        question = [{"role": "user", "content": "x"}]
        return self._head(self._try(question, asking=True), question)

    def _head(self, asked: MarkedText | None, messages: Messages) -> str | None:
        """Return the text by which the template asks for an answer after these messages. `asked`:
        the messages with it."""
        plain = self._try(messages)
        if asked is None:
            return None
        after = asked.text[asked.end :]
        if plain is None or plain.text == asked.text:
            return after
        usual = plain.text[plain.end :]
        if after == usual:  # it asks in its loop
            return asked.text[: asked.end].removeprefix(plain.text[: plain.end])
        return after.removeprefix(usual)

    def _agreed(self, head: str, text: str, number: int) -> int | None:
        """Return the number of first characters that a head and the segment of message `number`
        have in common, if the head ends there, but for white space, or goes on with a special
        token; else None."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(head, text, strict=False))
        length = sum(1 for _ in same)
        content = self._messages[number].get("content")
        if length < len(head) and isinstance(content, str) and content.strip():
            place = text.rfind(content.strip())
            length = min(length, place) if place >= 0 else length
        for match in self._token.finditer(head):
            if match.start() < length < match.end():
                length = match.start()
        rest = head[length:]
        return length if not length or not rest.strip() or self._token.match(rest) else None

    def _stop(self, number: int) -> int:
        text, segment = self._text, self._segment(number)
        if number == len(self._messages) - 1:
            if segment and segment[1] < len(text) and self._is_asking_always:
                return segment[1]
            return len(text)
        ended = self._try(self._messages[: number + 1])
        if ended and text.startswith(ended.text):
            return len(ended.text)
        if not segment:
            raise ChatError(f"renderings do not tell where the answer in message {number} ends")
        start, stop = segment
        if ended:
            alone = ended.text[slice(*ended.segments.get(number, (0, 0)))]
            if alone and text.startswith(alone, start):
                stop = start + len(alone)
            closing = ended.text[ended.end :]
            stop += len(closing) if text.startswith(closing, stop) else 0
        return stop

    @property
    def _is_asking_always(self) -> bool:
        """Whether a beginning of an answer follows the last message, asked for or not."""
        asked = self._try(self._messages, asking=True)
        return asked is not None and asked.text == self._text

    def _try(self, messages: Messages, asking: bool = False) -> MarkedText | None:
        try:
            return self._render(messages, asking)
        except ChatError:
            return None
