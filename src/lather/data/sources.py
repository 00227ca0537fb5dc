"""The sources of a data set: lists their files, recognizes the files' kinds, and divides the files
into units of work.

A source is a file, a folder, "python-stdlib", "package:NAME", a folder saved by Hugging Face's
`datasets`, hf:NAME[@CONFIG]#SPLIT, or an address of a hub (`lather.hub`). The division depends only
on the files and the options, so that the data set does not depend on the number of processes or on
interruptions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lather.data.hub_files import fetch_files
from lather.data.recipe import DataRecipe
from lather.data.records import (
    COMPRESSED,
    PIECE_BYTES,
    FilePart,
    Kind,
    first_bytes,
    open_huggingface,
    open_parquet,
    overlaps_itself,
)
from lather.data.texts import has_plain_line_ends, kind_of_bytes
from lather.data.walk import KINDS, FolderWalk
from lather.errors import DataError
from lather.files import digest_of
from lather.hub import SCHEME

SplitName = Literal["train", "validation"]
STDLIB_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
"""Folders of the standard library that are left out: tests, installed packages, and generated
tables."""
ENDINGS: dict[Kind, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "tokens": (".npy", ".bin", ".idx", ".ds"),
}
"""Endings of the names of files that are not text."""
LEAST_UNIT_BYTES, MOST_UNIT_BYTES, UNITS = 32 << 20, 256 << 20, 64
"""Minimal and maximal bytes of a unit of work, and the number of units to aim for within these
limits."""
RANGE_BYTES = PIECE_BYTES
"""Byte ranges of text and JSONL files begin at multiples of this number."""
MOST_ENDINGS = 5
SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    path: str
    kind: Kind
    size: int
    """Bytes."""
    changed: int
    """Time of the last change, in nanoseconds."""
    name: str
    """Path relative to the source's folder."""
    split: SplitName = "train"

    @property
    def has_changed(self) -> bool:
        """Whether the file has another size or time than when it was listed. A lost file counts as
        unchanged: its reader reports it."""
        if self.kind == "huggingface":
            return False
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) != (self.size, self.changed)


@dataclass(frozen=True)
class ReadUnit:
    """A unit of work, which one process reads; its documents go to its own shards."""

    number: int
    split: SplitName
    parts: tuple[FilePart, ...]


@dataclass
class Listing:
    """The files of all sources, in order, and what is not among them."""

    files: list[SourceFile] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    """Files and folders that cannot be read, or are read by another path: path, reason, detail."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of files and folders that are not asked for, by reason."""

    @property
    def digest(self) -> str:
        """A short digest of the files' names, sizes and times."""
        entries = [(f.split, f.name, f.kind, f.size, f.changed) for f in self.files]
        return digest_of(entries)[:12]


def list_sources(recipe: DataRecipe) -> Listing:
    """List the files of all sources, in order. Raises DataError if a source is missing or has no
    file, or if token files and texts are mixed."""
    listing = Listing()
    for source in recipe.sources:
        _list_source(source, "train", recipe, listing)
    for source in recipe.validation:
        _list_source(source, "validation", recipe, listing)
    if len({file.kind == "tokens" for file in listing.files}) > 1:
        raise DataError(
            "some sources are token files and others texts: make a data set of each, and mix them "
            "by data.weights"
        )
    return listing


def _list_source(source: str, split: SplitName, recipe: DataRecipe, listing: Listing) -> None:
    """Add the files of a source, sorted by name, to the listing."""
    if source.startswith(SCHEME):
        root, names, left_out_files = fetch_files(source, recipe.pattern)
        paths = [root / name for name in names if not _is_index(root / name)]
        listing.files += [_file(path, root, recipe, split, is_named=True) for path in paths]
        listing.left_out += left_out_files
        return
    folder = Path(source.partition("#")[0])
    is_saved_by_datasets = any(os.path.isfile(folder / name) for name in SAVED_BY_DATASETS)
    if source.startswith("hf:") or recipe.format == "huggingface" or is_saved_by_datasets:
        # a data set of the hub has no files here
        stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
        size = sum(stat.st_size for stat in stats) if stats else -1
        changed = max((stat.st_mtime_ns for stat in stats), default=0)
        listing.files.append(SourceFile(source, "huggingface", size, changed, source, split))
        return
    root, left_out = root_of(source)
    if root.is_file():
        listing.files.append(_file(root, root.parent, recipe, split, is_named=True))
        return
    walk = FolderWalk(root, recipe.pattern, left_out)
    try:
        walk.list()
    except OSError as error:
        raise DataError(f"{root}: cannot be read ({error.strerror}): give another folder") from None
    files = []
    for path in walk.files:
        if not _is_index(path):
            try:
                files.append(_file(path, root, recipe, split))
            except OSError as error:  # it has vanished
                walk.skipped.append((str(path), "cannot be read", error.strerror or ""))
    if others := sum(not _is_index(path) for path in walk.others):
        walk.left_out[f"not {recipe.pattern}"] += others
    if not files:
        pattern = f"the pattern {recipe.pattern!r}"
        raise DataError(f"{root}: no file matches {pattern}: {_what_else(walk)}")
    listing.files += files
    listing.skipped += walk.skipped
    listing.left_out += walk.left_out


def _is_index(path: Path) -> bool:
    """Tell whether the file belongs to a token file beside it."""
    if path.suffix == ".idx":
        return path.with_suffix(".bin").exists()
    return path.stem.endswith(".ds") and path.with_suffix("").exists()


def _what_else(walk: FolderWalk) -> str:
    """Return the remedy for a folder of which no file is taken: the endings of its other files, or
    what cannot be read."""
    endings = sorted(path.suffix or path.name for path in walk.others if not _is_index(path))
    if counts := Counter(endings).most_common(MOST_ENDINGS):
        named = ", ".join(f"{count:,} {ending}" for ending, count in counts)
        example = f"'*{counts[0][0]}'"
        return f"there are {named}: give another pattern, such as {example}, or another folder"
    if walk.skipped:
        path, reason, detail = walk.skipped[0]
        more = f", and {len(walk.skipped) - 1:,} more" if len(walk.skipped) > 1 else ""
        return f"there are {path} ({reason}: {detail}){more}: correct this, or give another folder"
    return "the folder has no files: give another one"


def _file(
    path: Path, root: Path, recipe: DataRecipe, split: SplitName, *, is_named: bool = False
) -> SourceFile:
    """Describe a file. `is_named`: the file itself is given as a source; only then is a .json file
    read as records, because a .json file in a folder of source code is text."""
    suffix = Path(path.name.removesuffix(".gz").removesuffix(".zst")).suffix.lower()
    kind: Kind = next((kind for kind, endings in ENDINGS.items() if suffix in endings), "text")
    if is_named and suffix == ".json":
        kind = "json"
    if recipe.format != "auto":
        kind = recipe.format
    if kind in ("parquet", "tokens") and path.suffix in COMPRESSED:
        raise DataError(f"{path}: {kind} files cannot be read compressed: unpack it")
    status, name = path.stat(), path.relative_to(root).as_posix()
    return SourceFile(str(path), kind, status.st_size, status.st_mtime_ns, name, split)


def root_of(source: str) -> tuple[Path, set[str]]:
    """Return the file or folder of a source, and the names of subfolders that are left out."""
    if source == "python-stdlib":
        return Path(sysconfig.get_paths()["stdlib"]), STDLIB_LEFT_OUT
    kind, colon, name = source.partition(":")
    if kind == "package" and colon:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            for folder in (spec and spec.submodule_search_locations) or ():
                return Path(folder), {"__pycache__"}
        raise DataError(
            f"no package {name!r} is installed here: install it, or give another package or a "
            "folder"
        )
    try:
        mode = os.stat(source).st_mode
    except (FileNotFoundError, NotADirectoryError):
        link = f" (a link to {os.readlink(source)})" if os.path.islink(source) else ""
        raise DataError(
            f"{source}{link}: no such file or folder: give one that has text, JSONL, Parquet or "
            "tokens, or 'python-stdlib', 'package:NAME' or 'hf://ORG/NAME'"
        ) from None
    except OSError as error:
        raise DataError(
            f"{source}: cannot be read ({error.strerror}): give another source"
        ) from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "of another kind")
        raise DataError(
            f"{source}: it is {kind}, which cannot be read twice: write its text to a file, and "
            "give that"
        )
    return Path(source), {"__pycache__"}


# --- units ----------------------------------------------------------------------------------------


def divide(files: list[SourceFile], recipe: DataRecipe) -> list[ReadUnit]:
    """Divide the files, in order, into units of work."""
    unit_bytes = sum(file.size for file in files) // UNITS
    unit_bytes = min(max(unit_bytes, LEAST_UNIT_BYTES), MOST_UNIT_BYTES)
    units: list[ReadUnit] = []
    parts: list[FilePart] = []
    filled, split = 0, files[0].split if files else "train"
    for file in files:
        for part, size in _parts(file, recipe, unit_bytes):
            if parts and (filled + size > unit_bytes or file.split != split):
                units.append(ReadUnit(len(units), split, tuple(parts)))
                parts, filled = [], 0
            parts.append(part)
            filled, split = filled + size, file.split
    return [*units, ReadUnit(len(units), split, tuple(parts))] if parts else units


def _parts(file: SourceFile, recipe: DataRecipe, unit_bytes: int) -> Iterator[tuple[FilePart, int]]:
    """Yield the parts of a file with their bytes; if the file can be cut, no part is much larger
    than a unit."""
    separator = recipe.separator if file.kind == "text" else ""
    whole = FilePart(file.path, file.kind, 0, -1, separator, recipe.encoding, recipe.columns)
    if file.kind == "parquet":
        return _ranges(whole, _num_row_groups(file.path), file.size, unit_bytes)
    if file.kind == "huggingface":
        rows = open_huggingface(file.path)
        return _ranges(whole, len(rows), int(rows.dataset_size or rows.data.nbytes), unit_bytes)
    most_bytes = unit_bytes if file.kind == "jsonl" or recipe.separator else PIECE_BYTES
    is_cut = (
        file.size > most_bytes
        and file.kind not in ("tokens", "json")
        and not file.path.endswith(COMPRESSED)
        and not overlaps_itself(recipe.separator)
        and has_plain_line_ends(first_bytes(file.path), recipe.encoding)
    )
    if is_cut:
        return _ranges(whole, file.size, file.size, unit_bytes)
    return iter([(whole, file.size)])


def _ranges(
    whole: FilePart, length: int, size: int, unit_bytes: int
) -> Iterator[tuple[FilePart, int]]:
    """Cut a file of `length` bytes, row groups or rows, and `size` bytes, into equal ranges."""
    if length <= 0:
        yield whole, size
        return
    each = max(1, length * unit_bytes // max(size, 1))
    if length == size:
        each = -(-each // RANGE_BYTES) * RANGE_BYTES
    for start in range(0, length, each):
        stop = min(start + each, length)
        yield replace(whole, start=start, stop=stop), (stop - start) * size // length


def kind_instead(file: SourceFile) -> str | None:
    """Return the actual kind of a file that would be read as text or JSON, but whose first bytes
    are of another kind."""
    if file.kind not in ("text", "jsonl", "json") or file.path.endswith(COMPRESSED):
        return None
    return kind_of_bytes(first_bytes(file.path))


def _num_row_groups(path: str) -> int:
    try:
        return int(open_parquet(path).num_row_groups)
    except DataError:
        raise
    except Exception:  # the error is reported when the file is read
        return 0
