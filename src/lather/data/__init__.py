"""Data: turns text and token files into data sets of token shards, and data sets into the batches
of a run."""
