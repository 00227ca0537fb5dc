"""Checkpoints of a run: their contents, their format, and how they are found, saved and loaded."""
