"""The trainer: run directory, training loop, metrics, forks and pictures."""
