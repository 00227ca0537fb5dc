"""Memory plans: dry runs of training steps on tensors without storage, and a search for settings
that fit."""
