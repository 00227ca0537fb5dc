"""Makes a data set: divides the sources into units of work, distributes these over processes, and
renames the result into place.

An unfinished data set is in FOLDER.partial: `plan.json` lists the units, `units/` has a report of
each finished unit, and `dataset/` is renamed to FOLDER at the end. If the command is killed at any
moment, the same command continues with the missing units. The result is the same to the byte for
any number of processes, because every unit writes its documents to its own shards, in order.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

import tokenizers
from tokenizers import Tokenizer

import lather
from lather.cores import num_cores
from lather.data.dataset import FILES, MANIFEST, NOTES, SKIPPED, TOKENIZER, DataSet, Manifest, Split
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.recipe import DataRecipe
from lather.data.sources import ReadUnit, SourceFile, SplitName, divide, kind_instead, list_files
from lather.data.work import (
    SPLITS,
    Making,
    Progress,
    UnitReport,
    do_units,
    documents_of,
    is_done,
    report_path,
)
from lather.errors import DataError
from lather.files import digest_of, read_text, reason, sha256, sync, write_aside
from lather.formats import DATA_SET

FRUITLESS = "fruitless"
"""File in a folder that is being made, if it has no document: then other options may follow."""
TOKENIZER_CHARACTERS = 64 << 20
"""A tokenizer is trained on about this number of characters, spread over the units."""
Note = Callable[[str], None]


@dataclass(frozen=True)
class MakingPlan:
    """The files and units of work of a data set."""

    recipe: DataRecipe
    digest: str
    """Digest of the recipe and the files (`DataRecipe.digest`)."""
    files: list[SourceFile]
    listing: str
    """Digest of the files' names, sizes and times (`listing_of`)."""
    skipped: list[tuple[str, str, str]]
    """Files that are not read: path, reason, detail."""
    left_out: dict[str, int]
    """Number of files and folders that are not asked for, by reason."""
    units: list[ReadUnit]


@dataclass
class Listing:
    """The files of all sources, in order, and what is not among them, as in `SourceListing`."""

    files: list[tuple[SplitName, SourceFile]] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def list_sources(recipe: DataRecipe) -> Listing:
    """List the files of all sources, in order. Raises DataError if a source is missing, or if token
    files and texts are mixed."""
    listing = Listing()
    sources: list[tuple[SplitName, str]] = [("train", source) for source in recipe.sources]
    sources += [("validation", source) for source in recipe.validation]
    for split, source in sources:
        found = list_files(source, recipe)
        listing.files += [(split, file) for file in found.files]
        listing.skipped += found.skipped
        listing.left_out += found.left_out
    if len({file.kind == "tokens" for _, file in listing.files}) > 1:
        raise DataError(
            "some sources are token files and others texts: make a data set of each, and mix them "
            "by data.weights"
        )
    return listing


def listing_of(files: list[tuple[SplitName, SourceFile]]) -> str:
    """Return a short digest of the files' names, sizes and times."""
    entries = [(split, file.name, file.kind, file.size, file.changed) for split, file in files]
    return digest_of(entries)[:12]


def make_plan(recipe: DataRecipe) -> MakingPlan:
    """Divide the sources into units of work. Raises DataError if a source is missing, or the recipe
    lacks a tokenizer and its size."""
    sources = list_sources(recipe)
    files = sources.files
    if not (recipe.tokenizer or recipe.vocab_size):
        raise DataError(
            "neither tokenizer nor vocab_size is given: give a tokenizer.json, or a size (for "
            "texts, a tokenizer of that size is trained)"
        )
    others = {
        file.path: f"{kind}, not {file.kind}" for _, file in files if (kind := kind_instead(file))
    }
    units = divide([(split, file) for split, file in files if file.path not in others], recipe)
    no_texts = [(path, "no text", detail) for path, detail in sorted(others.items())]
    skipped = [*sources.skipped, *no_texts]
    listing = listing_of(files)
    return MakingPlan(
        recipe,
        recipe.digest(listing),
        [file for _, file in files],
        listing,
        skipped,
        dict(sorted(sources.left_out.items())),
        units,
    )


def make_dataset(
    folder: Path,
    recipe: DataRecipe,
    note: Note,
    workers: int = 0,
    progress: Progress = lambda *counts: None,
) -> DataSet:
    """Make the data set, or continue to make it. `note` shows a line; `workers`: number of
    processes; 0: one per core.

    Raises DataError if sources are missing or have changed, no document can be used, or the folder
    exists already. Finished units are kept."""
    partial = folder.with_name(folder.name + ".partial")
    if folder.exists() and not (partial / "plan.json").exists():
        raise DataError(f"{folder} exists already: give another folder, or delete it")
    with _locked(partial, note):
        if (
            folder / MANIFEST
        ).exists():  # another process has made it, or was killed just before its end
            shutil.rmtree(partial, ignore_errors=True)
            return DataSet(folder)
        try:
            plan = make_plan(recipe)
            _adopt_plan(partial, plan)
            _make(partial, folder, plan, note, workers, progress)
        except OSError as error:
            for name in (FILES, SKIPPED, NOTES):  # which are not written aside
                (partial / "dataset" / name).unlink(missing_ok=True)
            where = error.filename or partial
            raise DataError(
                f"{where}: {reason(error, Path(where))}: free space, or correct the error; "
                f"the same command continues with the finished units in {partial}"
            ) from None
        finally:
            if not (partial / "plan.json").exists():
                shutil.rmtree(partial, ignore_errors=True)
    return DataSet(folder)


def _make(
    partial: Path, folder: Path, plan: MakingPlan, note: Note, workers: int, progress: Progress
) -> None:
    """Do the missing units, then rename the data set into place."""
    aside, units = partial / "dataset", partial / "units"
    for one in (aside, units):
        one.mkdir(exist_ok=True)
    making = _making(plan.recipe, _tokenizer(plan, aside, note), aside, units)
    missing = [unit for unit in plan.units if not is_done(unit, aside, units)]
    if len(missing) < len(plan.units):
        note(f"continuing: {len(plan.units) - len(missing)} of {len(plan.units)} units are done")
    do_units(missing, len(plan.units), making, workers or num_cores(), progress)
    _complete(plan, making)
    aside.rename(folder)
    sync(folder.parent)
    shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(partial: Path, note: Note) -> Iterator[None]:
    """Hold the lock under which only one process at a time makes the data set; the others wait."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = (partial / ".lock").open("a")
    except OSError as error:
        raise DataError(
            f"{partial} cannot be written ({reason(error, partial)}): give another folder"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"waiting for another process, which is making {partial.with_suffix('')}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _adopt_plan(partial: Path, plan: MakingPlan) -> None:
    """Write the plan, or check that it equals the plan of an earlier start."""
    mapping = {"format": DATA_SET.number, **asdict(plan)}
    del mapping["left_out"]  # which may change
    file, text = partial / "plan.json", json.dumps(mapping, indent=1)
    if not file.exists():
        write_aside(file, text)
    elif read_text(file) != text and (partial / FRUITLESS).exists():
        for one in (partial / "dataset", partial / "units"):
            shutil.rmtree(one, ignore_errors=True)
        (partial / FRUITLESS).unlink()
        write_aside(file, text)
    elif read_text(file) != text:
        raise DataError(
            f"{partial} was started with other options, or its sources have changed since: delete "
            "it to start again"
        )


# --- tokenizer ------------------------------------------------------------------------------------


def _tokenizer(plan: MakingPlan, folder: Path, note: Note) -> Tokenizer | None:
    """Load or train the tokenizer, and copy it to the folder; None for token files without one.
    Raises DataError if it is not usable."""
    recipe, kept, given = plan.recipe, folder / TOKENIZER, plan.recipe.tokenizer_file
    if not kept.exists():
        if given is not None:
            tokenizer = load_tokenizer(
                given, "tokenizer must be a tokenizer.json, a folder that has one, or empty"
            )
            note(f"tokenizer: {given}")
        elif plan.files[0].kind == "tokens":
            return None
        else:
            note(f"tokenizer: byte-level BPE of {recipe.vocab_size} tokens, trained on the texts")
            tokenizer = train_tokenizer(
                _texts_for_tokenizer(plan), recipe.vocab_size, recipe.end_of_text
            )
        write_aside(kept, tokenizer.to_str(pretty=True))
    return load_tokenizer(kept, f"delete {folder.parent} to start again")


def _texts_for_tokenizer(plan: MakingPlan) -> Iterator[str]:
    """Yield the first texts of each unit, for training a tokenizer; one of `holdout_every` is left
    out, even if it is not held out."""
    recipe, template = replace(plan.recipe, validation=()), plan.recipe.chat_template()
    units = [unit for unit in plan.units if unit.split == "train"]
    for unit in units:
        characters = 0
        for document in documents_of(unit, recipe, template, UnitReport()):
            if document.split == "train":
                yield document.text
                characters += len(document.text)
                if characters * len(units) > TOKENIZER_CHARACTERS:
                    break


def _making(recipe: DataRecipe, tokenizer: Tokenizer | None, folder: Path, units: Path) -> Making:
    if tokenizer is None:
        vocab_size, end = recipe.vocab_size, recipe.end_token if recipe.end_token >= 0 else None
    else:
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
    return Making(recipe, folder, units, vocab_size, end, recipe.chat_template())


# --- the end --------------------------------------------------------------------------------------


@dataclass
class _Outcome:
    """Documents and tokens by split, and numbers of what was skipped, noted and read, by kind."""

    splits: dict[str, Split] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    encodings: Counter[str] = field(default_factory=Counter)
    first: str = ""
    """Path and detail of the first skipped document that has a detail."""


def _no_document(skipped: Counter[str], where: str) -> str:
    """Say why there is no document to train on, where it is listed, and which option may help."""
    reasons = (
        "; ".join(f"{count:,} x {reason}" for reason, count in skipped.most_common(3))
        or "there is none"
    )
    remedy = ""
    if any(reason.startswith(("no field", "no such column")) for reason in skipped):
        remedy = "; --field NAME takes another field, --chat conversations"
    return f"no document can be trained on ({reasons}): {where}{remedy}"


def _complete(plan: MakingPlan, making: Making) -> None:
    """Write the lists of files and skipped documents, and last the manifest. Raises DataError if
    there is no document to train on."""
    folder = making.folder
    files = ({"name": file.name, "kind": file.kind, "bytes": file.size} for file in plan.files)
    (folder / FILES).write_text("".join(json.dumps(file) + "\n" for file in files), "utf-8")
    with (
        (folder / SKIPPED).open("w", encoding="utf-8") as skipped,
        (folder / NOTES).open("w", encoding="utf-8") as noted,
    ):
        counts = _write_lists(plan, making, skipped, noted)
        for written in (skipped, noted):
            written.flush()
            os.fsync(written.fileno())
    if not counts.notes:
        (folder / NOTES).unlink()
    if "train" not in counts.splits:
        (folder.parent / FRUITLESS).touch()
        where = f"{counts.first}{folder / SKIPPED} has every file and line"
        raise DataError(_no_document(counts.skipped, where))
    manifest = Manifest(
        vocab_size=making.vocab_size,
        end_of_text=plan.recipe.end_of_text if (folder / TOKENIZER).exists() else "",
        end_token=making.end,
        tokenizer_sha256=sha256(folder / TOKENIZER) if (folder / TOKENIZER).exists() else "",
        made_from={
            "recipe": asdict(plan.recipe),
            "files": len(plan.files),
            "bytes": sum(max(0, one.size) for one in plan.files),
            "listing": plan.listing,
            "left_out": plan.left_out,
            "chat_template": making.template.source if making.template else "",
            "libraries": {"lather": lather.__version__, "tokenizers": tokenizers.__version__},
        },
        splits={name: counts.splits[name] for name in SPLITS if name in counts.splits},
        skipped=dict(sorted(counts.skipped.items())),
        encodings=dict(sorted(counts.encodings.items())),
        notes=dict(sorted(counts.notes.items())),
    )
    write_aside(folder / MANIFEST, manifest.to_json())


def _write_lists(plan: MakingPlan, making: Making, skipped: TextIO, noted: TextIO) -> _Outcome:
    """Write the lists of what was skipped and noted from the units' reports, and count all."""
    counts = _Outcome()
    for path, why, detail in _skipped_files(plan):
        _write_skip(skipped, path, 0, why, detail)
        counts.skipped[why] += 1
    lines = Counter[str]()  # of each file, in its parts so far
    for unit in plan.units:
        report = UnitReport.read(report_path(making.units, unit.number))
        befores = []
        for part, count in zip(unit.parts, report.lines, strict=True):
            befores.append(lines[part.path])
            lines[part.path] += count
        for number, line, why, detail in report.skipped:
            path = unit.parts[number].path
            _write_skip(skipped, path, line and befores[number] + line, why, detail)
            counts.skipped[why] += 1
            counts.first = counts.first or (detail and f"{path}: {detail}; ")
        for number, line, kind, detail in report.notes:
            _write_skip(noted, unit.parts[number].path, befores[number] + line, kind, detail)
            counts.notes[kind] += 1
        for name, found in report.splits.items():
            counts.splits[name] = counts.splits.get(name, Split()) + found
        counts.encodings.update(report.encodings)
    return counts


def _skipped_files(plan: MakingPlan) -> list[tuple[str, str, str]]:
    """Return the files that are not read, and those that have changed since they were listed."""
    fault = "changed while it was read", "its size or time is another one"
    return [*plan.skipped, *((file.path, *fault) for file in plan.files if file.has_changed)]


def _write_skip(file: TextIO, path: str, line: int, reason: str, detail: str) -> None:
    file.write(json.dumps({"file": path, "line": line, "reason": reason, "detail": detail}) + "\n")
