"""Fused operations: one folder each, `reference.py` in plain torch, which is the specification, beside `triton.py` for CUDA."""
