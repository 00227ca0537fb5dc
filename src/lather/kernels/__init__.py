"""Fused operations, one folder each: `reference.py` in plain torch is the specification, and
`triton.py` the implementation for CUDA."""
