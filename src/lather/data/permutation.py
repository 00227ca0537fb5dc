"""A shuffle of n items that needs no memory: the item at a place is computed from the place and a key.

A Feistel network is a permutation of the numbers below 4^k for any round functions (Luby and Rackoff, 1988). Applied repeatedly until the
result is below n ("cycle walking", Black and Rogaway, 2002), it is a permutation of the numbers below n. As 4^k is less than 4 n, fewer
than four applications are needed on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROUNDS = 8


def shuffled(places: npt.ArrayLike, n: int, key: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the items at these places of a shuffle of `range(n)`. Each `key` (integers of at least 0) gives another shuffle.

    Raises ValueError for a place outside `range(n)`.
    """
    items = np.array(places, dtype=np.uint64)
    if items.size and int(items.max()) >= n:
        raise ValueError(f"place {items.max()} is outside a shuffle of {n} items")
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    round_keys = np.random.SeedSequence([n, *key]).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    outside = np.ones(items.shape, dtype=bool)
    while outside.any():
        items[outside] = _feistel(items[outside], half, round_keys)
        outside = items >= n
    return items.astype(np.int64)


def _feistel(x: npt.NDArray[np.uint64], half: np.uint64, round_keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Permute the numbers of 2 * `half` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for round_key in round_keys:
        left, right = right, left ^ (_scramble(right ^ round_key) & mask)
    return (left << half) | right


def _scramble(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
