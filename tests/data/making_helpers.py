"""Helpers that the tests of data sets share."""

from itertools import pairwise

from lather.data.dataset import DataSet


def documents_of(dataset: DataSet, split: str) -> list[list[int]]:
    """Read the tokens of every document."""
    reader, found = dataset.split(split), []
    for shard in range(len(reader.entries)):
        start, stop = reader.starts[shard : shard + 2].tolist()
        bounds = [start, *reader.ends_between(start, stop).tolist()]
        found += [reader.tokens(low, high).tolist() for low, high in pairwise(bounds)]
    return found
