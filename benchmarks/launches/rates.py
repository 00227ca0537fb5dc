"""The one table of rates of the time model: what each kind of kernel reaches on a device.

A launch takes the longest of three times: its bytes at the rate of its kind, its flops at the rate
of its kind, and the shortest time of any launch.

    seconds = max(bytes / rate.bytes, flops / rate.flops, launches * shortest)

Launches follow each other without gaps and nothing overlaps, so that the times of a step add up.
The host has a time of its own, launches x `host_seconds`; what waits for the slower of the two
takes the longer time.

A measured rate names where it was measured; "kernels row" and "refresh row" are rows of
benchmarks/results/gpu/rows.jsonl. All other rates are assumed, and give times within 20 % at best.
Rates are those of large operands: neither the last wave of a product's tiles, nor short rows, nor a
cache that holds what the launch before has written is part of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gpu.clock import PEAK_FLOPS


@dataclass(frozen=True)
class KindRate:
    """The rates of a kind of kernel."""

    bytes: float
    """Bytes per second, counting bytes read and bytes written."""
    source: str
    """Where the rate comes from: "measured: ..." or "assumed: ..."."""
    flops: float = math.inf
    """Flops per second."""


@dataclass(frozen=True)
class RateTable:
    """The rates of a device."""

    name: str
    """Name of the device, as its driver gives it."""
    kinds: Mapping[str, KindRate]
    shortest: float
    """Seconds of the shortest launch, with the gap to the next."""
    host_seconds: float
    """Seconds that the host needs for a launch, with all Python and views around it."""
    source: str
    """Where the two times come from."""
    peak_flops: float
    """Dense bf16 flops per second that the maker states; the whole of which MFU is a share."""

    def seconds(self, kind: str, size: int, flops: float, launches: int) -> float:
        """Compute the time on the device of launches of a kind, of `size` bytes and `flops`
        together."""
        rate = self.kinds[kind]
        return max(size / rate.bytes, flops / rate.flops, launches * self.shortest)


COPY = 2.98e12
UNKNOWN = "unknown"
"""The kind of kernels that the model does not know."""

H100 = RateTable(
    "NVIDIA H100 80GB HBM3",
    {
        "grouped GEMM": KindRate(
            COPY, "measured: experts' products, 59 ms of a profile of training-adamw", 475e12
        ),
        "GEMM": KindRate(
            COPY,
            "assumed: the kernels row of linear_cross_entropy gives 550 without its other "
            "launches, a product of 8192 x 8192 784",
            560e12,
        ),
        "fp32 GEMM": KindRate(COPY, "measured: refresh row, products K Q", 53.4e12),
        "TF32 GEMM": KindRate(COPY, "assumed: two thirds of the peak", 330e12),
        "attention forward": KindRate(
            COPY, "measured: 19 ms of a profile of training-adamw, divided as assumed", 425e12
        ),
        "attention backward": KindRate(
            COPY, "measured: 19 ms of a profile of training-adamw, divided as assumed", 380e12
        ),
        "flex attention": KindRate(COPY, "assumed: three quarters of cuDNN's rates", 300e12),
        "rows moved": KindRate(
            2.0e12, "assumed: kernels rows give 1.4 with the wait for their launch by the host"
        ),
        "gates": KindRate(
            2.4e12, "assumed: kernels rows give 1.8 to 2.1 with the wait for their launch"
        ),
        "norms, rotary, routes": KindRate(2.4e12, "assumed: four fifths of a copy's"),
        "loss kernels": KindRate(2.59e12, "measured: kernels row of cross_entropy_"),
        "optimizer kernels": KindRate(2.69e12, "measured: kernels row of adam_in_basis"),
        "fused AdamW": KindRate(
            2.62e12, "measured: 18 ms of a profile of training-adamw for 28 bytes a parameter"
        ),
        "elementwise": KindRate(2.7e12, "assumed: as the optimizer's kernels"),
        "reductions": KindRate(2.7e12, "assumed: as the optimizer's kernels"),
        "casts": KindRate(2.7e12, "assumed: as the optimizer's kernels"),
        "copies": KindRate(COPY, "measured: kernels rows, a copy of 1 GiB"),
        "concatenations": KindRate(0.98e12, "measured: 13 ms of a profile of training-adamw"),
        "indexing": KindRate(1.4e12, "assumed: half of a copy's"),
        "factorizations": KindRate(
            COPY, "assumed: a tenth of the rate of fp32 products, in batches", 5e12
        ),
        "factorizations one by one": KindRate(
            COPY, "measured: refresh row, torch.linalg.qr less its products", 4.5e12
        ),
        "transfers with the host": KindRate(25e9, "assumed: a bus of PCIe 5, one direction"),
        "exchanges": KindRate(300e9, "assumed: NVLink, nothing hides it"),
        UNKNOWN: KindRate(2.4e12, "assumed: as own Triton kernels"),
    },
    shortest=2.5e-6,
    host_seconds=25e-6,
    source="assumed: 3 to 5 ms of the host for a layer of 170 launches",
    peak_flops=PEAK_FLOPS["H100"],
)
