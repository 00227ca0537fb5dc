"""What the code would ask of a GPU, counted on tensors without storage: `lather bench launches`."""
