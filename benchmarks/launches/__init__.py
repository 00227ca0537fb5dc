"""Counts what the code would ask of a GPU, on tensors without storage: `lather bench launches`."""
