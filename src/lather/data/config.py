"""`[data]`: the text that is trained on, and how it is mixed and cut into sequences."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from lather.data.recipe import END_OF_TEXT, DataRecipe
from lather.errors import require
from lather.hub import COMMIT, SCHEME, Address


@dataclass(frozen=True)
class DataConfig:
    """The text that is trained on."""

    path: tuple[str, ...] = ()
    """Folders of data sets made by `lather data make`; none: a data set is made from `source`."""
    weights: tuple[float, ...] = ()
    """Weight of each data set in the mixture: its share of the training sequences is proportional
    to it; none: an epoch has every sequence of all data sets once."""
    validation: dict[str, str] = field(default_factory=dict)
    """Additional held-out sets, by name: folders of data sets, whose split "validation" is
    evaluated, or "train" if there is no other."""
    packing: Literal["stream", "documents"] = "stream"
    """stream: all documents are joined and cut into sequences of equal length, across the ends of
    documents. documents: whole documents, and pieces of long ones, are packed into sequences by
    best fit, and attention stays within each."""
    packed_attention: bool = False
    """With packing "stream", too, attention stays within a document."""
    source: str = "python-stdlib"
    """"python-stdlib": the running Python's own standard library; "package:NAME": an installed
    package's files; "hf://ORG/NAME", also with a file, folder or glob after it: a data set of a
    hub; otherwise a file or a folder. The data set is made when the run starts for the first time,
    and kept in `cache_dir`."""
    revision: str = ""
    """Commit of a `source` on a hub; empty: the one that its branch or tag, such as
    hf://ORG/NAME@v2, has when the run starts for the first time, which the run records."""
    pattern: str = ""
    """Files of the folder to use (glob on the file name); empty: all files of a folder of your own,
    *.py of the other sources."""
    tokenizer: str = ""
    """Path of a `tokenizer.json`; empty: a byte-level BPE tokenizer of `model.vocab_size` tokens is
    trained on the text."""
    end_of_text: str = END_OF_TEXT
    """Token that is added after each document; a given tokenizer must have it."""
    cache_dir: str = "data"
    """Folder for data sets made from `source`; each corpus and vocabulary size gets a subfolder."""
    holdout_every: int = 20
    """One of this number of documents is held out for validation."""
    shard_tokens: int = 1_000_000
    """A shard is closed after the document with which it reaches this number of tokens."""

    def __post_init__(self) -> None:
        source = "'python-stdlib', 'package:NAME', 'hf://ORG/NAME', a file or a folder"
        for name, constraint in (
            ("source", source),
            ("end_of_text", "a token of the tokenizer"),
            ("cache_dir", "a folder"),
        ):
            require(bool(getattr(self, name)), f"data.{name}", getattr(self, name), constraint)
        is_of_hub = self.source.startswith(SCHEME) and re.fullmatch(COMMIT, self.revision)
        commit = "a commit, 40 hexadecimal digits, of a source such as hf://ORG/NAME, or empty"
        require(not self.revision or bool(is_of_hub), "data.revision", self.revision, commit)
        every, tokens, weights = self.holdout_every, self.shard_tokens, self.weights
        require(every >= 2, "data.holdout_every", every, "at least 2 documents")
        require(tokens >= 1, "data.shard_tokens", tokens, "at least 1 token")
        number = f"one number for each of the {len(self.path)} data sets of data.path"
        require(len(weights) in (0, len(self.path)), "data.weights", weights, number)
        is_valid = all(0 <= weight < math.inf for weight in weights)
        is_valid = is_valid and (not weights or sum(weights) > 0)
        finite = "finite numbers of at least 0, one of them above 0"
        require(is_valid, "data.weights", weights, finite)

    @property
    def is_per_document(self) -> bool:
        """Whether attention stays within documents."""
        return self.packed_attention or self.packing == "documents"

    @property
    def resolved_pattern(self) -> str:
        """The pattern that is meant where none is given."""
        is_python = self.source == "python-stdlib" or self.source.startswith("package:")
        return self.pattern or ("*.py" if is_python else "*")

    def recipe(self, vocab_size: int) -> DataRecipe:
        """Return the recipe of the data set that is made from `source`."""
        source = self.source
        if self.revision:
            source = str(replace(Address.parse(source, "dataset"), revision=self.revision))
        return DataRecipe(
            (source,),
            pattern=self.resolved_pattern,
            tokenizer=self.tokenizer,
            vocab_size=vocab_size,
            end_of_text=self.end_of_text,
            holdout_every=self.holdout_every,
            shard_tokens=self.shard_tokens,
        )
