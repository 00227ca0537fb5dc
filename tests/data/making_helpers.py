"""Helpers that the tests of data sets share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from lather.data.chat import ChatTemplate
from lather.data.conversations import Messages
from lather.data.dataset import SKIPPED, DataSet
from lather.data.documents import load_tokenizer

Make = Callable[..., DataSet]
"""Type of the fixture `make`."""
SENTENCE = "the quick brown fox jumps over naïve café 日本 \U0001f98a and owners"
WORDS = SENTENCE.split()


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    words = (draw.choices(WORDS, k=draw.randint(1, 40)) for _ in range(count))
    return [f"{number}: {' '.join(chosen)}\n" for number, chosen in enumerate(words)]


def lines(*records: Any) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text(lines(*({"text": text} for text in documents)), "utf-8")
    return path


def documents_of(dataset: DataSet, split: str = "train") -> list[list[int]]:
    """Read the tokens of every document."""
    reader, documents = dataset.split(split), []
    for shard in range(len(reader.entries)):
        start, stop = reader.starts[shard : shard + 2].tolist()
        bounds = [start, *reader.ends_between(start, stop).tolist()]
        documents += [reader.tokens(low, high).tolist() for low, high in pairwise(bounds)]
    return documents


def texts_of(dataset: DataSet, split: str = "train") -> list[str]:
    tokenizer = load_tokenizer(dataset.folder / "tokenizer.json", "")
    documents = documents_of(dataset, split)
    assert all(document[-1] == dataset.manifest.end_token for document in documents)
    return [tokenizer.decode(document[:-1], skip_special_tokens=False) for document in documents]


def skips(dataset: DataSet) -> list[tuple[str, int, str, str]]:
    """Return path, line, reason and detail of what was skipped, and check that all is counted."""
    rows = [json.loads(row) for row in (dataset.folder / SKIPPED).read_text("utf-8").splitlines()]
    assert sum(dataset.manifest.skipped.values()) == len(rows)
    return [(row["file"], row["line"], row["reason"], row["detail"]) for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def learned_of(template: ChatTemplate, messages: Messages, tools: Any = None) -> list[str]:
    """Return the learned texts of a conversation."""
    formatted = template.format(messages, tools)
    assert formatted.answers == sorted(formatted.answers)
    return [formatted.text[start:stop] for start, stop in formatted.answers]
