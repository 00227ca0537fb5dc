"""Memory plans: dry runs of a training step on tensors without storage, and the settings that fit."""
