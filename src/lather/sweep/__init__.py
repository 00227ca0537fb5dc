"""Grids of runs: their processes, their results over seeds, and the best of them."""
