"""Evaluates trained models in one process, on held-out sets (per token and per byte) and on tasks
of lm-evaluation-harness."""
