"""A device without memory or arithmetic that torch and Lather treat as a GPU, for running the real
code anywhere."""
