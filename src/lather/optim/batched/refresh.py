"""The refresh phase: new bases for every matrix and dim that is due, in batches.

The host knows which rows of a bucket are due (idle experts are not); the rule's criterion may skip
some of them; the others are refreshed batch by batch. Which bases still fit, and which refreshes
failed, is read from the devices once each for all buckets.

    refresh          the whole phase
    launch, finish   its two halves: between them the device may work on other things, but nobody
                     may change the state
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lather.device import Read, index_on, is_cpu
from lather.optim.batched.formats import Rows
from lather.optim.batched.gradients import read_together
from lather.optim.batched.plan import matmul_precision
from lather.optim.batched.roster import Roster
from lather.optim.batched.runs import MemberRun, cpu_count, refresh_bytes
from lather.optim.rule import RefreshingRule

logger = logging.getLogger(__name__)

REFRESHED = ("basis", "moment", "statistic")
"""Kinds of entries that a refresh changes."""

CPU_REFRESH_BYTES = 2**26
"""Temporary memory of a batch on a CPU: less means more launches, more means more cache misses."""


@dataclass(frozen=True)
class DimRefresh:
    """The refresh of one dim of rows of a run."""

    run: MemberRun
    dim: int
    rows: Sequence[int]
    """Rows of the bucket, ascending."""
    methods: tuple[str, ...]
    """Refresh methods: each is tried on the rows for which the method before it failed."""

    @property
    def rule(self) -> RefreshingRule:
        assert isinstance(self.run.rule, RefreshingRule)
        return self.run.rule

    def batches(self) -> Iterator[DimRefresh]:
        """Yield the same work in batches whose temporary memory is at most `bucket_bytes`, but
        which have at least one matrix."""
        bucket, rule = self.run.bucket, self.rule
        per_matrix = refresh_bytes(bucket, self.dim, rule.compute_dtype)
        count = (rule.bucket_bytes or bucket.temporary_bytes) // per_matrix
        if is_cpu(bucket.device):
            count = min(count, cpu_count(CPU_REFRESH_BYTES // per_matrix))
        count = max(1, count) if rule.batched else 1
        for i in range(0, len(self.rows), count):
            yield replace(self, rows=self.rows[i : i + count])


Launched = list[tuple[DimRefresh, Tensor | None]]
"""Batches of a refresh, each with a tensor on the device that tells which of its rows failed; None:
none can fail."""

Counts = Counter[str]
"""Counters: how many bases were refreshed, skipped, retried, or failed."""


def refresh(jobs: list[DimRefresh], counts: Counts) -> None:
    """Do all refreshes in `jobs`."""
    finish(launch(jobs, counts), counts)


def launch(jobs: list[DimRefresh], counts: Counts) -> Launched:
    """Launch all refreshes in `jobs` on the device, except for rows that the rule's criterion
    skips. The host waits for the device only if the rule has a criterion, or if the rule's refresh
    waits."""
    answers = [
        (batch, None if batch.run.due.first else _ask("fits", batch))
        for job in jobs
        for batch in job.batches()
    ]
    unfit = _narrowed(answers, False)
    asked = (batch for batch, fits in answers if fits is not None)
    counts["refreshes_skipped"] += _num_rows(asked) - _num_rows(unfit)
    return _refreshed([*(batch for batch, fits in answers if fits is None), *unfit])


def finish(launched: Launched, counts: Counts) -> None:
    """Retry failed refreshes with the next method, count all, and log those that fail with every
    method."""
    counts["refreshes_done"] += _num_rows(batch for batch, _ in launched)
    while failed := _narrowed(launched, True):
        retried = []
        for batch in failed:
            if len(batch.methods) > 1:
                retried.append(replace(batch, methods=batch.methods[1:]))
                continue
            num, n = len(batch.rows), batch.run.bucket.inner[batch.dim]
            counts.update(refreshes_failed=num, refreshes_done=-num)
            logger.warning(
                "%d eigenbases of %d x %d could not be refreshed and stay as they are", num, n, n
            )
        counts["refreshes_retried"] += _num_rows(retried)
        launched = _refreshed(retried)


def _refreshed(batches: Iterable[DimRefresh]) -> Launched:
    return [
        (batch, _ask("refresh", batch, batch.methods[0], batch.run.due.first)) for batch in batches
    ]


def _ask(method: str, batch: DimRefresh, *more: object) -> Tensor | None:
    """Call this method of the rule, in its fp32 matmul precision, with the state of a batch, which
    it may change."""
    rule, bucket = batch.rule, batch.run.bucket
    rows = [row - bucket.first_here for row in batch.rows]
    index: slice | Tensor = slice(rows[0], rows[-1] + 1)
    if rows[-1] + 1 - rows[0] != len(rows):
        index = index_on(rows, bucket.device)
    state = Rows(bucket.formats, bucket.stacks, index, rule.compute_dtype)
    with matmul_precision(rule.qr_fp32_matmul_prec):
        answer: Tensor | None = getattr(rule, method)(state, batch.dim, *more)
    state.store(REFRESHED, batch.run.step)
    return answer


def _narrowed(answers: Launched, answer: bool) -> list[DimRefresh]:
    """Return the batches that have answers, reduced to the rows with this answer. The devices are
    waited for once."""
    asked = [(batch, flags) for batch, flags in answers if flags is not None]
    read = read_together([flags for _, flags in asked], Read.REFRESHES)
    narrowed = []
    for (batch, _), flags in zip(asked, read, strict=True):
        if rows := [row for row, flag in zip(batch.rows, flags, strict=True) if flag == answer]:
            narrowed.append(replace(batch, rows=rows))
    return narrowed


def _num_rows(batches: Iterable[DimRefresh]) -> int:
    return sum(len(batch.rows) for batch in batches)


def due_refreshes(
    runs: Iterable[MemberRun], roster: Roster | None, counts: Counts
) -> list[DimRefresh]:
    """Return the refreshes that are due in this step; count those of idle experts as skipped.
    `roster`: that of the step."""
    jobs = []
    for run in runs:
        assert roster is not None
        assert isinstance(run.rule, RefreshingRule)
        if rows := _due_rows(run, run.rule, roster, counts):
            methods = run.rule.methods(run.due.first)
            jobs += [DimRefresh(run, dim, rows, methods) for dim in run.bucket.dims]
    return jobs


def _due_rows(
    run: MemberRun, rule: RefreshingRule, roster: Roster, counts: Counts
) -> Sequence[int]:
    """Return the rows of the bucket whose bases are due in this step. Idle experts are left out,
    except for the first bases."""
    due, rows = run.due, list(run.rows)
    if due.who == "nobody":
        return []
    if due.who == "interval" and rule.stagger_refresh:
        shifts = [
            roster.shift(member.param, number, due.every)
            for member in run.members
            for number in member.numbers
        ]
        pairs = zip(rows, shifts, strict=True)
        rows = [row for row, shift in pairs if (run.step + shift) % due.every == 0]
    elif due.who == "interval" and run.step % due.every:
        return []
    if run.idle and not due.first:
        active = [row for row in rows if not run.idle[row - run.rows.start]]
        counts["refreshes_skipped"] += len(run.bucket.dims) * (len(rows) - len(active))
        return active
    return rows
