"""The memory of training: what each layer keeps for backward, what the ranks of a run will need,
and settings that fit."""
