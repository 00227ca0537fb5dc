"""Padding and unequal labels on meshes: one process that sees the whole batch at once has the same
loss, auxiliary losses, loads and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import LENGTH, VOCABULARY, Case, Pair, make_pair, shared_mesh
from ranks import run_ranks
from torch import Tensor

from lather.config.loop import LoopConfig
from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.engine.step import TrainStep
from lather.models.document_boundaries import document_boundaries
from lather.optim import AdamW

ALL = ("attention", "experts", "shared_experts")
COMMON: dict[str, Any] = {"balance_level": "sequence", "z_loss": 0.1, "layers": 2, "poison": True}
PIPELINE: dict[str, Any] = {**COMMON, "pp": 2, "layers": 4}
SEQUENCES = 8
"""Sequences of a batch that two ranks divide."""
FEW = 4
"""Micro-batches of a rank, each of a sequence: as many as a pipeline of two ranks needs."""

MTP: dict[str, Any] = {"family": "deepseek_v3", "changes": {"num_nextn_predict_layers": 2}}
ONE_RANK = [Case(**COMMON, num_micro_batches=FEW)]
TWO_RANKS = [
    Case(**PIPELINE, num_micro_batches=FEW),
    Case(**PIPELINE, num_micro_batches=FEW, family="qwen3_moe", recompute=ALL),
    Case(**COMMON, ep=2, num_micro_batches=FEW, family="gpt_oss"),
    Case(**COMMON, ep=2, num_micro_batches=FEW, memory="recompute", recompute=ALL),
    Case(**COMMON, ep=2, num_micro_batches=FEW, schedule="sequential"),
    Case(**COMMON, num_micro_batches=FEW),
    Case(**COMMON, **MTP, num_micro_batches=FEW, schedule="sequential"),
    Case(**COMMON, cp=2, length=8, num_micro_batches=FEW),
    Case(**COMMON, cp=2, length=12, num_micro_batches=FEW, family="gpt_oss", recompute=ALL),
    Case(**COMMON, **MTP, cp=2, length=8, num_micro_batches=FEW),
    Case(**COMMON | {"layers": 4}, cp=2, length=16, num_micro_batches=FEW, family="qwen3_next"),
]
FOUR_RANKS = [
    Case(**COMMON, cp=4, length=8, num_micro_batches=FEW),
    Case(**COMMON, cp=4, length=16, num_micro_batches=FEW, family="qwen3_moe"),
    Case(**COMMON, **MTP, cp=2, ep=2, length=8, num_micro_batches=FEW),
    Case(**PIPELINE, cp=2, length=8, num_micro_batches=FEW),
    Case(**PIPELINE, ep=2, num_micro_batches=FEW),
    Case(**PIPELINE, **MTP, ep=2, num_micro_batches=FEW),
]


def batch(tokens_of_row: list[int], length: int = LENGTH) -> Batch:
    """Draw a global batch whose rows have so many tokens, in two documents, of which a row's first
    tokens are not learned."""
    generator = torch.Generator().manual_seed(7)
    place_S, lengths_B = torch.arange(length), torch.tensor(tokens_of_row)
    padding_BS = place_S >= lengths_B[:, None]
    number = len(tokens_of_row)
    inputs_BS = torch.randint(VOCABULARY, (number, length), generator=generator)
    labels_BS = torch.randint(VOCABULARY, (number, length), generator=generator)
    unlearned_BS = place_S < (torch.arange(number) % 4)[:, None]
    return Batch(
        inputs_BS.masked_fill(padding_BS, 0),
        labels_BS.masked_fill(padding_BS | unlearned_BS, IGNORE_INDEX),
        begins_BS=(place_S == 0) | (place_S == 2) | (place_S == lengths_B[:, None]),
        padding_BS=padding_BS,
    )


PADDED = [6, 0, 3, 5, 2, 0, 1, 4]
BATCHES = {
    "some padding, and all of some micro-batches": PADDED,
    "all of a rank": [6, 5, 6, 2, 0, 0, 0, 0],
}


def share_of(pair: Pair, whole: Batch) -> Batch:
    """Return the rows of this rank."""

    def own(x_BS: Tensor | None) -> Tensor | None:
        return None if x_BS is None else x_BS.unflatten(0, (pair.num_data, -1))[pair.mesh.data_rank]

    tensors = {name: x for name, x in vars(whole).items() if isinstance(x, Tensor)}
    return replace(whole, **{name: own(x) for name, x in tensors.items()})


def errors(rank: int, world_size: int, cases: list[Case]) -> list[tuple[str, float]]:
    """Return the largest relative error of this rank for each case and batch."""
    found = []
    for case in cases:
        pair = make_pair(case, mesh=shared_mesh(case))
        for name in BATCHES:
            lengths = BATCHES[name][: pair.num_data * FEW]
            whole = batch(lengths, case.length)
            result = pair.engine.launch_gradients(share_of(pair, whole)).read()[0]
            loss, mtp_loss, balance, counts_LE = plain_pass(pair, whole)
            assert result.tokens == whole.num_labels
            assert torch.equal(result.counts_LE, counts_LE)
            assert int(result.counts_LE[0].sum()) % sum(lengths) == 0
            error = max(
                abs(result.loss / loss - 1),
                abs(result.mtp_loss / mtp_loss - 1) if mtp_loss else 0.0,
                abs(result.balance_loss / balance - 1),
                pair.largest_error("grad"),
            )
            found.append((f"rank {rank}, {case.name()}, {name}", error))
            pair.engine.parameters.clear_gradients()
    return found


def plain_pass(pair: Pair, whole: Batch) -> tuple[float, float, float, Tensor]:
    """Run one process's backward pass on the whole batch; return the loss, that of multi-token
    prediction (0: none), the mean balance loss and the loads of the experts."""
    pair.plain.zero_grad()
    assert whole.begins_BS is not None
    output = pair.plain(
        whole.inputs_BS,
        whole.labels_BS,
        cu_seqlens=document_boundaries(whole.begins_BS),
        normalizer=float(whole.num_labels),
        padding_BS=whole.padding_BS,
    )
    balance, z_loss = output.balance_loss(), output.z_loss()
    auxiliary = pair.moe.balance_coefficient * balance + pair.moe.z_loss_coefficient * z_loss
    mtp_loss = torch.zeros(())
    for depth, summed in enumerate(output.mtp_losses, start=1):
        mean = summed * whole.num_labels / num_predicted(whole, depth)
        mtp_loss = mtp_loss + mean / len(output.mtp_losses)
    (output.loss + auxiliary + LoopConfig.mtp_loss_weight * mtp_loss).backward()
    counts_LE = torch.stack([routing.count_E for routing in output.routings])
    mean_balance = balance.item() / len(output.routings)
    return output.loss.item(), mtp_loss.item(), mean_balance, counts_LE


def num_predicted(whole: Batch, depth: int) -> int:
    """Count the labels whose document has `depth` tokens before the one that they follow."""
    assert whole.begins_BS is not None
    number = 0
    for labels, begins in zip(whole.labels_BS.tolist(), whole.begins_BS.tolist(), strict=True):
        for place, label in enumerate(labels):
            reach = begins[max(0, place - depth + 1) : place + 1]
            number += label != IGNORE_INDEX and place >= depth and not any(reach)
    return number


@pytest.mark.parametrize(
    "cases",
    [ONE_RANK, TWO_RANKS, pytest.param(FOUR_RANKS, marks=pytest.mark.grid)],
    ids=["one rank", "two ranks", "four ranks"],
)
def test_ranks_have_what_one_process_has_that_sees_the_whole_batch(cases: list[Case]) -> None:
    by_rank = run_ranks(
        errors, max(case.pp * case.cp * case.ep * case.replicas for case in cases), cases
    )
    found = [one for of_rank in by_rank for one in of_rank]
    wrong = [f"{name}: {error:.1e}" for name, error in found if not error < 1e-12]
    assert not wrong, "\n".join(wrong)


def unlearned_step(rank: int, world_size: int, case: Case) -> tuple[bool, bool, list[int]]:
    """Take a step, then one without labels; return whether the second was skipped, whether it left
    all bits as they were, and the labels of a third, which has labels on rank 0 alone."""
    pair = make_pair(case)
    parameters = [entry.parameter for entry in pair.engine.parameters]
    optimizer = AdamW(pair.engine.parameters.spread(), lr=0.1, weight_decay=0.1)
    step = TrainStep(pair.engine, optimizer, 1.0)
    whole = batch(PADDED)
    step(share_of(pair, whole), 0.1)

    def bits() -> list[Tensor]:
        states = [x for state in optimizer.state.values() for x in state.values()]
        return [x.detach().clone() for x in (*parameters, *pair.engine.part.buffers(), *states)]

    before = bits()
    nothing = step(
        share_of(pair, replace(whole, labels_BS=torch.full_like(whole.labels_BS, IGNORE_INDEX))),
        0.1,
    )
    same = all(torch.equal(x, y) for x, y in zip(before, bits(), strict=True))
    some = whole.labels_BS.clone()
    some[1:] = IGNORE_INDEX
    third = step(share_of(pair, replace(whole, labels_BS=some)), 0.1)
    moved = not all(torch.equal(x, y) for x, y in zip(before, bits(), strict=True))
    dist.barrier()
    return (
        nothing.skipped and nothing.loss != nothing.loss,
        same and moved,
        [nothing.tokens, third.tokens],
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(layers=4, pp=2, num_micro_batches=SEQUENCES),
        Case(layers=4, ep=2, num_micro_batches=FEW),
    ],
    ids=["pp 2", "ep 2"],
)
def test_a_step_without_labels_changes_nothing_on_any_rank(case: Case) -> None:
    labels = int((batch(PADDED).labels_BS[0] != IGNORE_INDEX).sum())
    assert run_ranks(unlearned_step, 2, case) == [(True, True, [0, labels])] * 2
