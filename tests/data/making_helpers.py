"""Helpers that the tests of data sets share."""

from itertools import pairwise

from lather.data.dataset import DataSet


class Notes:
    """A display that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, units: int, num_units: int, documents: int, tokens: int) -> None:
        pass


def documents_of(dataset: DataSet, split: str) -> list[list[int]]:
    """Read the tokens of every document."""
    reader, found = dataset.split(split), []
    for shard in range(len(reader.entries)):
        start = int(reader.starts[shard])
        bounds = [start, *(start + int(end) for end in reader.ends(shard))]
        found += [reader.tokens(low, high).tolist() for low, high in pairwise(bounds)]
    return found
