"""`[data]`: which text is learned, and in which order and pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from lather.data.recipe import END_OF_TEXT, DataRecipe
from lather.errors import require


@dataclass(frozen=True)
class DataConfig:
    """Which text is learned."""

    path: tuple[str, ...] = ()
    """Data sets that `lather data make` has made; none: one is made of `source`."""
    weights: tuple[float, ...] = ()
    """Each data set's part of the sequences that are learned; none: every sequence of all of them comes once in an epoch."""
    validation: dict[str, str] = field(default_factory=dict)
    """More held-out sets by name: data sets, of which the split "validation" is evaluated, or "train" if there is no other."""
    packing: Literal["stream", "documents"] = "stream"
    """stream: documents follow one another, and sequences are cut from that wherever they end. documents: a sequence holds whole documents
    and pieces of long ones, by best fit, each with attention of its own."""
    packed_attention: bool = False
    """Attention stays within a document, also where sequences are cut from the stream."""
    source: str = "python-stdlib"
    """"python-stdlib": the running Python's own standard library; "package:NAME": an installed package's files; otherwise a file or a
    folder. Its data set is made at the first start, and kept in `cache_dir`."""
    pattern: str = ""
    """Which files below the folder are text (glob on the file name); empty: all of a folder of your own, *.py of the others."""
    tokenizer: str = ""
    """A `tokenizer.json`; empty: a byte-level BPE of `model.vocab_size` tokens is trained on the text."""
    end_of_text: str = END_OF_TEXT
    """Token after each document; a tokenizer that is given must have it."""
    cache_dir: str = "data"
    """Folder for data sets made of `source`; each corpus and vocabulary size gets a folder of its own in it."""
    holdout_every: int = 20
    """One document in this many is held out for validation, documents."""
    shard_tokens: int = 1_000_000
    """A token shard ends with the first document that ends after so many tokens."""

    def __post_init__(self) -> None:
        require(bool(self.source), "data.source", self.source, "'python-stdlib', 'package:NAME', a file or a folder")
        require(bool(self.end_of_text), "data.end_of_text", self.end_of_text, "a token of the tokenizer")
        require(bool(self.cache_dir), "data.cache_dir", self.cache_dir, "a folder")
        require(self.holdout_every >= 2, "data.holdout_every", self.holdout_every, "at least 2 documents")
        require(self.shard_tokens >= 1, "data.shard_tokens", self.shard_tokens, "at least 1 token")
        fits = len(self.weights) in (0, len(self.path))
        require(fits, "data.weights", self.weights, f"one number for each of the {len(self.path)} data sets of data.path")
        positive = all(0 <= weight < math.inf for weight in self.weights) and (not self.weights or sum(self.weights) > 0)
        require(positive, "data.weights", self.weights, "finite numbers of at least 0, one of them above 0")

    @property
    def apart(self) -> bool:
        """Whether attention stays within documents."""
        return self.packed_attention or self.packing == "documents"

    @property
    def resolved_pattern(self) -> str:
        """The pattern that is meant where none is given."""
        return self.pattern or ("*.py" if self.source == "python-stdlib" or self.source.startswith("package:") else "*")

    def recipe(self, vocab_size: int) -> DataRecipe:
        """The recipe of the data set that `source` stands for."""
        return DataRecipe(
            (self.source,),
            pattern=self.resolved_pattern,
            tokenizer=self.tokenizer,
            vocab_size=vocab_size,
            end_of_text=self.end_of_text,
            holdout_every=self.holdout_every,
            shard_tokens=self.shard_tokens,
        )
