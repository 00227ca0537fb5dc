"""Runs of a bucket: adjacent members that take a step with the same t and the same options. A run
is processed in chunks that are small enough to limit temporary memory and, on a CPU, to fit into
the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise

import torch

from lather.device import is_cpu, is_gpu
from lather.optim.batched.buckets import Bucket, Member
from lather.optim.batched.roster import ParamInfo
from lather.optim.linalg.kronecker import SYMMETRIC_BLOCKS
from lather.optim.rule import NOBODY, Due, Rule
from lather.optim.sharded.exchange import OwnerExchange

LEAST_ALONE = 2**24
"""Least number of elements of a parameter that shares no chunk on a GPU: its matrices fill the
device, and to join them with others moves 8 bytes per element."""

TEMPORARIES = 8
"""Temporary memory of an update per matrix, in matrices: the gradient, its projection, the update,
and intermediate results."""

FACTOR_TEMPORARIES = 9
"""Temporary memory of a refresh per factor, in n x n matrices, in addition to four tensors of a
moment's size (with gathered rows)."""

VISITORS = 3
"""Chunks whose offloaded state is on the device at the same time: one arrives, one takes its step,
and one is written back."""

CPU_CACHE_BYTES = 2**21
"""Largest size of a chunk's gradients on a CPU, so that all passes of an update find them in the
cache (measured: 1 to 4 MiB is best)."""


def cpu_count(count: int) -> int:
    """Round a number of matrices up to a multiple of the threads: with three matrices and two
    threads, a thread would wait."""
    threads = torch.get_num_threads()
    return -(-max(1, count) // threads) * threads


def refresh_bytes(bucket: Bucket, dim: int, dtype: torch.dtype) -> int:
    """Return the temporary memory of a refresh of a matrix."""
    numel = FACTOR_TEMPORARIES * bucket.inner[dim] ** 2 + 4 * math.prod(bucket.inner)
    return numel * dtype.itemsize


class MemberRun:
    """Adjacent members of a bucket that take a step with the same t and the same options."""

    def __init__(
        self,
        bucket: Bucket,
        numbers: range,
        info: ParamInfo,
        step: int,
        exchange: OwnerExchange | None,
    ) -> None:
        """`numbers`: of the members in the bucket; `info`: of the first of them; `step`: t of the
        previous step; `exchange`: the exchange to which the members belong, if any."""
        self.bucket, self.numbers, self.info = bucket, numbers, info
        self.step, self.exchange = step, exchange
        self.members = bucket.members[numbers.start : numbers.stop]
        self.rows = range(bucket.first_row[numbers.start], bucket.first_row[numbers.stop])
        self.read_numbers()
        self.precision = self.rule.fp32_matmul_prec
        """fp32 matmul precision of statistics and update, by torch's names."""
        if self.precision == "auto":
            self.precision = "high" if is_gpu(bucket.device) else "highest"
        self.due: Due = NOBODY
        """Refreshes that are due in this step."""
        self.idle: list[bool] = []
        """For each row, whether it is an expert that got no token in this step; empty if every
        expert got a token."""
        self.gradient_factor = 1.0
        """Number by which the rule multiplies the gradients of this step."""
        is_plain = all(type(member) is Member for member in self.members)
        self.params = [member.param for member in self.members] if is_plain else None
        """Parameters of the members if their `grad` is exactly the gradient that is needed; None:
        ask the members."""

    def read_numbers(self) -> None:
        """Read the rule, the learning rate and the change of the weights from the group."""
        settings = self.info.settings
        self.version, self.lr = settings.version, settings.lr
        self.rule, self.change = self.info.rule, self.info.change()

    def chunk_bounds(self) -> Iterator[tuple[int, int]]:
        """Yield first and last row (exclusive) of chunks whose temporary memory is at most
        `bucket_bytes`, but which have at least one matrix. On a GPU a large parameter shares no
        chunk, so that its gradient need not be copied to join others."""
        bucket, rule = self.bucket, self.rule
        dtype, numel = rule.compute_dtype, math.prod(bucket.inner)
        copied = sum(
            math.prod(x.entry.shape) * (1 + x.is_packed)  # while it is packed, its parts exist, too
            for x in bucket.formats.values()
            if bucket.has_experts or not x.is_plain(dtype)
        )
        block_row = max(
            (bucket.inner[dim] ** 2 // SYMMETRIC_BLOCKS for dim in bucket.dims), default=0
        )
        per_matrix = dtype.itemsize * (TEMPORARIES * numel + copied + block_row)
        if bucket.offloaded:
            of_refresh = max((refresh_bytes(bucket, dim, dtype) for dim in bucket.dims), default=0)
            per_matrix = max(per_matrix, of_refresh) + VISITORS * bucket.row_bytes
        count = (rule.bucket_bytes or bucket.temporary_bytes) // rule.num_streams // per_matrix
        if is_cpu(bucket.device):
            fitting = CPU_CACHE_BYTES // (dtype.itemsize * numel)
            # threads share the work on one large matrix
            count = min(count, cpu_count(fitting) if fitting else 1)
        count = max(1, count) if rule.batched or bucket.layout.elementwise else 1
        edges = {self.rows.start, self.rows.stop}
        if is_gpu(bucket.device) and not bucket.layout.elementwise:
            first, last = self.numbers.start, self.numbers.stop
            for bounds in pairwise(bucket.first_row[first : last + 1]):
                if (bounds[1] - bounds[0]) * numel >= LEAST_ALONE:
                    edges.update(bounds)
        for first, last in pairwise(sorted(edges)):
            for start in range(first, last, count):
                yield start, min(start + count, last)


def runs_of(
    bucket: Bucket, steps: Mapping[int, tuple[ParamInfo, int, OwnerExchange | None]]
) -> Iterator[MemberRun]:
    """Divide the members of a bucket that take the step into runs. `steps`: id of a parameter that
    takes the step -> its info, t of the previous step, and its exchange if it has one."""

    def options(number: int) -> tuple[int, OwnerExchange | None, int, Rule] | None:
        if (key := id(bucket.members[number].param)) not in steps:
            return None
        info, step, exchange = steps[key]
        return step, exchange, info.settings.number, info.rule

    for same, adjacent in groupby(range(len(bucket.members)), options):
        if same is not None:
            first, *others = adjacent
            info = steps[id(bucket.members[first].param)][0]
            yield MemberRun(bucket, range(first, first + 1 + len(others)), info, *same[:2])
