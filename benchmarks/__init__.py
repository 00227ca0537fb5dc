"""Benchmarks: every row against a baseline of the same run, after the correctness check of the same case."""
