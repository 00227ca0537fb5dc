"""Makes a data set: divides the sources into units of work, distributes these over processes, and
renames the result into place.

An unfinished data set is in FOLDER.partial: `plan.json` has the options and digests of sources and
units, `units/` a report of each finished unit, and `dataset/` is renamed to FOLDER at the end. If
the command is killed at any moment, the same command continues with the missing units. The result
is the same to the byte for any number of processes, because every unit writes its documents to its
own shards, in order.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import tokenizers
from tokenizers import Tokenizer

import lather
from lather.cores import num_cores
from lather.data.dataset import FILES, MANIFEST, NOTES, SKIPPED, TOKENIZER, DataSet, Manifest, Split
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.recipe import LEAST_TRAINED, DataRecipe
from lather.data.sources import Listing, ReadUnit, divide, kind_instead, list_sources
from lather.data.work import (
    SPLITS,
    Progress,
    UnitReport,
    WorkSettings,
    do_units,
    documents_of,
    is_done,
    report_path,
)
from lather.errors import DataError, require
from lather.files import digest_of, read_text, reason, sha256, sync, write_aside
from lather.formats import DATA_SET

PLAN = "plan.json"
TOKENIZER_CHARACTERS = 64 << 20
"""A tokenizer is trained on about this number of characters, spread over the units."""
ShowLine = Callable[[str], None]


@dataclass(frozen=True)
class Division:
    """The files and units of work of a data set."""

    recipe: DataRecipe
    sources: Listing
    units: list[ReadUnit]


def divide_sources(recipe: DataRecipe) -> Division:
    """Divide the sources into units of work. Raises DataError if a source is missing, or the recipe
    lacks a tokenizer and its size."""
    sources = list_sources(recipe)
    if not (recipe.tokenizer or recipe.vocab_size):
        raise DataError(
            "neither tokenizer nor vocab_size is given: give a tokenizer.json, or a size (for "
            "texts, a tokenizer of that size is trained)"
        )
    is_trained = not recipe.tokenizer and not are_tokens(recipe, sources)
    is_enough = not is_trained or recipe.vocab_size >= LEAST_TRAINED
    constraint = f"at least {LEAST_TRAINED} for byte-level BPE, or give a tokenizer"
    require(is_enough, "vocab_size", recipe.vocab_size, constraint)
    kinds = {file.path: kind for file in sources.files if (kind := kind_instead(file))}
    units = divide([file for file in sources.files if file.path not in kinds], recipe)
    sources.skipped += sorted(
        (file.path, "no text", f"{kinds[file.path]}, not {file.kind}")
        for file in sources.files
        if file.path in kinds
    )
    return Division(recipe, sources, units)


def are_tokens(recipe: DataRecipe, sources: Listing) -> bool:
    """Return whether the sources are tokens already, for which no tokenizer is trained."""
    return recipe.token_rows or sources.files[0].kind == "tokens"


def make_dataset(
    folder: Path,
    recipe: DataRecipe,
    show_line: ShowLine,
    workers: int = 0,
    progress: Progress = lambda *counts: None,
) -> DataSet:
    """Make the data set, or continue to make it. `show_line` shows a line; `workers`: number of
    processes; 0: one per core.

    Raises DataError if sources are missing or have changed, no document can be used, or the folder
    exists already. Finished units are kept."""
    partial = folder.with_name(folder.name + ".partial")
    if folder.exists() and not (partial / PLAN).exists():
        raise DataError(f"{folder} exists already: give another folder, or delete it")
    with _locked(partial, show_line):
        if (folder / MANIFEST).exists():  # by another process, or one that was killed at its end
            shutil.rmtree(partial, ignore_errors=True)
            return DataSet(folder)
        try:
            division = divide_sources(recipe)
            _adopt_plan(partial, division)
            _make(partial, folder, division, show_line, workers, progress)
        except OSError as error:
            for name in (FILES, SKIPPED, NOTES):  # which are not written aside
                (partial / "dataset" / name).unlink(missing_ok=True)
            where = error.filename or partial
            raise DataError(
                f"{where}: {reason(error, Path(where))}: free space, or correct the error; "
                f"the same command continues with the finished units in {partial}"
            ) from None
        finally:
            if not any((partial / name).exists() for name in (PLAN, "dataset")):
                shutil.rmtree(partial, ignore_errors=True)
    return DataSet(folder)


def _make(
    partial: Path,
    folder: Path,
    division: Division,
    show_line: ShowLine,
    workers: int,
    progress: Progress,
) -> None:
    """Do the missing units, then rename the data set into place."""
    aside, units = partial / "dataset", partial / "units"
    for path in (aside, units):
        path.mkdir(exist_ok=True)
    settings = _settings(division.recipe, _tokenizer(division, aside, show_line), aside, units)
    missing = [unit for unit in division.units if not is_done(unit, aside, units)]
    total = len(division.units)
    if len(missing) < total:
        show_line(f"continuing: {total - len(missing)} of {total} units are done")
    do_units(missing, total, settings, workers or num_cores(), progress)
    _complete(division, settings)
    aside.rename(folder)
    sync(folder.parent)
    shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(partial: Path, show_line: ShowLine) -> Iterator[None]:
    """Hold the lock under which only one process at a time makes the data set; the others wait."""
    try:
        lock = _open_lock(partial)
        if not _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            show_line(f"waiting for another process, which is making {partial.with_suffix('')}")
            _lock(lock, fcntl.LOCK_EX)
        while not _is_at(lock, partial / ".lock"):  # removed with the folder during the wait
            lock.close()
            lock = _open_lock(partial)
            _lock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise DataError(
            f"{partial} cannot be written ({reason(error, partial)}): give another folder"
        ) from None
    with lock:
        yield


def _lock(lock: TextIO, operation: int) -> bool:
    """Take the lock; returns False if another process holds it and the operation does not wait."""
    try:
        fcntl.flock(lock, operation)
    except BlockingIOError:
        return False
    return True


def _is_at(file: TextIO, path: Path) -> bool:
    """Tell whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _open_lock(partial: Path) -> TextIO:
    """Open the file of the lock, in a folder that another process may remove at any moment because
    it has made the data set."""
    for _ in range(100):
        partial.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return (partial / ".lock").open("a")
    raise FileNotFoundError(errno.ENOENT, "removed again and again", str(partial))


def _adopt_plan(partial: Path, division: Division) -> None:
    """Write the options and the digests, or check that they equal those of an earlier start."""
    file = partial / PLAN
    content = {
        "format": DATA_SET.number,
        "recipe": asdict(division.recipe),
        "digest": division.recipe.digest(division.sources.digest),
        "units": digest_of([asdict(unit) for unit in division.units]),
    }
    text = json.dumps(content, indent=1)
    if not file.exists():  # an earlier start without documents has left lists and units
        for folder in (partial / "dataset", partial / "units"):
            shutil.rmtree(folder, ignore_errors=True)
        write_aside(file, text)
    elif read_text(file) != text:
        raise DataError(
            f"{partial} was started with other options, or its sources have changed since: delete "
            "it to start again"
        )


# --- tokenizer ------------------------------------------------------------------------------------


def _tokenizer(division: Division, folder: Path, show_line: ShowLine) -> Tokenizer | None:
    """Load or train the tokenizer, and copy it to the folder; None for token files without one.
    Raises DataError if it is not usable."""
    recipe, file, source = division.recipe, folder / TOKENIZER, division.recipe.tokenizer_file
    if not file.exists():
        if source is not None:
            tokenizer = load_tokenizer(
                source, "tokenizer must be a tokenizer.json, a folder that has one, or empty"
            )
            show_line(f"tokenizer: {source}")
        elif are_tokens(recipe, division.sources):
            return None
        else:
            show_line(
                f"tokenizer: byte-level BPE of {recipe.vocab_size} tokens, trained on the texts"
            )
            texts = _texts_for_tokenizer(division)
            try:
                tokenizer = train_tokenizer(texts, recipe.vocab_size, recipe.end_of_text)
            except DataError:  # a start with other options may follow
                (folder.parent / PLAN).unlink()
                raise
        write_aside(file, tokenizer.to_str(pretty=True))
    return load_tokenizer(file, f"delete {folder.parent} to start again")


def _texts_for_tokenizer(division: Division) -> Iterator[str]:
    """Yield the first texts of each unit, for training a tokenizer; one of `holdout_every` is left
    out, even if it is not held out."""
    recipe, template = replace(division.recipe, validation=()), division.recipe.chat_template()
    units = [unit for unit in division.units if unit.split == "train"]
    for unit in units:
        characters = 0
        for document in documents_of(unit, recipe, template, UnitReport()):
            if document.split == "train":
                yield document.text
                characters += len(document.text)
                if characters * len(units) > TOKENIZER_CHARACTERS:
                    break


def _settings(
    recipe: DataRecipe, tokenizer: Tokenizer | None, folder: Path, units: Path
) -> WorkSettings:
    vocab_size, end = recipe.vocab_size, recipe.end_token if recipe.end_token >= 0 else None
    if tokenizer is not None:
        highest = max(tokenizer.get_vocab().values(), default=-1)
        vocab_size = recipe.vocab_size or highest + 1
        if highest >= vocab_size:
            raise DataError(
                f"tokenizer = {recipe.tokenizer!r} has token {highest}, but vocab_size is "
                f"{vocab_size}: give at least {highest + 1}"
            )
        end = tokenizer.token_to_id(recipe.end_of_text)
        if end is None:
            raise DataError(
                f"end_of_text = {recipe.end_of_text!r} is not a token of {recipe.tokenizer}: give "
                "its token that ends a document"
            )
    return WorkSettings(recipe, folder, units, vocab_size, end, recipe.chat_template())


# --- the end --------------------------------------------------------------------------------------


def _complete(division: Division, settings: WorkSettings) -> None:
    """Write the lists of files and skipped documents, and last the manifest. Raises DataError if
    there is no document to train on."""
    folder, sources, total = settings.folder, division.sources, UnitReport()
    files = ({"name": file.name, "kind": file.kind, "bytes": file.size} for file in sources.files)
    (folder / FILES).write_text("".join(json.dumps(file) + "\n" for file in files), "utf-8")
    with _list(folder / SKIPPED) as skip, _list(folder / NOTES) as note:
        skipped, notes, first = _write_lists(division, settings, total, skip, note)
    if not notes:
        (folder / NOTES).unlink()
    if "train" not in total.splits:
        (folder.parent / PLAN).unlink()
        reasons = "; ".join(f"{count:,} x {reason}" for reason, count in skipped.most_common(3))
        is_column = any(reason.startswith(("no field", "no such column")) for reason in skipped)
        remedy = "; --field NAME takes another field, --chat conversations" if is_column else ""
        raise DataError(
            f"no document can be trained on ({reasons or 'there is none'}): {first}"
            f"{folder / SKIPPED} has every file and line{remedy}"
        )
    has_tokenizer = (folder / TOKENIZER).exists()
    manifest = Manifest(
        vocab_size=settings.vocab_size,
        end_of_text=division.recipe.end_of_text if has_tokenizer else "",
        end_token=settings.end,
        tokenizer_sha256=sha256(folder / TOKENIZER) if has_tokenizer else "",
        made_from={
            "recipe": asdict(division.recipe),
            "files": len(sources.files),
            "bytes": sum(max(0, file.size) for file in sources.files),
            "listing": sources.digest,
            "left_out": dict(sorted(sources.left_out.items())),
            "chat_template": settings.template.source if settings.template else "",
            "libraries": {"lather": lather.__version__, "tokenizers": tokenizers.__version__},
        },
        splits={name: total.splits[name] for name in SPLITS if name in total.splits},
        skipped=dict(sorted(skipped.items())),
        encodings=dict(sorted(total.encodings.items())),
        notes=dict(sorted(notes.items())),
    )
    write_aside(folder / MANIFEST, manifest.to_json())


AddRow = Callable[[str, int, str, str], None]
"""Writes a row: path of the file, line, reason, detail."""


@contextlib.contextmanager
def _list(path: Path) -> Iterator[AddRow]:
    """Write a list of documents and files, which is synced at the end."""
    with path.open("w", encoding="utf-8") as file:

        def add(path: str, line: int, reason: str, detail: str) -> None:
            row = {"file": path, "line": line, "reason": reason, "detail": detail}
            file.write(json.dumps(row) + "\n")

        yield add
        file.flush()
        os.fsync(file.fileno())


def _write_lists(
    division: Division, settings: WorkSettings, total: UnitReport, skip: AddRow, note: AddRow
) -> tuple[Counter[str], Counter[str], str]:
    """Write the lists of skipped documents and of notes from the units' reports, and add their
    splits and encodings to `total`. Return the counts of both lists by reason, and path and detail
    of the first skipped document that has a detail."""
    skipped, notes, first = Counter[str](), Counter[str](), ""
    changed = [file.path for file in division.sources.files if file.has_changed]
    fault = "changed while it was read", "its size or time is another one"
    for path, why, detail in [*division.sources.skipped, *((path, *fault) for path in changed)]:
        skip(path, 0, why, detail)
        skipped[why] += 1
    lines = Counter[str]()  # of each file, in its parts so far
    for unit in division.units:
        report = UnitReport.read(report_path(settings.units, unit.number))
        befores = []
        for part, count in zip(unit.parts, report.lines, strict=True):
            befores.append(lines[part.path])
            lines[part.path] += count
        for number, line, why, detail in report.skipped:
            path = unit.parts[number].path
            skip(path, line and befores[number] + line, why, detail)
            skipped[why] += 1
            first = first or (detail and f"{path}: {detail}; ")
        for number, line, kind, detail in report.notes:
            note(unit.parts[number].path, befores[number] + line, kind, detail)
            notes[kind] += 1
        for name, split in report.splits.items():
            total.splits[name] = total.splits.get(name, Split()) + split
        for name, count in report.encodings.items():
            total.encodings[name] = total.encodings.get(name, 0) + count
    return skipped, notes, first
