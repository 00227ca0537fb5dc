"""Does units of work, in this process or in several: reads the documents of parts of files and
writes them to shards.

A unit is finished when its report, `<number>.json` in the folder of units, exists. The report lists
the unit's shards and is written last, so a unit whose process was killed is done again.

The processes are spawned and not forked, because forking a process that has threads is not safe.
They end with their parent. A single unit, or all units if one process is asked for, are done in the
calling process, where the tokenizer uses all cores.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from lather.data.chat import ChatTemplate
from lather.data.dataset import TOKENIZER, Split, splits_of
from lather.data.documents import Document, TokenRun, document_of, encode, load_tokenizer
from lather.data.recipe import DataRecipe
from lather.data.records import Record, RecordReader, Skip
from lather.data.shards import Array, ShardWriter, token_dtype
from lather.data.sources import ReadUnit
from lather.data.token_columns import PAIRS
from lather.data.token_files import TokenFile, TokenFileError, open_token_file
from lather.data.token_rows import read_rows
from lather.errors import DataError
from lather.files import read_text, write_aside
from lather.processes import end_with_parent, without_signals

SPLITS = ("train", "validation")
POLL_SECONDS = 0.5
MOST_DETAIL = 200
"""Maximal length of a skip's detail, in characters."""
Count = Callable[[int, int], None]
"""Called with the numbers of documents and tokens made since the last call."""
Progress = Callable[[int, int, int, int], None]
"""Called with the numbers of finished units and of all units, and of the documents and tokens made
since the command was started."""


@dataclass(frozen=True)
class WorkSettings:
    """Settings for making documents from records, and shards from documents; they are sent to every
    process."""

    recipe: DataRecipe
    folder: Path
    """Folder of the shards and tokenizer.json."""
    units: Path
    """Folder of the units' reports."""
    vocab_size: int
    end: int | None
    """Number of the token that is added after each document."""
    template: ChatTemplate | None
    """Chat template; None: records are texts."""


@dataclass
class UnitReport:
    """The result of a unit of work."""

    splits: dict[str, Split] = field(default_factory=dict)
    lines: list[int] = field(default_factory=list)
    """Number of lines or rows of each part."""
    skipped: list[tuple[int, int, str, str]] = field(default_factory=list)
    """Number of the part, line in it, reason, detail."""
    encodings: dict[str, int] = field(default_factory=dict)
    notes: list[tuple[int, int, str, str]] = field(default_factory=list)
    """Parts of records that documents lack: number of the part, line in it, kind, detail."""

    @classmethod
    def read(cls, path: Path) -> UnitReport:
        mapping = json.loads(read_text(path))
        return cls(splits=splits_of(mapping.pop("splits")), **mapping)


def report_path(units: Path, number: int) -> Path:
    return units / f"{number:05d}.json"


def is_done(unit: ReadUnit, folder: Path, units: Path) -> bool:
    """Tell whether the unit's report is complete, and its shards exist."""
    try:
        report = UnitReport.read(report_path(units, unit.number))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    shards = (shard for split in report.splits.values() for shard in split.shards)
    return all(
        (folder / f"{shard.name}.{suffix}").exists()
        for shard in shards
        for suffix in shard.checksums
    )


def do_unit(unit: ReadUnit, settings: WorkSettings, count: Count) -> None:
    """Write the unit's shards, then its report. After an error, such as OSError on a full disk, the
    current shards are deleted."""
    report = UnitReport()
    # its shards are gone; half of them must not count as all
    report_path(settings.units, unit.number).unlink(missing_ok=True)
    recipe = settings.recipe
    masked = recipe.chat or recipe.token_rows
    options = token_dtype(settings.vocab_size), recipe.shard_tokens, masked
    writers = {
        split: ShardWriter(settings.folder, f"{split}-{unit.number:05d}", *options)
        for split in SPLITS
    }
    make_runs = _rows if recipe.token_rows else _texts
    runs = (_tokens if unit.parts[0].kind == "tokens" else make_runs)(unit, settings, report)
    try:
        length = 0
        for run in runs:
            writers[run.split].write(run.tokens, run.learned, run.columns)
            length += len(run.tokens)
            if run.is_last:
                writers[run.split].end_document()
                split = Split(1, length, length, run.text_bytes)
                report.splits[run.split] = report.splits.get(run.split, Split()) + split
                count(1, length)
                length = 0
        for name, writer in writers.items():
            writer.finish()
            if writer.entries:
                report.splits[name] += Split(shards=writer.entries)
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    write_aside(report_path(settings.units, unit.number), json.dumps(asdict(report)))


def _place_of_held_out(unit: int, every: int) -> int:
    """Return the place of the held-out document among `every` documents. It varies with the unit,
    so that short units hold out the same share of documents as long units."""
    return every // 2 if unit == 0 else unit * 2654435761 % 2**32 % every


# --- texts ----------------------------------------------------------------------------------------


def documents_of(
    unit: ReadUnit, recipe: DataRecipe, template: ChatTemplate | None, report: UnitReport
) -> Iterator[Document]:
    """Yield the unit's documents, each assigned to a split; record skipped documents and encodings
    in `report`."""
    make = (
        _row if recipe.token_rows else partial(document_of, field=recipe.field, template=template)
    )
    documents, every = _documents(unit, make, report), recipe.hold_out_every
    if not every:
        yield from (replace(document, split=unit.split) for document in documents)
        return
    place = _place_of_held_out(unit.number, every)
    if unit.number == 0:  # hold out at least one document, if there are two
        first = list(itertools.islice(documents, every))
        place = min(place, len(first) // 2) if len(first) > 1 else -1
        documents = itertools.chain(first, documents)
    for index, document in enumerate(documents):
        yield replace(document, split=SPLITS[index % every == place])


def _documents(
    unit: ReadUnit, make: Callable[[Record], Document | Skip], report: UnitReport
) -> Iterator[Document]:
    for number, part in enumerate(unit.parts):
        reader = RecordReader(part)
        for record in reader:
            document = record if isinstance(record, Skip) else make(record)
            if isinstance(document, Skip):
                detail = document.detail[:MOST_DETAIL]
                report.skipped.append((number, document.line, document.reason, detail))
                continue
            assert isinstance(record, Record)
            if record.encoding:
                report.encodings[record.encoding] = report.encodings.get(record.encoding, 0) + 1
            for kind, detail in document.notes:
                report.notes.append((number, record.line, kind, detail[:MOST_DETAIL]))
            yield document
        report.lines.append(reader.lines)


def _texts(unit: ReadUnit, settings: WorkSettings, report: UnitReport) -> Iterator[TokenRun]:
    tokenizer = load_tokenizer(
        settings.folder / TOKENIZER, "delete the unfinished folder, and start again"
    )
    documents = documents_of(unit, settings.recipe, settings.template, report)
    return encode(documents, tokenizer, settings.end, chat=settings.recipe.chat)


# --- tokens ---------------------------------------------------------------------------------------


def _row(record: Record) -> Document | Skip:
    rows = read_rows(record)
    return rows if isinstance(rows, Skip) else Document("", rows=rows)


def _rows(unit: ReadUnit, settings: WorkSettings, report: UnitReport) -> Iterator[TokenRun]:
    """Yield the documents of rows of tokens; pairs get numbers of their own. Raises DataError for a
    token outside the vocabulary, or if only some rows are pairs."""
    path, kinds = unit.parts[0].path, set[int]()
    for number, document in enumerate(documents_of(unit, settings.recipe, None, report), 1):
        kinds.add(len(document.rows))
        if len(kinds) > 1:
            raise DataError(f"{path}: only some rows are pairs: make a data set of each")
        for row in document.rows:
            if row.tokens.max() >= settings.vocab_size:
                raise DataError(
                    f"{path}: token {row.tokens.max()} is outside the vocabulary of "
                    f"{settings.vocab_size}: give its own --vocab-size"
                )
            if PAIRS in row.columns:
                row.columns[PAIRS] *= (unit.number << 32) + number
            yield TokenRun(document.split, row.tokens, True, row.learned, columns=row.columns)


def _tokens(unit: ReadUnit, settings: WorkSettings, report: UnitReport) -> Iterator[TokenRun]:
    """Yield the documents of token files; the end of a file ends its last document."""
    document, every = 0, settings.recipe.hold_out_every
    place = _place_of_held_out(unit.number, every) if every else -1
    for number, part in enumerate(unit.parts):
        report.lines.append(0)
        try:
            file = open_token_file(Path(part.path), settings.recipe.token_dtype)
        except TokenFileError as error:
            report.skipped.append((number, 0, "no tokens", str(error)))
            continue
        except OSError as error:
            report.skipped.append((number, 0, "cannot be read", error.strerror or str(error)))
            continue
        for tokens, is_last in _pieces_of(file, settings):
            split = SPLITS[document % every == place] if every else unit.split
            yield TokenRun(split, tokens, is_last)
            document += is_last


def _pieces_of(file: TokenFile, settings: WorkSettings) -> Iterator[tuple[Array, bool]]:
    """Yield the tokens of documents or of their parts, each with whether it is the last part.
    Raises DataError for a token outside the vocabulary, or if the file has become shorter."""
    done = 0
    try:
        for tokens, ends in file.blocks(settings.end):
            lowest, highest = int(tokens.min(initial=0)), int(tokens.max(initial=0))
            if lowest < 0 or highest >= settings.vocab_size:
                raise DataError(
                    f"{file.path}: token {lowest if lowest < 0 else highest} is outside the "
                    f"vocabulary of {settings.vocab_size}: give its own --vocab-size"
                )
            done += len(tokens)
            for start, stop in itertools.pairwise(np.unique([0, *ends, len(tokens)]).tolist()):
                is_end = stop < len(tokens) or done == file.length or stop in ends
                yield tokens[start:stop], bool(is_end)
    except TokenFileError as error:  # its length was right when it was opened
        raise DataError(f"{file.path}: {error}: it changed while it was read") from None


# --- processes ------------------------------------------------------------------------------------


def do_units(
    units: Sequence[ReadUnit],
    num_units: int,
    settings: WorkSettings,
    workers: int,
    progress: Progress,
) -> None:
    """Do `units`, the missing ones of all `num_units`. Raises the error of a unit that fails;
    finished units are kept."""
    if workers == 1 or len(units) < 2:
        _do_in_this_process(units, num_units, settings, progress)
        return
    done, context = num_units - len(units), multiprocessing.get_context("spawn")
    with without_signals():
        totals = context.Array("q", 2)
    waiting, at_work = list(reversed(units)), dict[Connection, ReadUnit]()
    processes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(workers, len(units))):
            ours, theirs = context.Pipe()
            processes[ours] = context.Process(target=_work, args=(theirs, settings, totals))
            with without_signals():
                processes[ours].start()
            theirs.close()
        idle = list(processes)
        while waiting or at_work:
            for connection in idle[: len(waiting)]:
                at_work[connection] = waiting.pop()
                with contextlib.suppress(ConnectionError):  # of an ended process, noticed below
                    connection.send(at_work[connection])
            ready = wait(list(at_work), POLL_SECONDS)
            idle = [connection for connection in at_work if connection in ready]
            for connection in idle:
                _finish(at_work.pop(connection), connection)
                done += 1
            progress(done, num_units, *totals[:])
    finally:
        for connection, process in processes.items():
            connection.close()  # an idle process ends when its connection closes
            if connection in at_work:
                process.kill()
            process.join()


def _finish(unit: ReadUnit, connection: Connection) -> None:
    """Raise the error of a unit that a process has failed to do."""
    try:
        error = connection.recv()
    except (EOFError, ConnectionError):
        raise DataError(
            f"a process ended while it was at work on {unit.parts[0].path}: it was killed, perhaps "
            "because memory ran out; the same command continues: give it fewer --workers"
        ) from None
    if error is not None:
        raise error


def _do_in_this_process(
    units: Sequence[ReadUnit], num_units: int, settings: WorkSettings, progress: Progress
) -> None:
    done, totals = num_units - len(units), [0, 0]

    def count(documents: int, tokens: int) -> None:
        totals[:] = totals[0] + documents, totals[1] + tokens
        progress(done, num_units, *totals)

    for unit in units:
        do_unit(unit, settings, count)
        done += 1
        progress(done, num_units, *totals)


def _work(connection: Connection, settings: WorkSettings, totals: Any) -> None:
    """Do units from the connection until it closes. `totals`: documents and tokens made by all
    processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent process handles and reports it
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()

    def count(documents: int, tokens: int) -> None:
        with totals.get_lock():
            totals[0] += documents
            totals[1] += tokens

    with contextlib.suppress(EOFError):
        while True:
            unit, error = connection.recv(), None
            try:
                do_unit(unit, settings, count)
            except Exception as raised:  # the parent process raises it
                error = raised
            connection.send(error)
