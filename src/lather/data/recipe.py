"""The recipe of a data set: its sources, and the options for reading, dividing and encoding
them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from lather.argument import Argument
from lather.data.chat import ChatTemplate
from lather.data.conversations import FIELDS, UNREAD_FIELDS
from lather.data.records import Kind
from lather.data.token_rows import ROW_FIELDS
from lather.errors import DataError, require
from lather.files import digest_of, sha256
from lather.formats import DATA_SET

END_OF_TEXT = "<|endoftext|>"
END_OF_TRAINED = f"at least 2 characters without a tokenizer, such as {END_OF_TEXT!r}"
"""Constraint on the end of text of a tokenizer that is trained: each byte has a token of one
character."""
LEAST_TRAINED = 257
"""Tokens of the smallest byte-level BPE tokenizer: one for each byte, and the end of text."""


@dataclass(frozen=True)
class DataRecipe:
    """The options of `lather data make`."""

    sources: Annotated[tuple[str, ...], Argument(positional=True, metavar="SOURCE [SOURCE ...]")]
    """Files, folders, python-stdlib, package:NAME, hf://ORG/NAME[@REVISION][/PATH] (files of a data
    set of a hub), or hf:NAME[@CONFIG]#SPLIT (rows, as `datasets` loads them)."""
    validation: tuple[str, ...] = ()
    """Sources for the validation split; none: one of `holdout_every` documents is held out."""
    pattern: str = "*"
    """Files of a folder to use (glob on the file name)."""
    format: Literal["auto", Kind] = "auto"
    """Format of the files; auto: by the suffix (.jsonl, .jsonl.gz, .jsonl.zst, .parquet, .npy,
    .bin, .ds, and .json if the file itself is given as a source); all other files are text."""
    field: str = "text"
    """Name of the JSONL field, or of the table column, that holds the text."""
    chat: bool = False
    """Lines and rows are conversations ("messages", "conversations", "prompt" and "completion", or
    "instruction" and "output"); only the assistant's answers are trained on."""
    token_rows: bool = False
    """Lines and rows are documents of "tokens", with "weights", "advantages" and "routing" if they
    have them, or pairs of such documents, "chosen" and "rejected"."""
    separator: str = ""
    """Text between two documents of a text file, such as "<|endoftext|>"; empty: a file is one
    document, or one per MiB above 1 MiB."""
    encoding: str = "auto"
    """Encoding of text files; auto: the encoding of the byte order mark, or else UTF-8, or else
    Windows-1252."""
    tokenizer: str = ""
    """Path of a `tokenizer.json`, or of a folder that has one; empty: a byte-level BPE tokenizer of
    `vocab_size` tokens is trained on the texts."""
    vocab_size: int = 0
    """Number of tokens in the vocabulary; 0: that of the tokenizer."""
    end_of_text: str = END_OF_TEXT
    """Token that is added after each document, unless the chat template has written it."""
    end_token: int = -1
    """Number of the end-of-text token, for token files without a tokenizer."""
    token_dtype: Literal["", "uint16", "uint32"] = ""
    """Number type of .bin files without a header."""
    holdout_every: int = 20
    """One of this number of documents is held out for validation; 0: none."""
    shard_tokens: int = 1 << 26
    """A shard is closed after the document with which it reaches this number of tokens."""

    def __post_init__(self) -> None:
        every = self.holdout_every
        require(bool(self.sources), "sources", self.sources, "at least one file or folder")
        require(bool(self.pattern), "pattern", self.pattern, "a glob such as '*.txt'")
        require(bool(self.field), "field", self.field, "a field's name")
        require(self.vocab_size >= 0, "vocab_size", self.vocab_size, "at least 0 tokens")
        is_end = bool(self.tokenizer) or len(self.end_of_text) >= 2
        require(is_end, "end_of_text", self.end_of_text, END_OF_TRAINED)
        require(every == 0 or every >= 2, "holdout_every", every, "0, or at least 2 documents")
        require(self.shard_tokens >= 1, "shard_tokens", self.shard_tokens, "at least 1 token")
        is_one = not (self.chat and self.token_rows)
        require(is_one, "token_rows", self.token_rows, "false with chat: a row is one of both")
        try:
            "".encode(self.encoding if self.encoding != "auto" else "utf-8")
        except LookupError:
            raise DataError(
                f"encoding = {self.encoding!r} is not valid: give one that Python knows, such as "
                "latin-1, or auto"
            ) from None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read from tables."""
        if self.token_rows:
            return ROW_FIELDS
        return (*FIELDS, *UNREAD_FIELDS) if self.chat else (self.field,)

    @property
    def hold_out_every(self) -> int:
        """The number of documents of which one is held out for validation; 0: none is held out, as
        with sources for validation."""
        return 0 if self.validation else self.holdout_every

    @property
    def tokenizer_file(self) -> Path | None:
        if not self.tokenizer:
            return None
        path = Path(self.tokenizer)
        return path / "tokenizer.json" if path.is_dir() else path

    def chat_template(self) -> ChatTemplate | None:
        """Return the tokenizer's chat template; None if records are texts. Raises DataError if it
        is damaged or empty."""
        if not self.chat:
            return None
        template = ChatTemplate.beside(self.tokenizer_file or Path("tokenizer.json"))
        if not template.source.strip():
            raise DataError(
                f"{self.tokenizer}: the chat template is empty: restore it, or remove it to use "
                "ChatML"
            )
        return template

    def digest(self, listing: str) -> str:
        """Return a short digest of the format of data sets, of the recipe and of the files
        (`Listing.digest`); it does not depend on the paths of the sources and the tokenizer."""
        mapping: dict[str, Any] = {**asdict(self), "sources": len(self.sources)}
        if not self.token_rows:  # recipes without it have always had their digest
            del mapping["token_rows"]
        if self.tokenizer_file is not None and self.tokenizer_file.is_file():
            mapping["tokenizer"] = sha256(self.tokenizer_file)
        if template := self.chat_template():
            mapping["chat_template"] = template.source, template.special_tokens
            if template.for_tools:
                mapping["chat_template_for_tools"] = template.for_tools
        return digest_of([DATA_SET.number, mapping, listing])[:12]
