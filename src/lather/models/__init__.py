"""Mixture-of-experts language models: shared layers, one file per family for what is its own."""
