"""Measures the batched refresh of a transformer's 96 factors against `torch.linalg.qr` one by one.
The contestants and their check are those of `benchmarks.refresh`. The goal is to be ten times as
fast."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.clock import milliseconds
from benchmarks.gpu.work import Settings
from benchmarks.measure import peak_temporary_bytes
from benchmarks.refresh import HIDDEN_AND_MLP, REFRESHES, check_refreshes, transformer_factors
from benchmarks.report import Row

GOAL = 10.0


def rows(settings: Settings, contestant: str) -> Iterator[Row]:
    """Measure each size; yields a row with both contestants' times and how many times as fast ours
    is. Raises CheckError."""
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
            "goal": GOAL,
        }
