"""Counts of what the code would ask of a GPU, taken on tensors without storage: `lather bench launches`."""
