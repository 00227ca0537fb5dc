"""Parallelism: the mesh of ranks, the exchange of tokens between experts, FSDP2, and starting
ranks."""
