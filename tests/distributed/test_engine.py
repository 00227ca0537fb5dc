"""A mesh computes what one process computes: the loss and every gradient, and after some optimizer
steps every parameter.

One process runs plain autograd (`memory="reference"`, `Decoder.forward`), which shares nothing with
the engine but the model's formulas. The subset that always runs has every axis at 1 and 2, every
family and every option; `make test-all` has the whole grid.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engines import Case, make_pair, shared_mesh
from ranks import run_ranks
from torch import Tensor

from lather.config.optim import optim_config
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.models.block import Block
from lather.parallel.expert_exchange import ExpertExchange
from models.tiny import FAMILY_TABLES, KINDS

ALL = ("attention", "experts", "shared_experts")
PER_LAYER = ("layer_types",)
"""Fields with an entry for each layer."""

TWO_RANKS = [
    Case(pp=2, poison=True),
    Case(pp=2, family="qwen3_moe", layers=4, defer=False),
    Case(pp=2, family="gpt_oss", recompute=ALL, poison=True, early_weight_gradients=True),
    Case(pp=2, frees=False, num_micro_batches=9),
    Case(ep=2, poison=True, lopsided=True),
    Case(ep=2, schedule="sequential", family="gpt_oss", memory="recompute"),
    Case(ep=2, family="qwen3_moe", recompute=ALL, z_loss=0.1, poison=True),
    Case(layers=2, poison=True),
    Case(schedule="sequential", balance_level="global_batch", recompute=("attention",)),
    Case(family="gpt_oss"),
    Case(pp=2, changes={"tie_word_embeddings": True}, poison=True),
    Case(pp=2, dtype=torch.float32),
]
FOUR_RANKS = [
    Case(pp=2, ep=2, poison=True, lopsided=True),
    Case(pp=2, ep=2, family="qwen3_moe", memory="recompute", defer=False, frees=False),
    Case(pp=2, replicas=2, changes={"tie_word_embeddings": True}),
    Case(pp=2, family="qwen3_moe", balance_level="global_batch", z_loss=0.1),
    Case(pp=4, layers=9, poison=True),
    Case(ep=2, poison=True),
    Case(ep=2, replicas=2, family="gpt_oss", schedule="sequential"),
    Case(ep=2, dtype=torch.float32),
    Case(experts=6, layers=2, schedule="sequential"),
]
"""In the last case a rank has no experts."""


PAIRED = 10**5
"""Bytes that two blocks have, and one has not."""
BLOCK_BY_BLOCK_ON_TWO = [
    Case(schedule="sequential", poison=True),
    Case(schedule="sequential", family="gpt_oss", recompute=ALL, poison=True),
    Case(schedule="sequential", changes={"tie_word_embeddings": True}, memory="recompute"),
    Case(poison=True),
    Case(early_weight_gradients=True, defer=False, family="qwen3_moe"),
    Case(ep=2, poison=True, lopsided=True),
    Case(ep=2, schedule="sequential", family="qwen3_moe", recompute=ALL),
    Case(pp=2, poison=True),
    Case(schedule="sequential", small=PAIRED, recompute=ALL, poison=True),
    Case(small=PAIRED, family="qwen3_moe", poison=True),
    Case(ep=2, lora=3, poison=True),
    Case(schedule="sequential", lora=3, recompute=ALL, family="qwen3_moe", layers=2),
]
BLOCK_BY_BLOCK_ON_FOUR = [
    Case(pp=2, ep=2, poison=True, lopsided=True),
    Case(pp=2, poison=True, recompute=ALL, early_weight_gradients=True),
    Case(pp=2, changes={"tie_word_embeddings": True}, frees=False, num_micro_batches=9),
    Case(pp=2, replicas=2, family="gpt_oss"),
    Case(replicas=2, schedule="sequential", num_micro_batches=3),
    Case(ep=2, replicas=2, family="gpt_oss", schedule="sequential"),
    Case(experts=6, layers=2, schedule="sequential"),
    Case(pp=2, small=PAIRED, layers=10, poison=True),
    Case(ep=2, small=2**30, schedule="sequential", poison=True),
    Case(pp=2, lora=3, small=PAIRED, poison=True),
    Case(ep=2, replicas=2, small=PAIRED, layers=6, poison=True),
    Case(
        pp=2,
        small=PAIRED,
        layers=12,
        recompute=ALL,
        changes={"tie_word_embeddings": True},
        poison=True,
    ),
    Case(
        pp=2,
        ep=2,
        small=PAIRED,
        layers=12,
        recompute=ALL,
        early_weight_gradients=True,
        lopsided=True,
        poison=True,
    ),
    Case(ep=2, replicas=2, lora=3, family="gpt_oss"),
]


def gradient_errors(rank: int, world_size: int, cases: list[Case]) -> list[tuple[float, float]]:
    """Return the errors of the loss and of this rank's gradients. Cases with the same mesh share
    it, and share what one process computes."""
    errors = []
    plain: dict[Any, tuple[float, list[Tensor | None]]] = {}
    for case in cases:
        pair = make_pair(case, mesh=shared_mesh(case))
        segments = pair.engine._segments
        assert (
            not isinstance(segments.exchange, ExpertExchange)
            or segments.exchange.free_buffer == segments.frees.free_buffer
        )
        units = pair.engine.units.values()
        # with four layers only the last pipeline rank has a stage of two
        assert (
            not case.small
            or rank < world_size - 1
            or any(isinstance(block, Block) for unit in units for block in [*unit.modules][1:])
        )
        tokens = pair.tokens()
        key = pair.plain_key()
        if key not in plain:
            loss = pair.plain_gradients(tokens)
            plain[key] = loss, [p.grad for p in pair.plain.parameters()]
        loss, gradients = plain[key]
        for p, gradient in zip(pair.plain.parameters(), gradients, strict=True):
            p.grad = gradient
        found = pair.run(tokens)
        assert found.tokens == tokens[:, 1:].numel()
        errors.append((abs(found.loss - loss) / abs(loss), pair.largest_error("grad")))
    return errors


def check_gradients(world_size: int, cases: list[Case], timeout: float = 200) -> None:
    by_rank = run_ranks(gradient_errors, world_size, cases, timeout=timeout)
    wrong = []
    for rank, errors in enumerate(by_rank):
        for case, (loss, grad) in zip(cases, errors, strict=True):
            limit = 1e-12 if case.dtype == torch.float64 else 1e-5
            if not (loss < limit and grad < limit):
                wrong.append(f"rank {rank}, {case.name()}: loss {loss:.1e}, gradients {grad:.1e}")
    assert not wrong, "\n".join([f"{len(wrong)} are wrong, the first:", *wrong[:4]])


def test_two_ranks_have_the_loss_and_gradients_of_one_process() -> None:
    check_gradients(2, TWO_RANKS)


def test_four_ranks_have_the_loss_and_gradients_of_one_process() -> None:
    check_gradients(4, FOUR_RANKS)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_parameters_may_be_gathered_block_by_block(world_size: int) -> None:
    cases = {2: BLOCK_BY_BLOCK_ON_TWO, 4: BLOCK_BY_BLOCK_ON_FOUR}[world_size]
    check_gradients(world_size, [replace(case, gather="block") for case in cases])


GRID = [
    Case(
        pp=pp,
        ep=ep,
        layers=2 * pp + 1,
        defer=defer,
        frees=frees,
        recompute=recompute,
        poison=frees,
        lopsided=lopsided,
        schedule=schedule,
    )
    for pp, ep, defer, frees, recompute, lopsided in itertools.product(
        (1, 2, 4), (1, 2), (True, False), (True, False), ((), ALL), (False, True)
    )
    for schedule in (("dualpipev", "sequential") if pp == 1 else ("dualpipev",))
]


def of_family(family: str, **options: Any) -> Case:
    """Return a case of a pipeline with expert parallelism, if the family has experts."""
    ep = 2 if FAMILY_TABLES[family].experts else 1
    return Case(pp=2, ep=ep, family=family, poison=True, **options)


def random_cases(family: str) -> list[Case]:
    """List the family's random configurations, with five layers and an even number of experts;
    every second one makes all segments again."""
    table, cases = FAMILY_TABLES[family], []
    for number, drawn in enumerate(table.configurations(family)):
        sizes = {**table.sizes, **drawn}
        experts = sizes.get(table.experts, 0)
        changes = {
            name: tuple(itertools.islice(itertools.cycle(value), 5)) if name in PER_LAYER else value
            for name, value in drawn.items()
            if name != "num_hidden_layers" and value is not None
        }
        more = {"experts": experts if experts % 2 == 0 else 6} if experts else {}
        recompute = ALL if number % 2 else ()
        cases.append(of_family(family, changes=changes, recompute=recompute, **more))
    return cases


def test_every_kind_of_family_has_the_loss_and_gradients_of_one_process() -> None:
    check_gradients(4, [of_family(family) for family in KINDS])


@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILY_TABLES)
def test_random_configurations_of_every_family_on_a_mesh_of_all_axes(family: str) -> None:
    check_gradients(8, random_cases(family), timeout=800)


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize(("pp", "ep"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe", "gpt_oss"])
def test_the_whole_grid(family: str, pp: int, ep: int, fsdp: int, dtype: torch.dtype) -> None:
    cases = [
        Case(**{**vars(case), "family": family, "dtype": dtype})
        for case in GRID
        if (case.pp, case.ep) == (pp, ep)
    ]
    check_gradients(pp * ep * fsdp, cases, timeout=3000)


# --- training -------------------------------------------------------------------------------------


def parameter_errors(
    rank: int, world_size: int, cases: list[tuple[Case, str]], num_steps: int
) -> list[tuple[float, float]]:
    """Return the errors of this rank's parameters after so many steps, and of the last step's
    gradient norm."""
    errors = []
    for case, name in cases:
        pair = make_pair(case)
        more = {"precondition_frequency": 2} if "soap" in name else {}
        config = optim_config(name, lr=3e-3, weight_decay=0.1, rest={"lr_factor": 1.0}, **more)
        step = TrainStep(
            pair.engine, build_optimizer(config, pair.engine.parameters), max_grad_norm=0.5
        )
        optimizer = build_optimizer(config, pair.plain.named_parameters())
        for number in range(num_steps):
            tokens = pair.tokens(number)
            result = step(pair.share_of(tokens), 3e-3)
            assert not result.skipped
            pair.plain_gradients(tokens)
            norm = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5).item()
            for group in optimizer.param_groups:
                group["lr"] = 3e-3
            optimizer.step()
            optimizer.zero_grad()
        errors.append((pair.largest_error("value"), abs(result.grad_norm - norm) / norm))
    return errors


TRAINED = {
    "four": (
        4,
        [
            (Case(pp=2, ep=2, recompute=ALL), "adamw"),
            (Case(pp=2), "soap"),
            (Case(replicas=2, layers=2), "adamw"),
        ],
    ),
}
TRAINED_IN_THE_GRID = {
    "two": (2, [(Case(ep=2, schedule="sequential"), "adamw"), (Case(pp=2), "soap")]),
    "two more": (2, [(Case(pp=2), "adamw"), (Case(schedule="sequential"), "adamw")]),
    "four more": (4, [(Case(pp=2), "adamw"), (Case(replicas=2), "adamw"), (Case(ep=2), "soap")]),
    "four with soap": (4, [(Case(pp=2, ep=2), "soap"), (Case(replicas=2), "soap")]),
}


@pytest.mark.parametrize(
    ("world_size", "cases", "num_steps"),
    [
        *(pytest.param(*case, 5, id=name) for name, case in TRAINED.items()),
        *(
            pytest.param(*case, 20, id=name, marks=[pytest.mark.grid, pytest.mark.timeout(1200)])
            for name, case in {"four, longer": TRAINED["four"], **TRAINED_IN_THE_GRID}.items()
        ),
    ],
)
def test_after_some_steps_every_parameter_is_that_of_one_process(
    world_size: int, cases: list[tuple[Case, str]], num_steps: int
) -> None:
    """Five steps are enough for SOAP to renew its bases twice."""
    for rank, errors in enumerate(
        run_ranks(parameter_errors, world_size, cases, num_steps, timeout=220)
    ):
        for (case, name), (value, norm) in zip(cases, errors, strict=True):
            assert value < 1e-10, (rank, name, case.name(), value)
            assert norm < 1e-10, (rank, name, case.name(), norm)


# --- what a mesh must refuse ----------------------------------------------------------------------


def refusals(rank: int, world_size: int) -> list[str]:
    """Give batches that do not fit: every rank refuses them before anything travels, so that the
    next step works. Validation takes any number of sequences."""
    pair = make_pair(Case(pp=2))
    found = []
    tokens, engine = pair.tokens(), pair.engine
    for method, wrong in (
        (engine.launch_gradients, tokens[:, :-1]),
        (engine.launch_gradients, tokens[:-1]),
        (engine.validation_loss, tokens[:2, :-1]),
    ):
        with pytest.raises(ValueError, match="have shape") as error:
            method(pair.share_of(wrong))
        found.append(str(error.value))
    pair.run(tokens)
    engine.validation_loss(pair.share_of(tokens[:2]))
    return found


def test_a_wrong_micro_batch_is_refused_before_anything_travels() -> None:
    remedy = "give every data rank its own share of the sequences, each of train.sequence_length"
    for short, few, validation in run_ranks(refusals, 2):
        assert short == f"the batch's inputs have shape (5, 5), not (5, 6): {remedy}"
        assert few == f"the batch's inputs have shape (4, 6), not (5, 6): {remedy}"
        assert validation == f"the batch's inputs have shape (2, 5), not (2, 6): {remedy}"


def gradients_of_steps(rank: int, world_size: int, cases: list[Case]) -> list[bool]:
    """Whether two steps that keep rounded weights have the bits of steps that round anew, for each
    case."""
    equal = []
    for case in cases:
        found = []
        for keep in ("step", "product"):
            pair = make_pair(replace(case, rounded_weights=keep), mesh=shared_mesh(case))
            optimizer = torch.optim.SGD(
                [entry.parameter for entry in pair.engine.parameters], lr=0.5
            )
            gradients: list[Tensor] = []
            for step in range(2):
                pair.run(pair.tokens(step))
                gradients += [
                    entry.parameter.grad.clone()
                    for entry in pair.engine.parameters
                    if entry.parameter.grad is not None
                ]
                optimizer.step()
                pair.engine.parameters.clear_gradients()
            assert not pair.engine._segments.rounded_weights.copies()
            found.append(gradients)
        assert len(found[0]) == len(found[1]) > 10
        equal.append(all(one.equal(other) for one, other in zip(*found, strict=True)))
    return equal


def test_rounded_weights_are_those_that_were_gathered() -> None:
    """FSDP gathers into the same parameters step after step, without counting versions."""
    cases = [
        Case(dtype=torch.float32, precision="bf16", layers=2),
        Case(pp=2, dtype=torch.float32, precision="bf16"),
    ]
    assert run_ranks(gradients_of_steps, 2, cases) == [[True, True]] * 2


def sent(
    rank: int, world_size: int, cases: list[Case]
) -> list[tuple[set[torch.dtype], float, float]]:
    """Return for each case the dtypes of the rows that were sent, and errors relative to one
    process in fp32."""
    results = []
    for case in cases:
        pair = make_pair(case, mesh=shared_mesh(case))
        tokens = pair.tokens()
        loss = pair.plain_gradients(tokens)
        with (
            mock.patch.object(dist, "P2POp", wraps=dist.P2POp) as transfers,
            mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanges,
        ):
            step = pair.run(tokens)
        calls = [*transfers.call_args_list, *exchanges.call_args_list]
        width = pair.engine.part.hidden_size
        dtypes = {call.args[1].dtype for call in calls if call.args[1].shape[-1] == width}
        error = abs(step.loss - loss) / abs(loss)
        results.append((dtypes, error, pair.largest_error("grad")))
    return results


def test_pipelines_and_exchanges_in_bf16_send_bf16() -> None:
    """Buffers are poisoned, so that a tensor is not read again after it was rounded to be sent."""
    meshes = [Case(pp=2, dtype=torch.float32, poison=True, precision="bf16")]
    meshes.append(replace(meshes[0], pp=1, ep=2))
    cases = [*meshes, *(replace(case, precision="fp32") for case in meshes)]
    for results in run_ranks(sent, 2, cases):
        for dtypes, loss, gradients in results[:2]:
            assert dtypes == {torch.bfloat16}
            assert 0 < loss < 0.01
            assert 0 < gradients < 0.3
        assert [dtypes for dtypes, *_ in results[2:]] == [{torch.float32}] * 2
