"""The trainer: configuration, data, step, loop, checkpoints, metrics, pictures."""
