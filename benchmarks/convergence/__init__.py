"""Finds out which rule learns how fast, per step, per second and per byte: a study of many
trainings, and the conclusions from its rows."""
