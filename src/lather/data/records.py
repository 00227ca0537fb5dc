"""Reads the records of files (lines, rows and whole texts) as a stream, from any part of a file.

A `FilePart` is a range of a file that can be read by itself: bytes of a text or JSONL file, row
groups of a Parquet file, rows of a Hugging Face data set, or the whole of a compressed file. A
record belongs to the part in which it begins, so adjacent parts neither repeat nor lose a record.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

from lather.data.arrow import rows_of
from lather.data.texts import NoTextError, decode, has_plain_line_ends
from lather.errors import DataError
from lather.files import BYTE_ORDER_MARKS, mark_of

Kind = Literal["text", "jsonl", "json", "parquet", "huggingface", "tokens"]
PIECE_BYTES = 1 << 20
"""A longer text file is cut at the ends of lines, and every piece is a document."""
COMPRESSED = (".gz", ".zst")
"""Endings of the names of files that are decompressed while they are read."""
ROWS = 256
BLOCK_BYTES = 1 << 20
Table = tuple[list[str], Callable[[list[str]], Iterator[list[dict[str, Any]]]]]
"""The names of a table's columns, and a function that reads some of them, in groups of rows."""


@dataclass(frozen=True)
class FilePart:
    """A range of a file."""

    path: str
    kind: Kind
    start: int = 0
    stop: int = -1
    """End of the range, in bytes, row groups or rows; -1: the end of the file."""
    separator: str = ""
    """Text between documents of a text file; empty: a file is one document."""
    encoding: str = "auto"
    columns: tuple[str, ...] = ()
    """Columns of Parquet and Hugging Face data to read."""

    def places(self, length: int) -> range:
        """Return the numbers of the part's row groups or rows, of `length` in the file."""
        return range(self.start, length if self.stop < 0 else self.stop)


@dataclass(frozen=True)
class Skip:
    """A record or file that was skipped."""

    line: int
    """Line, row or item, counted from 1 at the start of the part; 0: the whole file."""
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Record:
    """The content of a text, or the fields of a line or row."""

    line: int
    content: str | dict[str, Any]
    encoding: str = ""
    """Encoding of a text file."""


@dataclass
class RecordReader:
    """Iterates over the records of a part, and its skipped records. Afterwards `lines` is the
    number of lines that begin in the part."""

    part: FilePart
    lines: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Record | Skip]:
        readers = {
            "text": self._texts,
            "jsonl": self._json_lines,
            "json": self._json,
            "parquet": self._rows,
            "huggingface": self._rows,
        }
        try:
            yield from readers[self.part.kind]()
        except (DataError, MemoryError):
            raise
        except Exception as error:
            is_table = self.part.kind in ("parquet", "huggingface")  # errors of many types
            if isinstance(error, OSError) and error.errno:
                yield Skip(0, "cannot be read", os.strerror(error.errno))
            elif is_table or isinstance(error, OSError | EOFError | zlib.error):
                yield Skip(self.lines + 1, "damaged, or ends early", str(error))
            else:
                raise

    # --- text and JSONL

    def _texts(self) -> Iterator[Record | Skip]:
        part = self.part
        is_cut = part.stop >= 0 or has_plain_line_ends(first_bytes(part.path), part.encoding)
        if is_cut and part.separator:
            return self._separated()
        if is_cut and (part.stop >= 0 or part.path.endswith(COMPRESSED)):
            return self._pieces()
        return self._whole()

    def _whole(self) -> Iterator[Record | Skip]:
        with _open(self.part.path) as file:
            content = file.read()
        for record in self._decoded(1, content):
            if isinstance(record, Skip) or not self.part.separator:
                yield record
            else:
                for number, text in enumerate(str(record.content).split(self.part.separator), 1):
                    if text.strip():
                        yield Record(number, text, record.encoding)

    def _pieces(self) -> Iterator[Record | Skip]:
        """Join the lines that begin in the same `PIECE_BYTES` of the file to one document."""
        piece: list[bytes] = []
        number, first = 0, 1
        for offset, line in self._split(b"\n"):
            if offset // PIECE_BYTES != number:
                yield from self._decoded(first, b"".join(piece))
                piece, number, first = [], offset // PIECE_BYTES, self.lines
            piece.append(line)
        yield from self._decoded(first, b"".join(piece))

    def _separated(self) -> Iterator[Record | Skip]:
        encoding = "utf-8" if self.part.encoding == "auto" else self.part.encoding
        separator = self.part.separator.encode(encoding)
        for _, content in self._split(separator):
            yield from self._decoded(self.lines, content.removesuffix(separator))

    def _decoded(self, line: int, content: bytes) -> Iterator[Record | Skip]:
        try:
            text, encoding = decode(content, self.part.encoding)
        except NoTextError as error:
            yield Skip(line, "no text", str(error))
        else:
            if text.strip():
                yield Record(line, text, encoding)
            elif content or self.part.stop < 0:
                yield Skip(line, "empty")

    def _json(self) -> Iterator[Record | Skip]:
        """Read the whole file: a list of records, a single record, or JSONL with the suffix
        .json."""
        with _open(self.part.path) as file:
            content = file.read()
        try:
            items = json.loads(content)
        except (ValueError, RecursionError) as error:
            if content.removeprefix(mark_of(content)).lstrip().startswith(b"["):
                yield Skip(0, "broken JSON", str(error))
            else:
                yield from self._json_lines()
            return
        for self.lines, item in enumerate(items if isinstance(items, list) else [items], 1):
            yield self._object(item)

    def _json_lines(self) -> Iterator[Record | Skip]:
        for offset, content in self._split(b"\n"):
            line, mark = content.removeprefix(BOM_UTF8), b"" if offset else mark_of(content)
            if mark not in (b"", BOM_UTF8):
                yield Skip(0, "not UTF-8", f"{BYTE_ORDER_MARKS[mark]}: save it as UTF-8")
                return
            if not line.strip():
                continue
            try:
                yield self._object(json.loads(line.decode("utf-8")))
            except UnicodeDecodeError as error:
                yield Skip(self.lines, "not UTF-8", f"byte {error.start} of the line")
            except (ValueError, RecursionError) as error:
                yield Skip(self.lines, "broken JSON", str(error))

    def _object(self, content: Any) -> Record | Skip:
        if isinstance(content, dict):
            return Record(self.lines, content)
        return Skip(self.lines, "not a JSON object", type(content).__name__)

    def _split(self, separator: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the lines, or other pieces that a separator ends, that begin in the part, with
        their offsets."""
        with _open(self.part.path) as file:
            for piece in _split(file, separator, self.part.start, self.part.stop):
                self.lines += 1
                yield piece

    # --- tables

    def _rows(self) -> Iterator[Record | Skip]:
        names, read = (_parquet if self.part.kind == "parquet" else _huggingface)(self.part)
        columns = [name for name in self.part.columns if name in names]
        if not columns:
            yield Skip(0, "no such column", f"it has {', '.join(names)}")
            return
        for self.lines, row in enumerate(chain.from_iterable(read(columns)), 1):
            yield Record(self.lines, row)


def _parquet(part: FilePart) -> Table:
    file = open_parquet(part.path)
    groups = list(part.places(file.num_row_groups))
    batches = partial(file.iter_batches, batch_size=ROWS, row_groups=groups)
    return file.schema_arrow.names, lambda columns: map(rows_of, batches(columns=columns))


def _huggingface(part: FilePart) -> Table:
    rows = open_huggingface(part.path)
    places = part.places(len(rows))
    pieces = [places[start : start + ROWS] for start in range(0, len(places), ROWS)]

    def read(columns: list[str]) -> Iterator[list[dict[str, Any]]]:
        tables = rows.select_columns(columns).with_format("arrow")
        return (rows_of(tables[piece.start : piece.stop]) for piece in pieces)

    return rows.column_names, read


def open_parquet(path: str) -> Any:
    """Open a `pyarrow.parquet.ParquetFile`. Raises pyarrow's errors."""
    return _library("pyarrow.parquet").ParquetFile(path)


def _open(path: str) -> io.BufferedReader:
    """Open a file, which is decompressed while it is read."""
    if path.endswith(".zst"):  # zstandard's own reader does not detect a truncated file
        raw = _library("pyarrow").input_stream(path, compression="zstd")
    else:
        raw = gzip.GzipFile(path) if path.endswith(".gz") else io.FileIO(path)
    return io.BufferedReader(raw, BLOCK_BYTES)


def first_bytes(path: str) -> bytes:
    """Return the first bytes of a file's content; empty if it cannot be read."""
    try:
        with _open(path) as file:
            return file.read(4)
    except OSError:
        return b""


def _split(
    file: io.BufferedReader, separator: bytes, start: int, stop: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces that begin from `start` until `stop` (-1: the end) with their offsets. A
    piece includes the separator that ends it; the end of the file ends a piece, too."""
    size = len(separator)
    # offset of the buffer: a piece that begins at `start` has a separator before it
    offset = start - size if start else 0
    if offset:
        file.seek(offset)
    buffer, is_inside = bytearray(), not start
    while more := file.read1(BLOCK_BYTES):
        place, searched = 0, max(0, len(buffer) - size + 1)
        buffer += more
        while (end := buffer.find(separator, searched)) >= 0:
            searched = end + size
            if is_inside:
                yield offset + place, bytes(buffer[place:searched])
            is_inside, place = True, searched
            if 0 <= stop <= offset + place:
                return
        if not is_inside:  # the text is of another part, but its end may begin a separator
            place = max(0, len(buffer) - size + 1)
            if 0 <= stop <= offset + place:
                return
        del buffer[:place]
        offset += place
    if is_inside and buffer:
        yield offset, bytes(buffer)


def overlaps_itself(separator: str) -> bool:
    """Tell whether the separator ends with its own beginning, so that the places found depend on
    where the search started."""
    encoded = separator.encode()
    return any(encoded.endswith(encoded[:length]) for length in range(1, len(encoded)))


def open_huggingface(name: str) -> Any:
    """Open a data set of Hugging Face's `datasets`: a folder made by `save_to_disk` (FOLDER, or
    FOLDER#SPLIT), or hf:NAME[@CONFIG]#SPLIT from the hub."""
    datasets = _library("datasets")
    place, _, split = name.partition("#")
    try:
        if place.startswith("hf:"):
            path, _, config = place.removeprefix("hf:").partition("@")
            return datasets.load_dataset(path, config or None, split=split or "train")
        rows = datasets.load_from_disk(place)
    except Exception as error:  # the library raises errors of many types
        raise DataError(
            f"{name}: not a readable Hugging Face data set ({error}): give a folder made by "
            "save_to_disk, or hf:NAME#SPLIT"
        ) from None
    if not isinstance(rows, datasets.DatasetDict):
        return rows
    if split not in rows:
        raise DataError(
            f"{name}: has the splits {', '.join(rows)}: name one, as in {place}#{next(iter(rows))}"
        )
    return rows[split]


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise DataError(
            f"{package} is needed to read this, and is not installed: pip install 'lather[data]'"
        ) from None
