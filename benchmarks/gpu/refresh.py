"""Measures the batched refresh of a transformer's 96 factors against `torch.linalg.qr` one by one,
and against the device's own fp32 products.

The contestants and their check are those of `benchmarks.refresh`. Nearly all flops of the refresh
are products in fp32. If it did all of them at the rate of one large batched product, it would take
its floor: counted flops / measured rate. The goal is a share of that rate, not a number of times
that `torch.linalg.qr` takes, which depends on how slow that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.clock import milliseconds
from benchmarks.gpu.work import Settings
from benchmarks.measure import peak_temporary_bytes
from benchmarks.refresh import (
    HIDDEN_AND_MLP,
    REFRESHES,
    CountedFlops,
    Factors,
    check_refreshes,
    transformer_factors,
)
from benchmarks.report import Row

GOAL = 0.75
"""Least share of the product's rate, so that the refresh takes at most a third longer than its
floor. On an H100 (47 Tflop/s in fp32, copies at 2.85 TB/s; estimates) 1,024 / 4,096 has a floor of
340 ms. All passes over the matrices, counted, add 44 ms if none of them overlaps with a product,
and solves and factorizations, 0.7 % of the flops, 25 ms at a tenth of the rate: together 83 % of
the rate. The rest is for products of few rows, which are slower than the large one."""


def rows(settings: Settings, contestant: str) -> Iterator[Row]:
    """Measure each size; yields a row with both contestants' times, our share of the rate of an
    fp32 product, and how many times as fast ours is. Raises CheckError."""
    for hidden, mlp in ((16, 24),) if settings.small else HIDDEN_AND_MLP:
        factors = transformer_factors(hidden, mlp, settings.device)
        checked = check_refreshes(factors)
        ms, peaks = {}, {}
        for name, refresh in REFRESHES.items():
            work = partial(refresh, factors)
            peaks[name] = peak_temporary_bytes(work, settings.device)
            ms[name] = milliseconds(
                work, settings.device, 3, warm_up=0
            )  # the check and the measurement of the peak have warmed up
        rate = product_rate(factors[-1])
        with CountedFlops() as counted:
            REFRESHES["lather"](factors)
        floor_ms = 1e3 * counted.flops / rate
        yield {
            "benchmark": "refresh",
            "config": {
                "hidden": hidden,
                "mlp": mlp,
                "factors": {str(f.k.shape[-1]): len(f.k) for f in factors},
            },
            "baseline": "one_by_one",
            "check": checked,
            "ms": ms,
            "peak_temporary_bytes": peaks,
            "times_as_fast": ms["one_by_one"]["median"] / ms["lather"]["median"],
            "flops": counted.flops,
            "product_flops_per_second": rate,
            "floor_ms": floor_ms,
            "share": floor_ms / ms["lather"]["median"],
            "goal": GOAL,
        }


def product_rate(factors: Factors) -> float:
    """Measure the flops per second of the products K Q of all factors of a size, in fp32."""
    ms = milliseconds(lambda: factors.k @ factors.q, factors.k.device, 3)
    return 2e3 * factors.k.numel() * factors.k.shape[-1] / ms["median"]
