"""Parallelism: the mesh of ranks, the exchange of tokens between experts, FSDP, and starting
ranks."""
