"""The tables of rates of the time model: what each kind of kernel reaches on a device. An H100 and
an H200 have the same processor and differ in their memory; those of an A100 and a B200 are derived
from them by the makers' peaks; a core of a CPU has a few rates for all.

A launch takes the longest of three times: its bytes at the rate of its kind, its flops at the rate
of its kind, and the shortest time of any launch.

    seconds = max(bytes / rate.bytes, flops / rate.flops, launches * shortest)

Launches follow each other without gaps and nothing overlaps, so that the times of a step add up.
The host has a time of its own, launches x `host_seconds`; what waits for the slower of the two
takes the longer time.

A measured rate names where it was measured; "kernels row" and "refresh row" are rows of
an H100 in benchmarks/results/gpu, "the profile" is of a step of training-adamw on an H200
(docs/log.md, 2026-11-27). All other rates are assumed; `RateTable.compared` says what
predictions were compared with. Kernels that move bytes reach the same share of a copy's rate on
both devices.
Rates are those of large operands: neither the last wave of a product's tiles, nor short rows, nor a
cache that holds what the launch before has written is part of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lather.device import PEAK_FLOPS


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
    """Dense bf16 flops per second that the maker states; the whole of which MFU is a share. 0: not
    known."""
    compared: str = ""
    """The trainings that predictions were compared with, and by how much they were off."""
    capability: tuple[int, int] | None = None
    """Compute capability of a GPU, by which a plan refuses what the device lacks; None for a
    CPU."""
    waits: bool = False
    """Whether the host waits for each launch, so that its time is added to that of the device."""

    def seconds(self, kind: str, size: int, flops: float, launches: int) -> float:
        """Compute the time on the device of launches of a kind, of `size` bytes and `flops`
        together."""
        rate = self.kinds[kind]
        return max(size / rate.bytes, flops / rate.flops, launches * self.shortest)


TRANSFERS = "transfers with the host"
"""The kind of copies between a device and its host."""
UNKNOWN = "unknown"
"""The kind of kernels that the model does not know."""


def _kinds(copy: float) -> dict[str, KindRate]:
    """Return the rates of a device with the processor of an H100, whose copies move `copy` bytes
    per second."""
    return {
        "grouped GEMM": KindRate(
            copy,
            "measured: experts' products of DeepSeek-V2-Lite 522 to 606, the profile 626",
            590e12,
        ),
        "FP8 grouped GEMM": KindRate(
            copy,
            "measured: on an H200 a simple kernel with the same blocks took 0.87 ms for 566 GF",
            650e12,
        ),
        "FP8 grouped GEMM, transposed": KindRate(
            copy,
            "assumed: as FP8 grouped GEMM; turning the weights may take up to half of it",
            650e12,
        ),
        "experts' weight gradients": KindRate(
            copy,
            "measured: on an H200 492 with 3,072 rows of an expert, 384 with 768 and an addition",
            440e12,
        ),
        "GEMM": KindRate(copy, "measured: the profile, 44 ms", 690e12),
        "symmetric products": KindRate(
            copy, "measured: on an H200 460 to 562 for 704 to 2,048 rows in bf16", 500e12
        ),
        "symmetric TF32 products": KindRate(
            copy, "measured: on an H200 240 to 270 for 704 to 2,048 rows", 255e12
        ),
        "fp32 GEMM": KindRate(copy, "measured: refresh row, products K Q", 53.4e12),
        "TF32 GEMM": KindRate(
            copy, "measured: on an H200 333 to 359 for n = 1,024 to 4,096", 350e12
        ),
        "attention forward": KindRate(copy, "measured: the profile, 3.9 ms", 525e12),
        "attention backward": KindRate(copy, "measured: the profile, 14 ms", 366e12),
        "attention forward, no mask": KindRate(
            copy, "measured: on an H200, cuDNN's for a late slice of a context rank of 8", 707e12
        ),
        "attention backward, no mask": KindRate(copy, "measured: the same", 593e12),
        "flex attention": KindRate(
            copy, "measured: on an H200, a context rank of 8 with 32,768 tokens", 408e12
        ),
        "rows moved": KindRate(0.75 * copy, "measured: on an H200 0.67 to 0.88 of a copy's"),
        "gates": KindRate(0.85 * copy, "measured: the profile, 19 ms together with norms"),
        "norms, rotary, routes": KindRate(0.85 * copy, "measured: as gates"),
        "loss kernels": KindRate(0.87 * copy, "measured: kernels row of cross_entropy_"),
        "optimizer kernels": KindRate(0.903 * copy, "measured: kernels row of adam_in_basis"),
        "fused AdamW": KindRate(
            0.86 * copy, "measured: the profile, 13.3 ms for 28 bytes a parameter"
        ),
        "elementwise": KindRate(0.88 * copy, "measured: the profile, 12.5 ms"),
        "reductions": KindRate(0.9 * copy, "assumed: as the optimizer's kernels"),
        "casts": KindRate(0.87 * copy, "measured: the profile, 12.5 ms"),
        "copies": KindRate(copy, "measured: kernels rows, a copy of 1 GiB"),
        "concatenations": KindRate(0.95e12, "measured: the profile, 13.6 ms, on an H100 as long"),
        "indexing": KindRate(0.47 * copy, "assumed: half of a copy's"),
        "factorizations": KindRate(
            copy, "assumed: a tenth of the rate of fp32 products, in batches", 5e12
        ),
        "factorizations one by one": KindRate(
            copy, "measured: refresh row, torch.linalg.qr less its products", 4.5e12
        ),
        TRANSFERS: KindRate(25e9, "assumed: a bus of PCIe 5, one direction"),
        "exchanges": KindRate(300e9, "assumed: NVLink, nothing hides it"),
        UNKNOWN: KindRate(0.8 * copy, "assumed: less than own Triton kernels"),
    }


H100 = RateTable(
    "NVIDIA H100 80GB HBM3",
    _kinds(2.98e12),
    shortest=2.5e-6,
    host_seconds=25e-6,
    source="assumed: 3 to 5 ms of the host for a layer of 170 launches",
    peak_flops=PEAK_FLOPS["H100"],
    compared="trainings of one GPU took 28 to 48 % longer, with older code",
    capability=(9, 0),
)
H200 = replace(
    H100,
    name="NVIDIA H200",
    kinds=_kinds(4.15e12),
    peak_flops=PEAK_FLOPS["H200"],
    compared="trainings of one GPU took 13 to 25 % longer, with older code",
)
TABLES = (H100, H200)
"""The first is that of the tables in docs/gpu.md."""


def _like(
    table: RateTable, name: str, copy: float, peak: float, capability: tuple[int, int]
) -> RateTable:
    """Return the rates of a device of which only the maker's peaks are known: each kind reaches as
    much of them as on the device of `table`, which says nothing of kinds that the device lacks.
    `copy`: bytes per second of a copy, assumed to reach the same share of the memory's peak."""
    moved, share = copy / table.kinds["copies"].bytes, peak / table.peak_flops
    source = f"assumed: as {table.name}, by the peaks"
    kinds = {
        kind: KindRate(rate.bytes * moved, source, rate.flops * share)
        for kind, rate in table.kinds.items()
    }
    for kind in ("exchanges", TRANSFERS):
        kinds[kind] = table.kinds[kind]
    return replace(
        table,
        name=name,
        kinds=kinds,
        source=source,
        peak_flops=peak,
        compared="never compared with a training",
        capability=capability,
    )


A100 = _like(H100, "NVIDIA A100", 1.8e12, PEAK_FLOPS["A100"], (8, 0))
B200 = _like(H100, "NVIDIA B200", 7.1e12, PEAK_FLOPS["B200"], (10, 0))

_CORE = KindRate(4e9, "measured: five small configurations, one core of a shared machine")
CORE = RateTable(
    "one core of a CPU",
    {
        **dict.fromkeys(H100.kinds, _CORE),
        "GEMM": replace(_CORE, flops=150e9, source="assumed: as in fp32"),
        "TF32 GEMM": replace(_CORE, flops=150e9, source="assumed: as in fp32"),
        "fp32 GEMM": replace(_CORE, flops=150e9),
        "symmetric products": replace(_CORE, flops=150e9, source="assumed: as other products"),
        "symmetric TF32 products": replace(_CORE, flops=150e9, source="assumed: as others"),
        "grouped GEMM": replace(_CORE, flops=80e9),
        "FP8 grouped GEMM": replace(_CORE, flops=20e9, source="assumed: emulated"),
        "FP8 grouped GEMM, transposed": replace(_CORE, flops=20e9, source="assumed: emulated"),
        "experts' weight gradients": replace(_CORE, flops=80e9),
        "attention forward": replace(_CORE, flops=40e9),
        "attention backward": replace(_CORE, flops=40e9),
        "attention forward, no mask": replace(_CORE, flops=40e9),
        "attention backward, no mask": replace(_CORE, flops=40e9),
        "flex attention": replace(_CORE, flops=40e9),
        "factorizations": replace(_CORE, flops=5e9, source="assumed"),
        "factorizations one by one": replace(_CORE, flops=5e9, source="assumed"),
        "exchanges": KindRate(1e9, "assumed: gloo between processes of a machine"),
    },
    shortest=0.0,
    host_seconds=10e-6,
    source="measured: with the rates of small configurations",
    peak_flops=0.0,
    compared="never compared uncorrected",
    waits=True,
)
RATES = {"h100": H100, "h200": H200, "a100": A100, "b200": B200, "cpu": CORE}
"""Tables by the name that `lather plan --rates` takes."""
DEFAULT_RATES = {"gpu": "h100", "cpu": "cpu"}
"""Names of the tables that count where none is given, by kind of device."""
