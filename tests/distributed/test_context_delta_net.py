"""Gated DeltaNet on slices of sequences that several ranks have: the outputs, gradients and bits of
whole sequences on one process, and the bytes that a rank keeps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from benchmarks.live_bytes import PeakBytes
from lather.models.context import Context
from lather.models.delta_net import DeltaSizes, GatedDeltaNet
from lather.models.saving.recomputed import Recomputation
from lather.models.token_positions import SequenceLayout
from lather.parallel.context_ranks import ContextRanks
from models.tiny import error

CPU = torch.device("cpu")
SIZES = DeltaSizes(
    hidden_size=12,
    num_key_heads=2,
    num_value_heads=6,
    key_head_dim=5,
    value_head_dim=3,
    kernel_size=4,
)
ROWS = 2


@dataclass(frozen=True)
class Layer:
    """Sequences of a length in documents, and a layer that reads them."""

    length: int
    bounds: tuple[int, ...] = ()
    """Where documents begin among the tokens of all rows, besides the ends of rows."""
    grouped: bool = True
    changes: dict[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def build(self) -> GatedDeltaNet:
        sizes = DeltaSizes(**{**vars(SIZES), **self.changes})
        layer = GatedDeltaNet(sizes, 1e-3, grouped_projections=self.grouped).to(self.dtype)
        generator = torch.Generator().manual_seed(1)
        for p in layer.parameters():
            nn.init.normal_(p, std=0.5, generator=generator)
        return layer

    def draw(self) -> tuple[Tensor, Tensor]:
        """Draw inputs and gradients of the outputs, of whole sequences."""
        generator = torch.Generator().manual_seed(2)
        draws = [
            torch.randn(ROWS, self.length, 12, generator=generator, dtype=torch.float64)
            for _ in range(2)
        ]
        return draws[0].to(self.dtype), draws[1].to(self.dtype)

    def results(self, context: Context | None) -> list[Tensor]:
        """Return the outputs and the gradients of inputs and parameters, of this rank's tokens."""
        layer, (x_BTD, grad_BTD) = self.build(), self.draw()
        if context is not None:
            x_BTD, grad_BTD = context.local(x_BTD), context.local(grad_BTD)
        x_BTD.requires_grad_()
        bounds = torch.tensor([0, *self.bounds, ROWS * self.length]) if self.bounds else None
        layout = SequenceLayout(ROWS, self.length, CPU, bounds, context=context)
        recomputation = Recomputation()
        with recomputation.watch():
            y_BTD = layer(x_BTD, layout, recomputation)
        grads = torch.autograd.grad(y_BTD, [x_BTD, *layer.parameters()], grad_BTD)
        return [y_BTD.detach(), *grads]


def errors(rank: int, world_size: int, cases: list[Layer]) -> list[tuple[float, bool]]:
    """Return for each case the largest error of this rank's results, and whether a second pass has
    the same bits."""
    context, found = ContextRanks(rank, world_size, dist.group.WORLD), []
    for case in cases:
        expected, passes = case.results(None), [case.results(context) for _ in range(2)]
        same = all(x.equal(y) for x, y in zip(*passes, strict=True))
        y_BSD, grad_BSD, *of_parameters = passes[0]
        for grad in of_parameters:
            dist.all_reduce(grad)
        local = [context.local(x) for x in expected[:2]]
        pairs = zip([y_BSD, grad_BSD, *of_parameters], [*local, *expected[2:]], strict=True)
        found.append((max(error(x, y) for x, y in pairs), same))
    return found


def every(start: int, stop: int, step: int) -> tuple[int, ...]:
    return tuple(range(start, stop, step))


def cases_for(size: int) -> list[Layer]:
    """Slices of 2 to 70 tokens, with a chunk of 64 and a convolution of 4."""
    one, longer, tiny = 24 * size, 140 * size, 4 * size
    return [
        Layer(one),
        Layer(one, grouped=False),
        Layer(longer),
        Layer(tiny),
        Layer(2 * size, grouped=False),
        Layer(one, changes={"kernel_size": 1}),
        Layer(tiny, changes={"kernel_size": 7}),
        Layer(longer, (3, 4, 6, 71, 80, 100, 160, 150 * size)),
        Layer(longer, (3, 4, 6, 71, 80, 100, 160, 150 * size), grouped=False),
        Layer(one, every(12, 2 * one, 12)),  # documents begin with slices
        Layer(one, every(24, 2 * one, 24), grouped=False),
        Layer(one, (one - 1, one + 1)),
        Layer(one, (13, 23, 25, 36)),  # a token after, before, and with a slice's first
        Layer(tiny, every(3, 2 * tiny, 3)),
        Layer(tiny, every(1, 2 * tiny, 1), grouped=False),
        Layer(tiny, (5,), changes={"kernel_size": 7}),
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_slices_have_the_outputs_and_gradients_of_whole_sequences(size: int) -> None:
    cases = cases_for(size)
    for of_rank in run_ranks(errors, size, cases):
        for case, (largest, same) in zip(cases, of_rank, strict=True):
            assert largest < 1e-12, case
            assert same, case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_slices_round_as_usual_and_have_the_same_bits_each_time(
    dtype: torch.dtype,
) -> None:
    cases = [
        Layer(560, bounds, grouped, dtype=dtype)
        for bounds, grouped in itertools.product([(), (100, 700)], [True, False])
    ]
    for of_rank in run_ranks(errors, 4, cases):
        for largest, same in of_rank:
            assert largest < (1e-4 if dtype == torch.float32 else 0.1)
            assert same


@dataclass(frozen=True)
class Alike(Context):
    """Context ranks that all have the same tokens."""

    def gather(self, tensors: Any) -> tuple[Tensor, ...]:
        return tuple(torch.cat([x] * self.size, dim=1) for x in tensors)


def kept_bytes(size: int, length: int, bounds: tuple[int, ...], *, grouped: bool) -> int:
    """Return the bytes that autograd keeps of a layer, of one of `size` ranks."""
    layer = Layer(length, bounds, grouped, {"key_head_dim": 8, "value_head_dim": 8}).build()
    context = Alike(0, size) if size > 1 else None
    cu_seqlens = torch.tensor([0, *bounds, ROWS * length]) if bounds else None
    layout, recomputation = SequenceLayout(ROWS, length, CPU, cu_seqlens, context=context), None
    layout.slices(SIZES.kernel_size - 1)  # once for all layers
    x_BSD = torch.randn(ROWS, length // size, 12, dtype=torch.float64, requires_grad=True)
    recomputation = Recomputation()
    with PeakBytes() as alive:
        with recomputation.watch():
            y_BSD = layer(x_BSD, layout, recomputation)
        return alive.now - y_BSD.nbytes


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "separate"])
@pytest.mark.parametrize("bounds", [(), (100, 1030, 3000)], ids=["one", "packed"])
def test_a_rank_keeps_its_share(bounds: tuple[int, ...], grouped: bool) -> None:
    """Within 5 % of 1 / n of what one process keeps of the same sequences."""
    whole = kept_bytes(1, 4096, bounds, grouped=grouped)
    for size in (2, 4):
        share = kept_bytes(size, 4096, bounds, grouped=grouped) * size / whole
        assert 1 <= share < 1.05, (size, share)


def test_beside_its_tokens_a_rank_keeps_states_alone() -> None:
    """For each slice a head has the state before it and the matrix of its transition, and the
    convolution its last inputs."""
    kept = [kept_bytes(2, length, (), grouped=True) for length in (512, 1024)]
    beside, of_slices = 2 * kept[0] - kept[1], 2 * ROWS
    assert beside == 8 * of_slices * (6 * 8 * (8 + 8) + 3 * (2 * 16 + 48))
