"""Weights that are gathered in bf16, and gradients that are kept in bf16, on ranks that train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engines import Case, Pair, make_pair, mesh_of
from ranks import run_ranks
from torch import Tensor

from lather.boxes import local
from lather.config.optim import optim_config
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.parallel import fsdp_units, sharded_parameters
from lather.parallel.mesh import Mesh
from models.tiny import KINDS

BF16 = Case(layers=5, dtype=torch.float32, precision="bf16", poison=True)


def run(case: Case, mesh: Mesh) -> tuple[Pair, float, list[Tensor]]:
    """Run two steps; return the pair, the loss of the second, and its gradients."""
    pair = make_pair(case, mesh=mesh)
    for step in range(2):
        pair.engine.parameters.clear_gradients()
        loss = pair.run(pair.tokens(step)).loss
    return (
        pair,
        loss,
        [local(e.source.grad) for e in pair.engine.parameters if e.source.requires_grad],
    )


def gathers(rank: int, world_size: int, cases: list[Case]) -> list[tuple[bool, int, int]]:
    """Whether gathers in bf16 give the bits of gathers in fp32, for each case; and the bytes of
    both."""
    results = []
    for case in cases:
        mesh = mesh_of(case)
        pair, loss, gradients = run(case, mesh)
        with mock.patch.object(fsdp_units, "product_weights", return_value=set()):
            wide, *expected = run(case, mesh)
        same = loss == expected[0] and all(map(torch.equal, gradients, expected[1]))
        results.append((same, *(gathered_bytes(each) for each in (pair, wide))))
    return results


def gathered_bytes(pair: Pair) -> int:
    units: Any = pair.engine.units.values()
    return sum(p.numel() * p.itemsize for unit in units for p in unit.gathered)


def test_gathers_in_bf16_have_the_bits_of_gathers_in_fp32() -> None:
    """Products round their weights in any case. Embeddings, routers, norms and biases stay fp32."""
    cases = [
        *(replace(BF16, family=family, layers=2) for family in KINDS),
        replace(BF16, ep=2, rounded_weights="product"),
        replace(BF16, pp=2, changes={"tie_word_embeddings": True}),
    ]
    for results in run_ranks(gathers, 2, cases):
        for case, (same, narrow, wide) in zip(cases, results, strict=True):
            assert same, case.name()
            assert narrow <= wide
        assert all(narrow < 0.75 * wide for _, narrow, wide in results[: len(KINDS)])


def large(rank: int, world_size: int, cases: list[Case]) -> list[bool]:
    """Whether parameters that are gathered and reduced one by one have the bits of those that go
    together, for each case."""
    results = []
    for case in cases:
        mesh = mesh_of(case)
        _, loss, gradients = run(case, mesh)
        with mock.patch.object(fsdp_units, "LARGE", 0):
            pair, *expected = run(case, mesh)
        assert all(len(x.members) == 1 for u in pair.engine.units.values() for x in u.sharded)
        results.append(loss == expected[0] and all(map(torch.equal, gradients, expected[1])))
    return results


def test_large_parameters_go_by_themselves() -> None:
    """Some have an odd number of rows, so that they are padded; a sum of two numbers has the same
    bits in any order."""
    cases = [replace(BF16, layers=2), Case(layers=2, poison=True, family="gpt_oss", experts=3)]
    assert run_ranks(large, 2, cases) == [[True] * 2] * 2


TIED = Case(
    layers=2,
    schedule="sequential",
    gather="block",
    poison=True,
    family="qwen3",
    changes={"tie_word_embeddings": True},
)
MTP = replace(TIED, family="deepseek_v3", layers=5, changes={"num_nextn_predict_layers": 2})


def communicated(rank: int, world_size: int, cases: list[Case]) -> list[tuple[int, int, bool]]:
    """The number of collectives of parameters that go one by one, and of those whose memory is not
    as large as their tensors, and whether the bits are those of parameters that go together; for
    each case, of which units are reduced several times per micro-batch."""
    results = []
    for case in cases:
        mesh, are_whole = mesh_of(case), list[bool]()
        _, loss, gradients = run(case, mesh)

        def checked(function: Any, are_whole: list[bool] = are_whole) -> Any:
            def call(*tensors: Tensor, **options: Any) -> Any:
                for x in tensors:
                    end = (x.storage_offset() + x.numel()) * x.itemsize
                    are_whole.append(x.is_contiguous() and x.untyped_storage().nbytes() >= end)
                return function(*tensors, **options)

            return call

        ours: Any = sharded_parameters
        with (
            mock.patch.object(fsdp_units, "LARGE", 0),
            mock.patch.object(ours, "reduce_scatter_single", checked(ours.reduce_scatter_single)),
            mock.patch.object(ours, "dist", mock.Mock(all_reduce=checked(dist.all_reduce))),
        ):
            _, *expected = run(case, mesh)
        same = loss == expected[0] and all(map(torch.equal, gradients, expected[1]))
        results.append((len(are_whole), are_whole.count(False), same))
    return results


@pytest.mark.parametrize("replicas", [1, 2])
def test_missing_gradients_have_memory_when_they_are_communicated(replicas: int) -> None:
    cases = [replace(TIED, replicas=replicas), replace(MTP, replicas=replicas)]
    for results in run_ranks(communicated, 2, cases):
        for count, wrong, same in results:
            assert count > 20
            assert wrong == 0
            assert same


def reduced_over_replicas(rank: int, world_size: int, case: Case) -> list[tuple[int, int]]:
    """The numbers of sums over replicas in a step, and of groups of parameters that have them,
    with one micro-batch and with three."""
    results = []
    for number in (1, 3):
        pair = make_pair(replace(case, num_micro_batches=number))
        with mock.patch.object(sharded_parameters, "dist", mock.Mock(wraps=dist)) as calls:
            pair.run(pair.tokens())
        units = dict.fromkeys(pair.engine.units.values())
        results.append((calls.all_reduce.call_count, sum(len(unit.sharded) for unit in units)))
    return results


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_sums_over_replicas_are_made_once_per_step(world_size: int) -> None:
    (one, number), three = run_ranks(reduced_over_replicas, world_size, replace(MTP, replicas=2))[0]
    assert (one, number) == three
    assert one == number > 5


def rounding_by_block(rank: int, world_size: int, cases: list[Case]) -> list[tuple[bool, float]]:
    """Whether weights that are rounded for each pass through a block give the bits of weights that
    are rounded once, for each case; and the bytes that are gathered, in those of all weights."""
    results = []
    for case in cases:
        mesh = mesh_of(case)
        pair, loss, gradients = run(replace(case, rounded_weights="block"), mesh)
        _, *expected = run(replace(case, rounded_weights="step"), mesh)
        same = loss == expected[0] and all(map(torch.equal, gradients, expected[1]))
        weights = sum(entry.parameter.nbytes for entry in pair.engine.parameters)
        results.append((same, gathered_bytes(pair) / weights))
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_rounded_by_block_have_the_same_bits(world_size: int) -> None:
    base = replace(BF16, layers=2)
    cases = {
        1: [base, replace(base, gradient_dtype="bfloat16", family="gpt_oss")],
        2: [replace(base, ep=2)],
    }[world_size]
    for results in run_ranks(rounding_by_block, world_size, cases):
        for same, fraction in results:
            assert same
            # most weights, in half of their bytes; of two ranks, those that are shared are whole
            assert 0.25 * world_size < fraction < 0.6 * world_size


def kept_gradients(rank: int, world_size: int, cases: list[Case]) -> list[tuple[bool, float]]:
    """Whether all gradients are bf16, and their largest difference from those that are kept in
    fp32, relative to the largest of a parameter."""
    results = []
    for case in cases:
        mesh = mesh_of(case)
        _, _, gradients = run(case, mesh)
        _, _, expected = run(replace(case, gradient_dtype="float32"), mesh)
        error = max(
            ((kept - wide).abs().max() / wide.abs().max().clamp(min=1e-3)).item()
            for kept, wide in zip(gradients, expected, strict=True)
            if wide.numel()
        )
        results.append(({x.dtype for x in gradients} == {torch.bfloat16}, error))
    return results


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.grid)])
def test_gradients_in_bf16_are_those_in_fp32_rounded(world_size: int) -> None:
    """Each of two or three roundings is wrong by less than 2^-7 of a sum, 0.8 %; without one of
    the micro-batches a sum would differ by a third or more."""
    base = replace(BF16, layers=2, gradient_dtype="bfloat16", precision="fp32")
    several = [  # reductions of a unit per micro-batch
        replace(case, dtype=torch.float32, gradient_dtype="bfloat16") for case in (TIED, MTP)
    ]
    cases = {
        1: [base, *several],
        2: [replace(base, family="gpt_oss"), replace(base, ep=2), *several],
        4: [replace(base, replicas=2), replace(base, ep=2)],
    }[world_size]
    for results in run_ranks(kept_gradients, world_size, cases):
        for are_bf16, error in results:
            assert are_bf16
            assert 1e-4 < error < 0.03


def trained(rank: int, world_size: int, gradient_dtype: str) -> list[tuple[float, float]]:
    """Train three steps with each of some rules, with clipping; return losses and norms."""
    results = []
    mesh = mesh_of(Case(gradient_dtype=gradient_dtype))
    for name in ("adamw", "soap", "muon"):
        case = replace(BF16, layers=2, gradient_dtype=gradient_dtype)
        pair = make_pair(case, mesh=mesh)
        config = optim_config(name, lr=3e-4)
        step = TrainStep(
            pair.engine, build_optimizer(config, pair.engine.parameters), max_grad_norm=0.1
        )
        for number in range(3):
            result = step(pair.share_of(pair.tokens(number)), 3e-4)
            results.append((result.loss, result.grad_norm))
    return results


def test_optimizers_step_with_gradients_in_bf16() -> None:
    """Losses and norms are those of gradients that are kept in fp32, but for their rounding: by
    less than the 1 % that scaling or clipping might be wrong by."""
    for kept, expected in zip(
        run_ranks(trained, 2, "bfloat16")[0], run_ranks(trained, 2, "float32")[0], strict=True
    ):
        assert kept == pytest.approx(expected, rel=5e-3)
        assert kept[1] != expected[1]
