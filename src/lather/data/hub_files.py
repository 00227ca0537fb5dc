"""Data sets of a Hugging Face hub by address: the files that are read, and their commit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from lather.data.config import DataConfig
from lather.data.recipe import DataRecipe
from lather.errors import DataError
from lather.hub import SCHEME, Address, open_repository, pinned

RECORDS = [f"*.{kind}{end}" for kind in ("jsonl", "ndjson", "txt") for end in ("", ".gz", ".zst")]
RECORDS += ["*.parquet"]
"""Globs of the files that are read where no pattern is given."""
OTHER_SPLITS = ("dev", "eval", "test", "val", "valid", "validation")
NOT_TRAIN = [f"{start}{split}[-._/0-9]*" for split in OTHER_SPLITS for start in ("", "*[-._/]")]
"""Globs of the files of other splits than train, by the names that `datasets` knows."""


def fetch_files(source: str, pattern: str) -> tuple[Path, list[str], Counter[str]]:
    """Download the files of an address; return their folder, their names in it, in order, and the
    number of files that were left out, by reason.

    Where the address names a repository or folder, these are the files with the pattern, or all
    records of text if it is "*". Without a path in the address, files of other splits than train
    are left out. Raises DataError if there is no such file, HubError as `open_repository` does.
    """
    repository = open_repository(Address.parse(source, "dataset"))
    path = repository.address.path
    folder, names = f"{path}/" if path else "", RECORDS if pattern == "*" else [pattern]
    taken = [path, *(f"{folder}{start}{name}" for name in names for start in ("", "*/"))]
    left_out = [] if path else NOT_TRAIN
    files = repository.matching(taken, left_out)
    others = len(repository.matching(taken)) - len(files)
    if not files:
        besides = f" but {others:,} of other splits than train" if others else ""
        endings = Counter(Path(name).suffix or name for name in repository.sizes).most_common(5)
        there = ", ".join(f"{count:,} {ending}" for ending, count in endings)
        raise DataError(
            f"{repository.address}: no file of text records matches{besides}: the repository has "
            f"{there}: give a path or a pattern, such as "
            f"{replace(repository.address, path='*.json')}"
        )
    reasons = Counter({"file of another split than train": others}) if others else Counter[str]()
    return repository.fetch(taken, left_out), files, reasons


def pinned_recipe(recipe: DataRecipe) -> DataRecipe:
    """Return the recipe with the present commit in each address of a hub."""

    def commit(source: str) -> str:
        is_of_hub = source.startswith(SCHEME)
        return str(pinned(Address.parse(source, "dataset"))) if is_of_hub else source

    return replace(
        recipe,
        sources=tuple(map(commit, recipe.sources)),
        validation=tuple(map(commit, recipe.validation)),
    )


def pinned_data(data: DataConfig, before: DataConfig | None = None) -> DataConfig:
    """Return the data of a run, with the commit of a source on a hub: that of an earlier start,
    `before`, if the source is the same, or else the present one."""
    if data.path or data.revision or not data.source.startswith(SCHEME):
        return data
    if before is not None and before.revision and before.source == data.source:
        return replace(data, revision=before.revision)
    return replace(data, revision=pinned(Address.parse(data.source, "dataset")).revision)
