"""Overlaps the forward pass of one chunk with the backward pass of another in one thread: while the
tokens of one travel, the other computes.

Chunks are generators that stop right after they have started a communication
(`lather.pipeline.segments`) and are resumed after the other chunk has had its turn. On a CPU the
communication continues in gloo's threads. On CUDA it runs on NCCL's own stream; events make that
stream wait for the compute stream, and the compute stream wait for it when the chunk is resumed.
The host waits for nothing but the sizes of an exchange.

The order of turns does not depend on time. Every rank of an expert group runs the same chunks, so
their exchanges match.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from lather.profiled import profiled

F = TypeVar("F")
B = TypeVar("B")


def run(chunk: Generator[None, None, F], name: str = "forward") -> F:
    """Run a single chunk to its end and return its result. `name`: that of its turns in a profile,
    "forward" or "backward"."""
    while True:
        try:
            with profiled(name):
                next(chunk)
        except StopIteration as end:
            return end.value


def run_both(forward: Generator[None, None, F], backward: Generator[None, None, B]) -> tuple[F, B]:
    """Run two chunks in turns, the forward pass first, and return their results. If one raises, the
    other is closed."""
    results: dict[Generator[None, None, object], object] = {}
    names: dict[Generator[None, None, object], str] = {forward: "forward", backward: "backward"}
    running = list(names)
    try:
        while running:
            for chunk in tuple(running):
                try:
                    with profiled(names[chunk]):
                        next(chunk)
                except StopIteration as end:
                    results[chunk] = end.value
                    running.remove(chunk)
    finally:
        for chunk in running:
            chunk.close()
    return results[forward], results[backward]  # type: ignore[return-value]
