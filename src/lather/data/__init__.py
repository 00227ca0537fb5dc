"""Text and tokens of others into memory-mapped shards, and these into the batches of a run."""
