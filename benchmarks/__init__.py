"""Benchmarks: every row is measured beside a baseline in the same run, after the correctness check
of the same case."""
