"""Parameters of a unit whose rows are divided among the ranks of a mesh: gathered by one
all-gather, and their gradients summed by one reduce-scatter.

Rows of dim 0 are divided as FSDP2 (`torch.distributed.fsdp.fully_shard`) divides them, which is
that of `torch.chunk`: the last ranks may have fewer rows, or none. On a mesh (replicate, shard)
every replica is divided so. A parameter that is not gathered is a DTensor, so that optimizers and
checkpoints see what they see under FSDP2.

    gather    the rows of a rank, in the dtypes in which parameters are gathered, are S bytes of an
              array (W ranks, S); from there each parameter is copied to memory of its own, unless
              it is the only one
    reduce    the gradients, cut by rows and padded, are an array (W ranks, N elements) in fp32, or
              fp64 for fp64; the sum of a rank's N elements is added to the sum that it keeps
    finish    the kept sum is added up over replicas, in fp32 or fp64, once per step

A gathered parameter is the same tensor each time, and only its storage comes and goes: graphs and
deferred weight gradients refer to it in between. On a GPU both operations run on side streams, and
only streams wait for them.

Without a mesh, or on one of a single rank, nothing is divided. Gradients may be kept in bf16 there,
too; and the rows of frozen parameters may be in the host's memory, from which they are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lather.boxes import chunk, gradient_dtype, local
from lather.device import is_gpu
from lather.kernels.stochastic_rounding import round_to_bf16
from lather.parallel.side_streams import Streams
from lather.torch_private import (
    all_gather_single,
    chunk_cat,
    dtensor_like,
    foreach_copy_,
    reduce_scatter_single,
)

Places = Sequence[tuple[nn.Module, str]]
"""The modules that have a parameter, each with its name there: several if it is tied."""

ALIGNMENT = 8
"""Bytes of the widest element; a rank's rows in the array of bytes start at a multiple."""

STAGED = 2**26
"""Most bytes of the memory on a device through which the host's rows come if they are gathered in
another dtype."""


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter whose rows are divided among W ranks."""

    places: Places
    sharded: nn.Parameter
    """This rank's rows; a DTensor on a mesh."""
    whole: nn.Parameter
    """The gathered parameter."""
    memory: Tensor | None
    """The storage of `whole` as bytes, with equally many for each rank, (W, bytes); it is empty
    while the parameter is not gathered. None: `whole` is the rank's rows themselves."""
    gradient_like: Tensor | None
    """A DTensor without memory that is like the gradient of `sharded`, if that is a DTensor."""

    def install(self, p: nn.Parameter) -> None:
        """Make `p` the parameter of the modules."""
        for module, name in self.places:
            setattr(module, name, p)


@dataclass(frozen=True)
class Storing:
    """Where and in which dtypes the parameters and gradients of units are kept."""

    gathered: torch.dtype | None = None
    """dtype in which weights are gathered that only products read; None: their own."""
    rounds_own: bool = False
    """Whether weights that this rank alone has are rounded to it, too, while gathered."""
    gradients: torch.dtype | None = None
    """dtype of sums of gradients between reductions; None: that of the sums."""
    frozen_on_host: bool = False
    """Whether parameters that are not trained are in the host's memory while not gathered."""


class ShardedParameters:
    """The parameters that the module docstring describes."""

    def __init__(
        self,
        places: Mapping[nn.Parameter, Places],
        mesh: DeviceMesh | None,
        storing: Storing,
        rounded: set[nn.Parameter],
        streams: Streams,
        *,
        on_host: bool = False,
    ) -> None:
        """Shard the parameters in place. `rounded`: those that `storing.gathered` concerns;
        `on_host`: whether the rows are in the host's memory, for parameters that are frozen."""
        groups = [] if mesh is None else mesh.get_all_groups()
        self._replicas = groups[0] if len(groups) > 1 else None
        self._group = groups[-1] if groups else None
        self._num_ranks = 1 if mesh is None else mesh.size(mesh.ndim - 1)
        self._rank = 0 if mesh is None else mesh.get_local_rank(mesh.ndim - 1)
        self.streams, self._on_host = streams, on_host
        self._arriving: tuple[Tensor | None, Any] | None = None
        """Between `gather` and `wait`: the array of bytes, and the event behind the gather."""
        dtypes = (p.dtype for p in places if p.requires_grad)
        self._summed_in = reduce(torch.promote_types, dtypes, torch.float32)
        self._kept_in = storing.gradients or self._summed_in
        members = [
            self._member(p, where, mesh, (storing.gathered if p in rounded else None) or p.dtype)
            for p, where in places.items()
        ]
        # wide elements first, so that all are aligned
        self.members = sorted(members, key=lambda member: -member.whole.dtype.itemsize)
        self._trained = [member for member in self.members if member.whole.requires_grad]
        self._lengths = [
            chunk(len(p), self._num_ranks, 0)[1] * math.prod(p.shape[1:])
            for p in (member.whole for member in self._trained)
        ]
        """Elements of a rank in the array of gradients, for each trained parameter."""
        self._copied = [member for member in self.members if member.memory is not None]
        self._memories = [member.memory for member in self.members if member.memory is not None]
        self._sum: Tensor | None = None
        """The sums of the rank's rows that are kept, 1-D, with these lengths."""
        self._num_sums = 0

    @torch.no_grad()
    def _member(
        self, p: nn.Parameter, places: Places, mesh: DeviceMesh | None, dtype: torch.dtype
    ) -> ShardedParameter:
        """Replace a parameter by this rank's rows of it; `dtype`: in which it is gathered."""
        start, length = chunk(len(p), self._num_ranks, self._rank)
        memory, like, sharded, device = None, None, p, self.streams.device
        rows = p.detach()
        if self._num_ranks > 1:
            rows = rows[start : start + length].clone(memory_format=torch.contiguous_format)
        if self._num_ranks == 1 and not self._on_host and dtype == p.dtype:
            whole = nn.Parameter(rows, p.requires_grad)
        else:
            num_rows = self._num_ranks * chunk(len(p), self._num_ranks, 0)[1]
            padded = torch.empty(num_rows, *p.shape[1:], dtype=dtype, device=device)
            whole = nn.Parameter(padded[: len(p)], p.requires_grad)
            # through `data`, so that the version of `whole` does not count what is gathered
            memory = padded.data.view(self._num_ranks, -1).view(torch.uint8)
            whole.untyped_storage().resize_(0)
        if self._on_host:
            pinned = self.streams.host.stack if is_gpu(device) else _pageable
            rows = pinned(tuple(rows.shape), p.dtype).copy_(rows)
            sharded = nn.Parameter(rows, requires_grad=False)
        if mesh is not None:
            of_rows, like = (
                _spread(torch.empty((), dtype=each, device=device).expand(rows.shape), mesh, p)
                for each in (p.dtype, self._kept_in)
            )
            sharded = nn.Parameter(dtensor_like(rows, of_rows), p.requires_grad)
        if p.requires_grad:
            whole.grad_dtype, sharded.grad_dtype = self._summed_in, self._kept_in
        member = ShardedParameter(places, sharded, whole, memory, like)
        member.install(sharded)
        return member

    @property
    def gathered(self) -> list[nn.Parameter]:
        """The parameters whose values exist only while they are gathered."""
        return [member.whole for member in self._copied]

    @property
    def host_bytes(self) -> int:
        """Bytes that a gather brings to a GPU from the host's memory."""
        if not (self._on_host and is_gpu(self.streams.device)):
            return 0
        return sum(local(member.sharded).nbytes for member in self._copied)

    @torch.no_grad()
    def gather(self) -> None:
        """Start to gather the parameters; the modules have them after `wait`. Until then a buffer
        has the bytes of all, unless there is a single one."""
        if not self._copied:
            self._arriving = None, None
            return
        sections, array = self._sections()
        with self.streams.gathers.after_current():
            rows = [local(member.sharded).flatten() for member in self._copied]
            own = [
                section.view(member.whole.dtype)[: len(values)]
                for section, member, values in zip(sections, self._copied, rows, strict=True)
            ]
            if self._on_host:
                for target, values in zip(own, rows, strict=True):
                    _copy_from_host(target, values)
            else:
                foreach_copy_(own, rows)
            if self._num_ranks > 1:
                all_gather_single(array.view(-1), array[self._rank], self._group)
            self._arriving = array, self.streams.gathers.record()

    def _sections(self) -> tuple[Sequence[Tensor], Tensor]:
        """Return where this rank's rows of each parameter are copied, as bytes, and the array that
        is gathered: the memory of a single parameter, or a buffer."""
        memories = self._memories
        if self._num_ranks == 1 or len(memories) == 1:
            for memory in memories:
                memory.untyped_storage().resize_(memory.numel())
            return [memory[self._rank] for memory in memories], memories[0]
        sizes = [memory.shape[1] for memory in memories]
        size = -(-sum(sizes) // ALIGNMENT) * ALIGNMENT
        buffer = memories[0].new_empty(self._num_ranks, size)
        return buffer[self._rank, : sum(sizes)].split(sizes), buffer

    @torch.no_grad()
    def wait(self) -> None:
        """Make the current stream wait for `gather`, and give the modules the whole parameters."""
        if self._arriving is None:
            return
        (array, event), self._arriving = self._arriving, None
        self.streams.gathers.wait(event)
        memories = self._memories
        if array is not None and array is not memories[0]:
            for memory in memories:
                memory.untyped_storage().resize_(memory.numel())
            sizes = [memory.shape[1] for memory in memories]
            torch.split_with_sizes_copy(array[:, : sum(sizes)], sizes, dim=1, out=memories)
        for member in self.members:
            member.install(member.whole)

    def free(self) -> None:
        """Free the gathered parameters, which `wait` made; their gradients stay."""
        for member in self.members:
            member.install(member.sharded)
        for memory in self._memories:
            memory.untyped_storage().resize_(0)

    @torch.no_grad()
    def reduce(self) -> None:
        """Start to sum the gradients of the whole parameters over ranks, and free these. The sums
        are added to those that are kept; a gradient that is missing counts as zero."""
        if not self._trained:
            return
        wholes = [member.whole for member in self._trained]
        if self._group is None and self._kept_in == self._summed_in:
            for p in wholes:  # which go on accumulating
                p.grad = torch.zeros_like(p, dtype=self._kept_in) if p.grad is None else p.grad
            return
        if self._group is None:
            self._add_rounded(map(_taken_gradient, wholes))
            return
        zero = torch.zeros((), dtype=gradient_dtype(wholes[0]), device=wholes[0].device)
        gradients = [zero.expand(p.shape) if p.grad is None else p.grad for p in wholes]
        for p in wholes:
            p.grad = None
        if len(gradients) == 1 and len(gradients[0]) % self._num_ranks == 0:
            # of missing zeros there is a single element, but other ranks are sent whole memory
            buffer = gradients.pop().contiguous().view(self._num_ranks, -1)
        else:
            buffer = zero.new_empty(self._num_ranks, sum(self._lengths))
            chunk_cat(gradients, 0, self._num_ranks, out=buffer)
            gradients.clear()
        total = torch.empty_like(buffer[0]) if self._num_ranks > 1 else buffer[0]
        with self.streams.reductions.start(buffer, total):
            if self._num_ranks > 1:
                reduce_scatter_single(total, buffer.view(-1), group=self._group)
            if self._kept_in != total.dtype:
                self._add_rounded(total.split(self._lengths))
            else:
                self._sum = total if self._sum is None else self._sum.add_(total)

    def _add_rounded(self, totals: Iterable[Tensor | None]) -> None:
        """Add fp32 sums of gradients, which are overwritten, to those that are kept. None
        counts as zeros."""
        is_first = self._sum is None
        if self._sum is None:
            device = self._trained[0].whole.device
            self._sum = torch.empty(sum(self._lengths), dtype=self._kept_in, device=device)
        for kept, total in zip(self._sum.split(self._lengths), totals, strict=True):
            if total is not None:
                if not is_first:
                    total.add_(kept)
                round_to_bf16(total, self._num_sums, out=kept)
            elif is_first:
                kept.zero_()
        self._num_sums += 1

    @property
    def sums(self) -> list[Tensor]:
        """The sums of gradients that are kept."""
        return [] if self._sum is None else [self._sum]

    def finish(self) -> None:
        """Add the kept sums up over replicas, make the current stream wait for the reductions, and
        give the sharded parameters the gradients."""
        if self._group is None and self._kept_in == self._summed_in:
            for member in self._trained:
                if member.whole.grad is not None:
                    member.sharded.grad, member.whole.grad = member.whole.grad, None
        if self._sum is None:
            return
        if self._replicas is not None:
            with self.streams.reductions.start():
                total = self._sum.to(self._summed_in)
                dist.all_reduce(total, group=self._replicas)
                if self._kept_in != self._summed_in:
                    round_to_bf16(total, self._num_sums, out=self._sum)
        self.streams.reductions.finish()
        for member, part in zip(self._trained, self._sum.split(self._lengths), strict=True):
            rows = local(member.sharded)
            gradient = part[: rows.numel()].view(rows.shape)
            like = member.gradient_like
            member.sharded.grad = gradient if like is None else dtensor_like(gradient, like)
        self._sum, self._num_sums = None, 0

    def drop_gradients(self) -> None:
        """Drop the gradients of the whole parameters, and the sums that are kept."""
        for member in self._trained:
            member.whole.grad = None
        if self._sum is not None:
            self.streams.reductions.stream.keep(self._sum)
        self._sum, self._num_sums = None, 0


def _taken_gradient(p: nn.Parameter) -> Tensor | None:
    """Remove and return the gradient of a parameter, 1-D."""
    gradient, p.grad = p.grad, None
    return None if gradient is None else gradient.flatten()


def _pageable(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory of a CPU that is also the device."""
    return torch.empty(size, dtype=dtype, device="cpu")


def _copy_from_host(target: Tensor, values: Tensor) -> None:
    """Copy rows from the host, 1-D, and convert them on the device, a part at a time: a copy to
    another dtype would allocate memory there for all of them, which no plan sees."""
    if target.dtype == values.dtype:
        target.copy_(values, non_blocking=True)
        return
    size = STAGED // values.itemsize
    staging = torch.empty_like(target[:size], dtype=values.dtype)
    for part, rows in zip(target.split(size), values.split(size), strict=True):
        staged = staging[: len(rows)]
        staged.copy_(rows, non_blocking=True)
        part.copy_(staged)


def _spread(rows: Tensor, mesh: DeviceMesh, whole: Tensor) -> Tensor:
    """Return a DTensor with the shape of `whole`, of which this rank has the rows."""
    return DTensor.from_local(
        rows,
        mesh,
        [Replicate(), Shard(0)][-mesh.ndim :],
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )
