"""A data set: a folder with shards, a tokenizer, and a manifest that describes its content and
sources.

    dataset.json            the manifest; it is written last and includes its own checksum
    tokenizer.json          the tokenizer of the texts; absent if token files came without it
    train-00000-000.npy     a shard of the split "train" (`lather.data.shards`): number of the unit
                            of work, number within the unit
    skipped.jsonl           skipped documents and files, one per line: file, line, reason
    notes.jsonl             parts of records that documents lack, in the same form; may be absent
    files.jsonl             the source files: name, kind, bytes

A folder without a manifest is not a data set; with a manifest it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lather.data.shards import ShardEntry, ShardReader, token_dtype
from lather.errors import DataError
from lather.files import digest_of, read_text, sha256, unreadable
from lather.formats import DATA_SET

MANIFEST = "dataset.json"
TOKENIZER = "tokenizer.json"
SKIPPED = "skipped.jsonl"
NOTES = "notes.jsonl"
FILES = "files.jsonl"


@dataclass(frozen=True)
class Split:
    """The manifest's entry of a split, or what a unit of work has added to it."""

    documents: int = 0
    tokens: int = 0
    longest: int = 0
    """Tokens of the longest document."""
    text_bytes: int = 0
    """UTF-8 bytes of the texts; 0 if unknown."""
    shards: list[ShardEntry] = field(default_factory=list)

    def __add__(self, other: Split) -> Split:
        return Split(
            self.documents + other.documents,
            self.tokens + other.tokens,
            max(self.longest, other.longest),
            self.text_bytes + other.text_bytes,
            self.shards + other.shards,
        )


def splits_of(mapping: dict[str, Any]) -> dict[str, Split]:
    """Return the splits that JSON describes."""
    return {
        name: Split(**{**split, "shards": [ShardEntry(**entry) for entry in split["shards"]]})
        for name, split in mapping.items()
    }


@dataclass(frozen=True)
class Manifest:
    """The description of a data set, kept in `dataset.json`."""

    vocab_size: int
    """Number of tokens in the vocabulary; every token is below it."""
    end_of_text: str
    """Text of the token after each document; empty if there is none."""
    end_token: int | None
    """Number of that token."""
    tokenizer_sha256: str
    """Checksum of `tokenizer.json`; empty if there is none."""
    made_from: dict[str, Any]
    """Sources, options, chat template and libraries."""
    splits: dict[str, Split]
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of skipped documents or files, by reason."""
    encodings: dict[str, int] = field(default_factory=dict)
    """Number of text files, by encoding."""
    notes: dict[str, int] = field(default_factory=dict)
    """Number of documents that lack something of their records, by kind."""

    @property
    def identity(self) -> str:
        """A short digest of the tokens; it does not depend on the folder or the sources."""
        splits = sorted(self.splits.items())
        checksums = [[name, [shard.checksums for shard in split.shards]] for name, split in splits]
        return digest_of([self.tokenizer_sha256, self.end_token, *checksums])[:12]

    def to_json(self) -> str:
        mapping: dict[str, Any] = {"format": DATA_SET.number, **asdict(self)}
        return json.dumps({**mapping, "checksum": digest_of(mapping)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest. Raises DataError if it is missing, damaged, edited, or in another
    format."""
    path = folder / MANIFEST
    remedy = f"restore it, or delete {folder} and make the data set again"
    inside = sorted(file.parent for file in folder.glob(f"*/{MANIFEST}"))
    if not path.exists() and not (folder / FILES).exists():  # no remedy here may delete it
        if inside:
            raise DataError(
                f"{folder}: not a data set, but a folder of data sets: give one, such as "
                f"{inside[0]}"
            )
        raise DataError(
            f"{folder}: not a data set (it has no {MANIFEST}): give a folder that `lather data "
            "make` has made"
        )
    try:
        mapping = json.loads(read_text(path))
        if not isinstance(mapping, dict):
            raise TypeError("not a JSON object")
        DATA_SET.check(mapping["format"], path)
        if mapping.pop("checksum", None) != digest_of(mapping):
            raise DataError(f"{path}: its checksum is wrong, it was edited or damaged: {remedy}")
        del mapping["format"]
        return Manifest(splits=splits_of(mapping.pop("splits")), **mapping)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        if text := unreadable(path, error):
            raise DataError(text) from None
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: missing or damaged ({reason}): {remedy}") from None


def counts_in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} x {name}" for name, count in counts.items())


class DataSet:
    """An existing data set."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError if the folder holds no data set, or an incomplete one."""
        if not folder.is_dir():
            raise DataError(
                f"{folder}: no such data set: make it with `lather data make {folder} SOURCE`"
            )
        self.folder, self.manifest = folder, read_manifest(folder)

    def split(self, name: str) -> ShardReader:
        """Open the tokens of a split. Raises DataError if there is no such split, or a shard is
        missing or truncated."""
        if name not in self.manifest.splits:
            names = ", ".join(self.manifest.splits) or "none"
            raise DataError(f"{self.folder}: no split {name!r}; there is: {names}")
        return ShardReader(
            self.folder, self.manifest.splits[name].shards, token_dtype(self.manifest.vocab_size)
        )

    @property
    def held_out_split(self) -> str:
        """The split that is evaluated: "validation", or "train" if there is no other."""
        return "validation" if "validation" in self.manifest.splits else "train"

    @property
    def skipped_in_words(self) -> str:
        """The numbers of skipped documents and files, by reason, and where each is listed."""
        counts = counts_in_words(self.manifest.skipped)
        return f"{counts}; file and line of each are in {self.folder / SKIPPED}"

    @property
    def tokenizer(self) -> Path | None:
        return self.folder / TOKENIZER if self.manifest.tokenizer_sha256 else None

    def check(self) -> list[str]:
        """Compare all files with their checksums; return a line for each difference."""
        shards = [shard for split in self.manifest.splits.values() for shard in split.shards]
        checksums = {
            f"{shard.name}.{suffix}": checksum
            for shard in shards
            for suffix, checksum in shard.checksums.items()
        }
        if self.manifest.tokenizer_sha256:
            checksums[TOKENIZER] = self.manifest.tokenizer_sha256
        faults = []
        for name, expected in checksums.items():
            try:
                actual = sha256(self.folder / name)
            except OSError as error:
                faults.append(f"{self.folder / name}: cannot be read ({error.strerror})")
                continue
            if actual != expected:
                faults.append(
                    f"{self.folder / name}: its checksum is {actual[:12]}..., not "
                    f"{expected[:12]}... as it was written"
                )
        return faults
