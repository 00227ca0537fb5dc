"""Rates that `lather doctor` has measured on a device, and the table of rates that follows from
them.

A few rates are measured: a copy, and products of large matrices in the dtypes that runs use. Each
kind of kernel is assumed to be as much faster or slower than in the most similar stated table
(`lather.time_model.rates`) as these are; the times of a launch are that table's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from lather.device import PEAK_FLOPS, has_word
from lather.time_model.rates import CORE, H100, RATES, TRANSFERS, KindRate, RateTable

OF_COPIES = frozenset((TRANSFERS, "exchanges"))
"""Kinds whose bytes are not moved within the memory of the device."""
IN_FP32 = frozenset(("fp32 GEMM", "factorizations", "factorizations one by one"))
IN_TF32 = frozenset(("TF32 GEMM", "symmetric TF32 products"))
IN_BF16 = frozenset(("GEMM", "symmetric products"))


@dataclass(frozen=True)
class MeasuredRates:
    """The rates that `lather doctor` measures on the device of a rank."""

    device: str
    """Name of the GPU, or of the processor."""
    threads: int
    """Threads that a CPU's rates are those of; 0 on a GPU."""
    copy: float
    """Bytes per second of a copy into new memory, counting bytes read and bytes written."""
    fp32: float
    """Flops per second of products of large matrices in fp32."""
    tf32: float
    """The same with TF32 allowed; on a CPU, that of fp32."""
    bf16: float
    """The same in bf16."""

    @classmethod
    def of_json(cls, values: object) -> MeasuredRates:
        """Return the rates that a file of `lather doctor --json` has. Raises ValueError if these
        are none."""
        if not isinstance(values, Mapping) or {*values} != {field.name for field in fields(cls)}:
            raise ValueError("rates have other names")
        numbers = [values[name] for name in ("copy", "fp32", "tf32", "bf16")]
        if not all(isinstance(x, int | float) and 0 < x < math.inf for x in numbers):
            raise ValueError("rates must be positive numbers")
        return cls(str(values["device"]), int(values["threads"]), *map(float, numbers))

    @property
    def is_cpu(self) -> bool:
        return self.threads > 0

    @property
    def name(self) -> str:
        """The name of the device, for a CPU with its threads."""
        if not self.is_cpu:
            return self.device
        return f"{self.device} ({self.threads} {'thread' if self.threads == 1 else 'threads'})"


CORE_MEASURED = MeasuredRates("AMD EPYC", 1, copy=17e9, fp32=90e9, tf32=90e9, bf16=1.4e9)
"""The rates that `lather doctor` measures on the core that the table of a core was made on."""


def slowest(ranks: list[MeasuredRates]) -> MeasuredRates:
    """Return the least of each rate, with the name of the first rank's device: ranks wait for the
    slowest of them."""
    least = {
        name: min(getattr(x, name) for x in ranks) for name in ("copy", "fp32", "tf32", "bf16")
    }
    return replace(ranks[0], **least)


def table_of(measured: MeasuredRates, exchange: float | None, where: str) -> RateTable:
    """Return the table of a measured device.

    Args:
        measured: the rates of the device.
        exchange: bytes per second that a rank sends in an all-to-all; None: not measured.
        where: the machine and the day of the measurement.
    """
    like = CORE if measured.is_cpu else _similar(measured.device)
    stated = CORE_MEASURED if measured.is_cpu else _stated(like)
    copy = measured.copy / stated.copy
    faster = {kind: flops / _products(stated)[kind] for kind, flops in _products(measured).items()}
    source = f"assumed: as {like.name}, by measured copies and products"
    kinds = {
        kind: KindRate(
            rate.bytes * (1.0 if kind in OF_COPIES else copy),
            source,
            rate.flops * faster[_product_of(kind, on_cpu=measured.is_cpu)],
        )
        for kind, rate in like.kinds.items()
    }
    origin = f"measured: lather doctor, {where}"
    for kind, flops in _products(measured).items():
        kinds[kind] = replace(kinds[kind], flops=flops, source=origin)
    if exchange is not None:
        kinds["exchanges"] = KindRate(exchange, origin)
    peaks = (peak for part, peak in PEAK_FLOPS.items() if has_word(measured.device, part))
    return replace(
        like,
        name=measured.name,
        kinds=kinds,
        peak_flops=next(peaks, 0.0),
        compared=f"copies and products were measured on {where}",
    )


def _products(rates: MeasuredRates) -> dict[str, float]:
    """Return the flops per second of products by kind."""
    return {"fp32 GEMM": rates.fp32, "TF32 GEMM": rates.tf32, "GEMM": rates.bf16}


def _product_of(kind: str, *, on_cpu: bool) -> str:
    """Return the kind of product by which the flops of a kind are scaled; experts' products and
    attention are those of bf16 on a GPU, of fp32 on a CPU."""
    if kind in IN_TF32:
        return "TF32 GEMM"
    if kind in IN_BF16:
        return "GEMM"
    return "fp32 GEMM" if on_cpu or kind in IN_FP32 else "GEMM"


def _stated(table: RateTable) -> MeasuredRates:
    """Return what `lather doctor` would measure on the device of a stated table."""
    products = (table.kinds[kind].flops for kind in ("fp32 GEMM", "TF32 GEMM", "GEMM"))
    return MeasuredRates(table.name, 0, table.kinds["copies"].bytes, *products)


def _similar(device: str) -> RateTable:
    """Return the stated table of a GPU of this name, or an H100's."""
    return next((table for key, table in RATES.items() if has_word(device, key.upper())), H100)
