"""Counts the sequences of an epoch without making a data set or asking a hub: plans may be made
where the data are not."""

from __future__ import annotations

from lather.data.batch_sizes import BatchSizes
from lather.data.config import DataConfig
from lather.data.opening import folder_of_source, open_datasets, training_batches
from lather.errors import DataError
from lather.hub import SCHEME


def epoch_size(config: DataConfig, vocab_size: int, length: int, sizes: BatchSizes) -> int:
    """Return the number of training sequences of `length` tokens in an epoch of batches of these
    sizes. Raises DataError, with what is missing, unless the data sets are there."""
    if not config.path:
        is_listed = config.revision or not config.source.startswith(SCHEME)
        if not is_listed or not folder_of_source(config, vocab_size).exists():
            raise DataError(
                f"the data set of data.source = {config.source!r} is not made yet: give the "
                "data.path of one that is"
            )
    datasets = open_datasets(config, vocab_size, lambda line: None)
    return training_batches(datasets, config, length, sizes, seed=0).order.epoch_size
