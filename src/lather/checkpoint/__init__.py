"""Checkpoints of a run: what is saved, in which format, and how it is found again."""
