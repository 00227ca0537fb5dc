"""The memory of a model: saved tensors counted, peaks measured."""
