"""Bytes of text files to text.

The encoding is the one that the first bytes' mark announces, else UTF-8 if all bytes are, else Windows-1252, in which the text of any
Western European language with one byte per character can be read. If more letters beyond ASCII are right in UTF-8 than wrong, it is UTF-8
that was damaged: what is wrong becomes U+FFFD. Which one it was is counted. Zero bytes without a mark are no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
"""The encodings by their marks; a mark comes before those that it begins with."""
OTHER_KINDS = {b"PAR1": "Parquet", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"%PDF": "PDF"}
"""Kinds of files that are no text, by their first bytes."""


DAMAGED = "utf-8 (damaged)"
"""The name under which texts are counted that are UTF-8 but for some bytes."""


class NoTextError(Exception):
    """Bytes that are no text; the message says why."""


def kind_of_bytes(start: bytes) -> str | None:
    """The kind of a file that starts like this, if it is known not to be text."""
    return next((kind for magic, kind in OTHER_KINDS.items() if start.startswith(magic)), None)


def mark_of(start: bytes) -> bytes:
    """The byte order mark that these bytes begin with; empty if there is none."""
    return next((mark for mark in MARKS if start.startswith(mark)), b"")


def has_plain_line_ends(encoding: str) -> bool:
    """Whether a byte 10 is the end of a line, and nothing else, in this encoding."""
    return encoding == "auto" or "\n".encode(encoding) == b"\n"


def decode(content: bytes, encoding: str = "auto") -> tuple[str, str]:
    """The text, and the name of its encoding. Raises NoTextError."""
    if encoding != "auto":
        return _decode(content, encoding), encoding
    if kind := kind_of_bytes(content):
        raise NoTextError(f"{kind}, not text")
    if mark := mark_of(content):
        return _decode(content[len(mark) :], MARKS[mark]), MARKS[mark]
    if b"\0" in content:
        raise NoTextError("binary: it has zero bytes")
    try:
        return content.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        text = content.decode("utf-8", errors="replace")
        wrong = text.count("\ufffd")
        if len(text) - len(text.encode("ascii", errors="ignore")) > 2 * wrong:
            return text, DAMAGED
        return content.decode("cp1252", errors="replace"), "cp1252"


def _decode(content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise NoTextError(f"not {encoding} at byte {error.start}") from None


def cut(text: str, length: int) -> Iterator[str]:
    """The text in parts of at most `length` characters, each but the last ended after a line, or else a word, if it has one."""
    start = 0
    while len(text) - start > length:
        end = start + length
        for separator in ("\n", " "):
            place = text.rfind(separator, start, end)
            if place > start:
                end = place if separator == " " else place + 1  # byte-level tokenizers put a space before its word
                break
        yield text[start:end]
        start = end
    yield text[start:]
