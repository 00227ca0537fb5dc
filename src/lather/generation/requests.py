"""Requests: texts to continue and conversations to answer, given on the command line or read from files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lather.data.chat import ChatError, Messages, messages_of
from lather.errors import DataError


@dataclass(frozen=True)
class Request:
    """A text to continue, or a conversation to answer."""

    text: str = ""
    messages: Messages | None = None
    """The conversation; None: the request is `text`."""

    def describe(self) -> dict[str, Any]:
        """Return the request as fields of a row of results."""
        return {"prompt": self.text} if self.messages is None else {"messages": self.messages}


def read_requests(path: Path) -> list[Request]:
    """Read the requests of a file. Each line of a .jsonl file is an object with "prompt", "messages" or "conversations"; each line of any
    other file is a text.

    Empty lines are skipped. Raises DataError, with the line number, for a line that is not a request, and for a file without requests.
    """
    try:
        lines = [line.removesuffix("\r") for line in path.read_text("utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"--prompts {path}: cannot be read ({reason}): give a .jsonl or text file") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"--prompts {path}: it holds no prompt: give one on each line")
    if path.suffix != ".jsonl":
        return [Request(line) for _, line in numbered]
    return [_of_line(line, f"--prompts {path}, line {number}") for number, line in numbered]


def _of_line(line: str, place: str) -> Request:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error}): give an object with prompt or messages") from None
    if isinstance(record, dict) and isinstance(record.get("prompt"), str) and "completion" not in record:
        return Request(record["prompt"])
    try:
        return Request(messages=messages_of(record if isinstance(record, dict) else {}))
    except ChatError as error:
        raise DataError(f"{place}: {error}: give an object with prompt or messages") from None
