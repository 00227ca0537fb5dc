"""Context parallelism: slices of the sequences on several ranks compute what one process computes
on whole sequences."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partialmethod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engines import Case, make_pair
from ranks import run_ranks
from test_engine import ALL, check_gradients

from lather.models.context import Context
from lather.models.delta_net import GatedDeltaNet
from lather.models.moe import MoE
from lather.models.saving.recomputed import Recomputation
from lather.models.token_positions import SequenceLayout
from lather.parallel import context_ranks
from lather.parallel.context_ranks import ContextRanks, by_rank, in_order
from lather.pipeline.model_part import Stage
from lather.pipeline.segments import Segments
from models.context_twins import Twins, input_of, stops, tape_of
from models.tiny import random_normal, tiny_family_model

CPU = torch.device("cpu")
SINKS = {"family": "gpt_oss", "changes": {"sliding_window": 5}}


def test_two_context_ranks_have_the_loss_and_gradients_of_one_process() -> None:
    check_gradients(
        2,
        [
            Case(cp=2, length=8, poison=True),
            Case(cp=2, length=12, family="qwen3_moe", schedule="sequential", poison=True),
            Case(cp=2, length=12, family="llama", gather="block"),
            Case(cp=2, length=12, **SINKS),
            Case(cp=2, length=16, family="qwen3_next"),
            Case(cp=2, length=8, memory="reference"),
            Case(cp=2, length=8, recompute=ALL, memory="recompute", z_loss=0.1),
            Case(cp=2, length=8, balance_level="global_batch", lopsided=True),
            Case(cp=2, length=8, balance_level="micro_batch", defer=False),
            Case(cp=2, length=8, layers=2, lora=3),
            Case(cp=2, length=8, layers=2, keep_gathered=True, poison=True),
            Case(cp=2, length=12, layers=2, family="qwen3_moe", keep_gathered=True, recompute=ALL),
            Case(cp=2, length=8, family="deepseek_v3", changes={"num_nextn_predict_layers": 2}),
        ],
    )


TWO_MORE = {"num_nextn_predict_layers": 2}
ON_FOUR = [
    Case(cp=4, length=16, poison=True),
    Case(cp=2, ep=2, length=8, poison=True, lopsided=True),
    Case(cp=2, pp=2, length=12, **SINKS, recompute=ALL),
    Case(cp=2, pp=2, length=8, family="deepseek_v3", changes=TWO_MORE, gather="block"),
    Case(cp=2, ep=2, length=12, layers=2, **SINKS, keep_gathered=True, poison=True),
    Case(cp=4, length=16, family="qwen3_5_moe", poison=True),
    Case(cp=2, pp=2, length=8, family="qwen3_next", poison=True),
    Case(cp=2, replicas=2, length=8, family="qwen3_moe"),
]
MORE_ON_FOUR = [
    Case(cp=4, length=16, **SINKS),
    Case(cp=4, length=24, family="qwen3_moe", balance_level="micro_batch"),
    Case(cp=2, ep=2, length=12, family="qwen3_moe", balance_level="global_batch"),
    Case(cp=2, pp=2, length=8, poison=True, z_loss=0.1),
    Case(cp=2, length=8, memory="recompute"),
    Case(cp=2, length=12, family="qwen3_moe", gather="block"),
    Case(cp=2, length=12, **SINKS, poison=True),
    Case(cp=2, ep=2, length=12, **SINKS, poison=True),
    Case(cp=2, pp=2, length=8, keep_gathered=True, recompute=ALL, poison=True),
    Case(cp=2, ep=2, length=16, family="qwen3_next", recompute=ALL),
]


@pytest.mark.parametrize(
    "cases", [ON_FOUR, pytest.param(MORE_ON_FOUR, marks=pytest.mark.grid)], ids=["few", "more"]
)
def test_four_context_ranks_have_the_loss_and_gradients_of_one_process(cases: list[Case]) -> None:
    check_gradients(4, cases)


@pytest.mark.grid
def test_eight_ranks_have_the_loss_and_gradients_of_one_process() -> None:
    families: list[dict[str, Any]] = [{}, {"family": "qwen3_moe"}, SINKS]
    meshes = [{"cp": 4, "ep": 2}, {"cp": 4, "pp": 2}, {"cp": 4}, {"cp": 2, "ep": 2, "pp": 2}]
    meshes.append({"cp": 2, "ep": 2, "replicas": 2})
    cases = [
        Case(length=16, poison=True, **mesh, **family) for mesh in meshes for family in families
    ]
    check_gradients(8, cases, timeout=900)


def summed(rank: int, world_size: int) -> bool:
    """Return whether the sum over ranks is that of fp32 in the order of the ranks, to the bit."""
    context = ContextRanks(rank, world_size, dist.group.WORLD)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        grads = [random_normal(2, 8, 5, seed=each).to(dtype) for each in range(world_size)]
        total_BTX = grads[0].to(torch.promote_types(dtype, torch.float32))
        for grad in grads[1:]:
            total_BTX = total_BTX + grad
        (found,) = context.start_sum([grads[rank]]).wait()
        if not found.equal(context.local(total_BTX).to(dtype)):
            return False
    return True


def test_gradients_are_summed_in_the_order_of_the_ranks() -> None:
    assert all(run_ranks(summed, 4))


def bits(rank: int, world_size: int, case: Case) -> list[bytes]:
    """Return the bits of this rank's gradients, of passes over the same batch: in one no rank is
    late, in the others one starts all of its exchanges after the others."""
    pair = make_pair(case)
    found = []
    for late in (None, 0, world_size - 1):

        def start(context: ContextRanks, *arguments: Any, start: Any, late: Any = late) -> Any:
            time.sleep(0.02 if rank == late else 0)
            return start(context, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            for name in ("start_gather", "start_sum"):
                slow = partialmethod(start, start=getattr(ContextRanks, name))
                patch.setattr(ContextRanks, name, slow)
            pair.run(pair.tokens())
        gradients = [entry.parameter.grad for entry in pair.engine.parameters]
        found.append(b"".join(x.numpy().tobytes() for x in gradients if x is not None))
        pair.engine.parameters.clear_gradients()
    return found


def test_gradients_have_the_same_bits_each_time_whichever_rank_is_first() -> None:
    """In fp32, where another order of the ranks' parts would have other bits."""
    case = Case(cp=4, length=16, layers=2, dtype=torch.float32)
    for first, *others in run_ranks(bits, 4, case):
        assert others == [first] * 2
        assert any(first)


def test_slices_are_equal_and_in_order() -> None:
    """Each position is on one rank; gathered parts are in the order of the sequence."""
    tensors = torch.arange(96.0).view(2, 16, 3), torch.arange(320.0).view(2, 16, 2, 5)
    for size in (1, 2, 4, 8):
        parts = [[Context(rank, size).local(x) for x in tensors] for rank in range(size)]
        assert in_order(torch.stack([x for x, _ in parts])).equal(tensors[0])
        parts_CN = torch.stack([torch.cat([x.flatten() for x in part]) for part in parts])
        assert by_rank(tensors, size).equal(parts_CN)
        across = tensors[0].mT.contiguous().mT
        assert by_rank((across, tensors[1]), size).equal(parts_CN)
        work = [sum(int(i) + 1 for i in Context(r, size).indices(16, CPU)) for r in range(size)]
        assert len(set(work)) == 1, "causal attention is equal work"
    assert Context(0, 2).slices(8) == (slice(0, 2), slice(6, 8))


def test_lengths_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of 10 tokens .* 2 context ranks: .* multiple of 4"):
        Context(1, 2).local(torch.zeros(1, 10))
    with pytest.raises(ValueError, match="rank = 2 is not valid: it must be one of the 2"):
        Context(2, 2)


def narrow(rank: int, world_size: int, cases: list[Case]) -> list[tuple[set[torch.dtype], float]]:
    """Return for each case the dtypes that were gathered, and the error of the loss relative to
    one process in fp32."""
    found = []
    for case in cases:
        pair = make_pair(case)
        tokens = pair.tokens()
        loss = pair.plain_gradients(tokens)
        with mock.patch.object(
            context_ranks, "all_gather_single", wraps=context_ranks.all_gather_single
        ) as gathers:
            error = abs(pair.run(tokens).loss - loss) / loss
        found.append(({call.args[1].dtype for call in gathers.call_args_list}, error))
    return found


def test_under_autocast_ranks_exchange_bf16() -> None:
    """Norms and rotations, which are wider, would double the bytes; states, which are few, pass in
    fp32. Values are compared in fp64 above."""
    bf16 = Case(cp=2, length=16, layers=4, dtype=torch.float32, precision="bf16")
    families = ("deepseek_v2", "qwen3_moe", "llama", "gpt_oss", "qwen3_next")
    cases = [replace(bf16, family=family) for family in families]
    for errors in run_ranks(narrow, 2, cases):
        for case, (dtypes, error) in zip(cases, errors, strict=True):
            states = {torch.float32} if case.family == "qwen3_next" else set()
            assert dtypes == {torch.bfloat16} | states, case.name()
            assert error < 5e-3, (case.name(), error)


def sizes(context: Twins) -> list[int]:
    """Return the present bytes of what was gathered."""
    storages = (storage() for storage in context.gathered)
    return [0 if storage is None else storage.nbytes() for storage in storages]


@pytest.mark.parametrize("recompute", [(), ALL])
@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe", "llama", "gpt_oss"])
def test_another_chunk_computes_while_context_ranks_exchange(
    family: str, recompute: tuple[str, ...]
) -> None:
    """A block has one stop more forward and one more backward. To gather again takes none of its
    own. The tape keeps nothing of whole sequences."""
    segments = Segments(recompute=recompute)
    for block in tiny_family_model(family).layers:
        found, context = [], Twins(0, 2)
        for layout in (SequenceLayout(2, 8, CPU), SequenceLayout(2, 16, CPU, context=context)):
            tape, x_BSD = tape_of(layout), input_of(block)
            forward, y_BSD = stops(segments.forward(Stage(0, (block,)), x_BSD, tape, []))
            assert not any(sizes(context))
            backward, _ = stops(segments.backward(tape, torch.ones_like(y_BSD)))
            found.append((forward, backward))
        assert found == ([(3, 3), (4, 4)] if isinstance(block.mlp, MoE) else [(0, 0), (1, 1)])


@pytest.mark.parametrize("recompute", [(), ALL])
@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe", "gpt_oss"])
def test_what_is_kept_is_not_gathered_again(family: str, recompute: tuple[str, ...]) -> None:
    """It lives until backward, which has the same gradients. By default there are two gathers."""
    segments = Segments(recompute=recompute)
    block, results = tiny_family_model(family).layers[-1], []
    for keeps in (False, True):
        context = Twins(0, 2, keeps_gathered=keeps)
        tape, x_BSD = tape_of(SequenceLayout(2, 16, CPU, context=context)), input_of(block)
        _, y_BSD = stops(segments.forward(Stage(0, (block,)), x_BSD, tape, []))
        num_gathered = len(context.gathered)
        assert [size > 0 for size in sizes(context)] == [keeps] * num_gathered
        _, grad_BSD = stops(segments.backward(tape, torch.ones_like(y_BSD)))
        assert len(context.gathered) == num_gathered * (1 if keeps else 2)
        assert not any(sizes(context))
        results.append((y_BSD, grad_BSD))
    assert all(x.equal(y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe", "llama", "qwen3_next"])
def test_a_layer_keeps_nothing_of_whole_sequences(family: str, enabled: bool) -> None:
    """It is gathered again in backward; plain autograd keeps it. Neither graphs nor closures hold
    it. Gated DeltaNet gathers ends of slices and states, and keeps them nowhere; in backward
    gradients of states."""
    model = tiny_family_model(family)
    for layer in [block.self_attn for block in model.layers]:
        passes_states = isinstance(layer, GatedDeltaNet)
        context, recomputation = Twins(0, 2), Recomputation(enabled=enabled)
        layout = SequenceLayout(2, 16, CPU, context=context)
        x_BSD = torch.randn(2, 8, model.norm.weight.shape[0], requires_grad=True)
        with recomputation.watch():
            y_BSD = layer(x_BSD, layout, recomputation)
        first = list(context.gathered)
        is_kept = not enabled and not passes_states
        assert any(storage() is not None for storage in first) == is_kept
        y_BSD.sum().backward()
        again = len(context.gathered) - len(first)
        if passes_states:
            assert (len(first), again) == (2, 1)
        else:
            assert again == (len(first) if enabled else 0), "each is gathered again once"
