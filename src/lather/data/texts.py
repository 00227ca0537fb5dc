"""Decodes text files.

The encoding is that of the byte order mark, or else UTF-8 if all bytes are valid, or else
Windows-1252, which suits text of Western European languages with one byte per character. If most
characters beyond ASCII are valid in UTF-8, the file counts as damaged UTF-8, and invalid bytes
become U+FFFD. The encodings are counted. A file with zero bytes but without a byte order mark is
not text.
"""

from __future__ import annotations

from collections.abc import Iterator

from lather.files import BYTE_ORDER_MARKS, mark_of

OTHER_KINDS = {
    b"PAR1": "Parquet",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"%PDF": "PDF",
}
"""Kinds of files that are not text, by their first bytes."""


DAMAGED = "utf-8 (damaged)"
"""Name under which texts in damaged UTF-8 are counted."""


class NoTextError(Exception):
    """The bytes are not text; the message says why."""


def kind_of_bytes(start: bytes) -> str | None:
    """Return the kind of a file that starts with these bytes, if it is known not to be text."""
    return next((kind for magic, kind in OTHER_KINDS.items() if start.startswith(magic)), None)


def has_plain_line_ends(start: bytes, encoding: str) -> bool:
    """Tell whether byte 10 always ends a line of a text that starts with these bytes, in this
    encoding."""
    if BYTE_ORDER_MARKS.get(mark_of(start), "utf-8") != "utf-8":
        return False
    return encoding == "auto" or "\n".encode(encoding) == b"\n"


def decode(content: bytes, encoding: str = "auto") -> tuple[str, str]:
    """Return the text, and the name of its encoding. Raises NoTextError."""
    if encoding != "auto":
        return _decode(content, encoding).removeprefix("\ufeff"), encoding
    if kind := kind_of_bytes(content):
        raise NoTextError(f"{kind}, not text")
    if mark := mark_of(content):
        return _decode(content[len(mark) :], BYTE_ORDER_MARKS[mark]), BYTE_ORDER_MARKS[mark]
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
    """Cut a text into parts of at most `length` characters, after a line or else before a space, if
    there is one."""
    start = 0
    while len(text) - start > length:
        end = start + length
        for separator in ("\n", " "):
            place = text.rfind(separator, start, end)
            if place > start:
                # byte-level tokenizers put a space before its word
                end = place if separator == " " else place + 1
                break
        yield text[start:end]
        start = end
    yield text[start:]
