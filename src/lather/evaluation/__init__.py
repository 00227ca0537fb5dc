"""Evaluation of trained models, in one process: held-out sets, per token and per byte, and the tasks of lm-evaluation-harness."""
