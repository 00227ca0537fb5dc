"""One chunk's forward and another's backward in one thread: while one's tokens travel, the other computes.

Chunks are generators that stop right after they launched a communication (`lather.pipeline.segments`); each is resumed only after the other
has had its turn. On CPU the communication goes on in gloo's threads. On CUDA it goes on NCCL's own stream, which waits for what the
compute stream has done so far by an event, and a chunk that is resumed makes the compute stream wait for it by another: the host waits for
nothing but the sizes of an exchange.

Turns are taken in an order that does not depend on time. Every rank of an expert group runs the same chunks, so their exchanges meet.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

F = TypeVar("F")
B = TypeVar("B")


def run(chunk: Generator[None, None, F]) -> F:
    """A chunk alone; its result."""
    while True:
        try:
            next(chunk)
        except StopIteration as end:
            result: F = end.value
            return result


def run_both(forward: Generator[None, None, F], backward: Generator[None, None, B]) -> tuple[F, B]:
    """Two chunks by turns, forward first; their results. If one raises, the other is closed where it is."""
    results: dict[int, object] = {}
    chunks: dict[int, Generator[None, None, object]] = {0: forward, 1: backward}
    try:
        while chunks:
            for number, chunk in list(chunks.items()):
                try:
                    next(chunk)
                except StopIteration as end:
                    results[number] = end.value
                    del chunks[number]
    finally:
        for chunk in chunks.values():
            chunk.close()
    return results[0], results[1]  # type: ignore[return-value]
