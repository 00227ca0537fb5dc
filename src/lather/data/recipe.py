"""The recipe of a data set: its sources, and how they are read, divided and encoded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from lather.data.chat import ChatTemplate
from lather.data.documents import DocumentMaker
from lather.data.sources import Reading
from lather.errors import DataError, require

END_OF_TEXT = "<|endoftext|>"
Format = Literal["auto", "text", "jsonl", "json", "parquet", "huggingface", "tokens"]


@dataclass(frozen=True)
class DataRecipe:
    """The options of `lather data make`."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE [SOURCE ...]")]
    """Files, folders, python-stdlib, package:NAME, or hf:NAME[@CONFIG]#SPLIT."""
    validation: tuple[str, ...] = ()
    """Sources that are held out as a whole; none: one document in `holdout_every` is."""
    pattern: str = "*"
    """Which files of a folder are taken (glob on the file name)."""
    format: Format = "auto"
    """Kind of the files; auto: by their names (.jsonl, .jsonl.gz, .jsonl.zst, .parquet, .npy, .bin, .ds, and .json of a file that is
    itself a source); all others are text."""
    field: str = "text"
    """Field of JSONL lines, or column of tables, that holds the text."""
    chat: bool = False
    """Lines and rows are conversations ("messages", "conversations", or "prompt" and "completion"); their answers are what is learned."""
    separator: str = ""
    """Text between two documents of a text file, such as "<|endoftext|>"; empty: a file is a document, above 1 MiB one for each MiB."""
    encoding: str = "auto"
    """Encoding of text files; auto: UTF-8, or what the first bytes announce, or else Windows-1252."""
    tokenizer: str = ""
    """A `tokenizer.json`, or a folder that has one; empty: a byte-level BPE of `vocab_size` tokens is trained on the texts."""
    vocab_size: int = 0
    """Tokens of the vocabulary; 0: the tokenizer's."""
    end_of_text: str = END_OF_TEXT
    """Token after each document."""
    end_token: int = -1
    """Number of that token, for token files without a tokenizer."""
    token_dtype: Literal["", "uint16", "uint32"] = ""
    """Numbers of .bin files without a header."""
    holdout_every: int = 20
    """One document in this many is held out for validation; 0: none."""
    shard_tokens: int = 1 << 26
    """A shard ends with the first document that ends after so many tokens."""

    def __post_init__(self) -> None:
        require(bool(self.sources), "sources", self.sources, "at least one file or folder")
        require(bool(self.pattern), "pattern", self.pattern, "a glob such as '*.txt'")
        require(bool(self.field), "field", self.field, "a field's name")
        require(self.vocab_size >= 0, "vocab_size", self.vocab_size, "at least 0 tokens")
        require(self.holdout_every == 0 or self.holdout_every >= 2, "holdout_every", self.holdout_every, "0, or at least 2 documents")
        require(self.shard_tokens >= 1, "shard_tokens", self.shard_tokens, "at least 1 token")
        try:
            "".encode(self.encoding if self.encoding != "auto" else "utf-8")
        except LookupError:
            raise DataError(f"encoding = {self.encoding!r} is not valid: give one that Python knows, such as latin-1, or auto") from None

    def reading(self) -> Reading:
        """How the files are read."""
        columns = DocumentMaker(self.field, None if not self.chat else ChatTemplate("", {})).columns
        return Reading(self.pattern, self.format, self.separator, self.encoding, columns)

    @property
    def tokenizer_file(self) -> Path | None:
        if not self.tokenizer:
            return None
        path = Path(self.tokenizer)
        return path / "tokenizer.json" if path.is_dir() else path

    def chat_template(self) -> tuple[str, dict[str, str]]:
        """The source of the tokenizer's chat template, and the special tokens that it names; empty if records are texts."""
        if not self.chat:
            return "", {}
        template = ChatTemplate.beside(self.tokenizer_file or Path("tokenizer.json"))
        if not template.source.strip():
            raise DataError(f"{self.tokenizer}: the chat template is empty: restore it, or take it away to have ChatML")
        return template.source, template.special_tokens

    def digest(self, listing: str) -> str:
        """A short name of the recipe, wherever its sources and tokenizer lie, and of files as they are (`MakingPlan.listing`)."""
        mapping: dict[str, Any] = {**asdict(self), "sources": len(self.sources)}
        if self.tokenizer_file is not None and self.tokenizer_file.is_file():
            mapping["tokenizer"] = hashlib.sha256(self.tokenizer_file.read_bytes()).hexdigest()
        if self.chat:
            mapping["chat_template"] = self.chat_template()
        return hashlib.sha256(json.dumps([mapping, listing], sort_keys=True).encode()).hexdigest()[:12]
