"""The refresh phase: new eigenbases for every matrix and factor that is due, in batches, and never more of them than are needed.

Which rows of a bucket are due is known on the host (without idle experts); the skip criterion narrows them; what is left is
refreshed batch by batch. The devices' answers - which factors still fit, which refreshes failed - are read once each for all buckets.

    refresh          all of it, now
    launch, finish   the same in two halves: between them the device may work on other things, but nobody may change the state
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lather.optim.buckets import Run, cpu_count, index_on
from lather.optim.eigenbasis import DEFAULT_TOLERANCE, is_still_diagonal, is_zero, rayleigh_quotients, update_eigenbasis_and_momentum
from lather.optim.inspection import read_together
from lather.optim.state import compute_dtype

logger = logging.getLogger(__name__)

FACTOR_TEMPORARIES = 8
"""n x n matrices of temporary memory per factor that a refresh holds at once, beside four of a moment's size (gathered rows included)."""

CPU_REFRESH_BYTES = 2**26
"""Temporary memory of a batch on a CPU: more launches below, more cache misses above."""


@dataclass(frozen=True)
class FactorRefresh:
    """One factor dim of some rows of a run."""

    run: Run
    dim: int
    rows: Sequence[int]
    """Rows of the bucket, ascending."""
    method: str
    first: bool = False
    """These are the first bases: the skip criterion does not apply."""

    def batches(self) -> Iterator[FactorRefresh]:
        """The same work in pieces that stay within `bucket_bytes` (at least one matrix each)."""
        bucket, options = self.run.bucket, self.run.options
        numel = FACTOR_TEMPORARIES * bucket.inner[self.dim] ** 2 + 4 * math.prod(bucket.inner)
        per_matrix = numel * compute_dtype(options).itemsize
        count = options["bucket_bytes"] // per_matrix
        if bucket.device.type == "cpu":
            count = min(count, cpu_count(CPU_REFRESH_BYTES // per_matrix))
        count = max(1, count) if options["batched"] else 1
        for i in range(0, len(self.rows), count):
            yield replace(self, rows=self.rows[i : i + count])


Launched = list[tuple[FactorRefresh, Tensor]]
"""Batches of a refresh, and which of their rows fail, as the device will know."""


def refresh(jobs: list[FactorRefresh], count: Callable[[str, int], None]) -> None:
    """Refresh all of `jobs`; `count` is told how many factors were done, skipped and failed."""
    finish(launch(jobs, count), count)


def launch(jobs: list[FactorRefresh], count: Callable[[str, int], None]) -> Launched:
    """Give the device the work of `refresh`. It is waited for only where the skip criterion or "eigh" does."""
    return _run(_without_good_ones(jobs, count))


def finish(launched: Launched, count: Callable[[str, int], None]) -> None:
    """Retry by QR what failed otherwise, count and report."""
    failed = _failures(launched)
    retried = [replace(job, method="qr") for job in failed if job.method in ("cholesky_qr", "auto")]
    lost = [job for job in failed if job.method not in ("cholesky_qr", "auto")]
    lost += _failures(_run(retried))
    total, num_lost = sum(len(batch.rows) for batch, _ in launched), sum(len(job.rows) for job in lost)
    count("refreshes_done", total - num_lost)
    count("refreshes_retried", sum(len(job.rows) for job in retried))
    count("refreshes_failed", num_lost)
    for job in lost:
        logger.warning(
            "%d eigenbases of %d x %d could not be refreshed and stay as they are", len(job.rows), *[job.run.bucket.inner[job.dim]] * 2
        )


def _without_good_ones(jobs: list[FactorRefresh], count: Callable[[str, int], None]) -> list[FactorRefresh]:
    """The jobs without the factors that the skip criterion calls still good, where the group asks for it."""
    may_skip = [job.run.options["use_adaptive_criteria"] and not job.first for job in jobs]
    asked = [batch for job, may in zip(jobs, may_skip, strict=True) if may for batch in job.batches()]
    good = [_still_good(batch) for batch in asked]
    kept = [job for job, may in zip(jobs, may_skip, strict=True) if not may]
    for batch, flags in zip(asked, read_together(good), strict=True):
        kept.append(replace(batch, rows=[row for row, is_good in zip(batch.rows, flags, strict=True) if not is_good]))
        count("refreshes_skipped", sum(flags))
    return [job for job in kept if len(job.rows)]


def _still_good(job: FactorRefresh) -> Tensor:
    take, put = _access(job)
    k, q = take(f"factor_{job.dim}"), take(f"basis_{job.dim}")
    good = is_still_diagonal(k, q, job.run.options["adaptive_update_tolerance"] or DEFAULT_TOLERANCE)
    if f"eigenvalues_{job.dim}" in job.run.bucket.stacks:
        w = take(f"eigenvalues_{job.dim}")
        renewed = good & ~is_zero(k)
        put(f"eigenvalues_{job.dim}", w.copy_(w.where(~renewed[:, None], rayleigh_quotients(k, q))))
    return good


def _run(jobs: list[FactorRefresh]) -> Launched:
    return [(batch, _run_batch(batch)) for job in jobs for batch in job.batches()]


def _run_batch(job: FactorRefresh) -> Tensor:
    """Refresh one batch; returns which of its rows failed (they have not changed)."""
    take, put = _access(job)
    names = [f"factor_{job.dim}", f"basis_{job.dim}", "exp_avg", "exp_avg_sq"]
    k, q, exp_avg, exp_avg_sq = (take(name) for name in names)
    w_name = f"eigenvalues_{job.dim}"
    w = take(w_name) if w_name in job.run.bucket.stacks else None
    failed = update_eigenbasis_and_momentum(
        k,
        q,
        exp_avg,
        exp_avg_sq,
        job.dim,
        method=job.method,
        second_moment=job.run.options["second_moment"],
        power_iter_steps=job.run.options["power_iter_steps"],
        eigenvalues=w,
    )
    for name, x in [*zip(names[1:], (q, exp_avg, exp_avg_sq), strict=True), (w_name, w)]:
        if x is not None:
            put(name, x)
    return failed


def _access(job: FactorRefresh) -> tuple[Callable[[str], Tensor], Callable[[str, Tensor], None]]:
    """Functions that take the job's rows of a stack, in the dtype of computation, and put changed ones back.

    Neighbouring rows are views, and putting them back costs nothing; others are gathered and scattered.
    """
    stacks, dtype = job.run.bucket.stacks, compute_dtype(job.run.options)
    first, last = job.rows[0], job.rows[-1] + 1
    if last - first == len(job.rows):
        index: Any = slice(first, last)
    else:
        index = index_on(job.rows, job.run.bucket.device)

    def take(name: str) -> Tensor:
        return stacks[name][index].to(dtype)

    def put(name: str, x: Tensor) -> None:
        if not (isinstance(index, slice) and stacks[name].dtype == dtype):
            stacks[name][index] = x.to(stacks[name].dtype)

    return take, put


def _failures(results: Launched) -> list[FactorRefresh]:
    """The jobs narrowed to the rows that failed."""
    narrowed = []
    for (job, _), flags in zip(results, read_together([failed for _, failed in results]), strict=True):
        if any(flags):
            narrowed.append(replace(job, rows=[row for row, bad in zip(job.rows, flags, strict=True) if bad]))
    return narrowed


@dataclass(frozen=True)
class Stagger:
    """Where every matrix stands in an interval, so that refreshes cost about the same at every step.

    The matrices of all groups that stagger stand in one line, in order, and are as long as a refresh of theirs costs; a matrix that begins
    at a fraction x of the line is refreshed floor(x f) steps before the interval f is full.
    """

    first: Mapping[int, float]
    """id of a parameter -> the fraction at which its first matrix begins."""
    width: Mapping[int, float]
    """id of a parameter -> the length of each of its matrices."""

    @staticmethod
    def of(costs: Sequence[tuple[int, int, float]]) -> Stagger:
        """From (id of the parameter, number of its matrices, cost of each)."""
        total = sum(batch * cost for _, batch, cost in costs) or 1.0
        first, width, place = {}, {}, 0.0
        for key, batch, cost in costs:
            first[key], width[key] = place, cost / total
            place += batch * cost / total
        return Stagger(first, width)

    def shift(self, key: int, matrix: int, interval: int) -> int:
        """Steps by which matrix number `matrix` of the parameter is early, 0 to interval - 1."""
        return min(interval - 1, int((self.first[key] + matrix * self.width[key]) * interval + 1e-9))


def refresh_cost(inner: Sequence[int], factor_dims: Sequence[int]) -> float:
    """Flops of one refresh of a matrix, to first order: K Q and QR per factor, and carrying the momentum over."""
    return sum((2 + 8 / 3) * inner[dim] ** 3 + 4 * inner[dim] * math.prod(inner) for dim in factor_dims)
