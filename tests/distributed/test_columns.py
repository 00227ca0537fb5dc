"""Token columns on a mesh: weights of labels, and choices that routers repeat, give what a process
computes with F.cross_entropy, and with routers that are told their choices one by one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from engines import Case, Pair, make_pair
from ranks import run_ranks
from torch import Tensor

from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.errors import DataError
from lather.models.balance import count_rows

ALL = ("attention", "experts", "shared_experts")


def global_batch(pair: Pair) -> Batch:
    """Return a batch with labels left out, weights, and a routing that no router would choose."""
    tokens, generator = pair.tokens(), torch.Generator().manual_seed(7)
    batch = Batch.of_tokens(tokens)
    labels_BS = batch.labels_BS.clone()
    labels_BS[0, 2:4] = labels_BS[-1, 0] = IGNORE_INDEX
    weights_BS = torch.randn(labels_BS.shape, generator=generator)
    weights_BS[1, 1] = 0
    columns = {"weights": weights_BS}
    layers = set(pair.engine.part.moe_layers) - set(pair.engine.part.mtp_layers)
    if layers:
        k = pair.engine.part.num_experts_per_tok
        noise = torch.rand(*labels_BS.shape, len(layers), pair.case.experts, generator=generator)
        columns["routing"] = noise.argsort(-1)[..., :k].to(torch.int16)
        columns["routing"][1, ::2] = -1  # the routers choose
    return replace(batch, labels_BS=labels_BS, columns=columns)


def share_of(pair: Pair, batch: Batch) -> Batch:
    def own(x: Tensor) -> Tensor:
        return x.unflatten(0, (pair.num_data, -1))[pair.mesh.data_rank]

    columns = {name: own(x) for name, x in batch.columns.items()}
    return replace(
        batch, inputs_BS=own(batch.inputs_BS), labels_BS=own(batch.labels_BS), columns=columns
    )


def plain_passes(pair: Pair, batch: Batch) -> tuple[float, list[Tensor], list[Tensor]]:
    """Return one process's loss, gradients, and rows per MoE block of the main model and expert."""
    num_labels, total, counts = int((batch.labels_BS != IGNORE_INDEX).sum()), 0.0, []
    pair.plain.eval()  # without multi-token prediction
    routers, routing = pair.plain.routers(), batch.columns.get("routing")
    for row, (inputs_S, labels_S) in enumerate(zip(batch.inputs_BS, batch.labels_BS, strict=True)):
        with contextlib.ExitStack() as replays:
            if routing is not None:
                _, own = pair.plain.hidden(inputs_S[None])
                for layer, router in enumerate(routers[: routing.shape[2]]):
                    given_SK = routing[row, :, layer].long()
                    if given_SK.min() < 0:
                        # what a router chooses depends on the layers before
                        _, own = pair.plain.hidden(inputs_S[None])
                        given_SK = torch.where(given_SK < 0, own[layer].experts_TK, given_SK)
                    replays.enter_context(router.replay(given_SK))
            output = pair.plain(inputs_S[None])
        nats_S = F.cross_entropy(
            output.logits_BSV[0], labels_S, reduction="none", ignore_index=IGNORE_INDEX
        )
        loss = (nats_S * batch.columns["weights"][row]).sum() / num_labels
        share = 1 / len(batch.inputs_BS)
        coefficient = pair.moe.balance_coefficient or 0.0
        (loss + output.balance_loss() * coefficient * share).backward()
        total += loss.item()
        counts.append([count_rows(each.experts_TK, pair.case.experts) for each in output.routings])
    of_layers = [torch.stack(rows).sum(0) for rows in zip(*counts, strict=True)]
    return total, [p.grad for p in pair.plain.parameters()], of_layers


def errors_of(rank: int, world_size: int, cases: list[Case]) -> list[tuple[float, float, bool]]:
    """Return the errors of the loss and of this rank's gradients, and whether the loads are those
    of the given routing."""
    errors = []
    for case in cases:
        pair = make_pair(case)
        batch = global_batch(pair)
        found: list[Any] = [None]
        if rank == 0:
            found = [plain_passes(pair, batch)]
        dist.broadcast_object_list(found, 0)
        loss, gradients, counts = found[0]
        for p, gradient in zip(pair.plain.parameters(), gradients, strict=True):
            p.grad = gradient
        result = pair.engine.launch_gradients(share_of(pair, batch)).read()[0]
        obeyed = all(torch.equal(a, b) for a, b in zip(counts, result.counts_LE, strict=False))
        errors.append((abs(result.loss - loss) / abs(loss), pair.largest_error("grad"), obeyed))
    return errors


def check(world_size: int, cases: list[Case]) -> None:
    for rank, errors in enumerate(run_ranks(errors_of, world_size, cases)):
        for case, (loss, grad, obeyed) in zip(cases, errors, strict=True):
            assert loss < 1e-12, (rank, case.name(), loss)
            assert grad < 1e-12, (rank, case.name(), grad)
            assert obeyed, (rank, case.name())


def test_two_ranks_weigh_labels_and_obey_a_routing_as_one_process() -> None:
    check(
        2,
        [
            Case(poison=True),
            Case(schedule="sequential", recompute=ALL, family="qwen3_moe"),
            Case(ep=2, poison=True, family="gpt_oss"),
            Case(pp=2, recompute=ALL, poison=True, early_weight_gradients=True),
            Case(cp=2, length=8, poison=True),
            Case(cp=2, length=8, recompute=ALL, gather="block"),
            Case(family="llama"),
            Case(pp=2, family="deepseek_v3"),
        ],
    )


def test_four_ranks_weigh_labels_and_obey_a_routing_as_one_process() -> None:
    check(
        4,
        [
            Case(pp=2, ep=2, poison=True),
            Case(pp=2, ep=2, family="qwen3_moe", recompute=ALL, gather="block"),
            Case(ep=2, replicas=2, schedule="sequential"),
            Case(cp=2, ep=2, length=8, poison=True),
            Case(cp=2, pp=2, length=8, family="gpt_oss"),
        ],
    )


# --- special cases -------------------------------------------------------------------------------


def bits(pair: Pair, batch: Batch) -> tuple[float, list[Tensor | None], Tensor]:
    result = pair.engine.launch_gradients(batch).read()[0]
    gradients = [entry.parameter.grad for entry in pair.engine.parameters]
    gradients = [None if grad is None else grad.clone() for grad in gradients]
    pair.engine.parameters.clear_gradients()
    return result.loss, gradients, result.counts_LE


def same_bits(rank: int, world_size: int, cases: list[Case]) -> list[bool]:
    """Return whether own routing and weights of 1 change no bit of loss, loads and gradients."""
    equal = []
    for case in cases:
        pair = make_pair(case)
        batch = pair.share_of(pair.tokens())
        with torch.no_grad():
            _, own = pair.plain.hidden(batch.inputs_BS)
        routing = torch.stack([each.experts_TK for each in own], 1).to(torch.int16)
        routing_BSLK = routing.view(*batch.inputs_BS.shape, *routing.shape[1:])
        columns = {"weights": torch.ones(batch.labels_BS.shape), "routing": routing_BSLK}
        plain, again = bits(pair, batch), bits(pair, replace(batch, columns=columns))
        other = bits(pair, replace(batch, columns={"routing": routing_BSLK.flip(0)}))
        equal += [
            plain[0] == again[0]
            and torch.equal(plain[2], again[2])
            and all(
                a is b is None or torch.equal(a, b) for a, b in zip(plain[1], again[1], strict=True)
            ),
            plain[0] != other[0],  # the comparison can fail
        ]
    return equal


BITS = [
    Case(pp=2, ep=2, dtype=torch.float32, poison=True),
    Case(ep=2, dtype=torch.float32, family="qwen3_moe", schedule="sequential", recompute=ALL),
    Case(pp=2, dtype=torch.float32, family="deepseek_v3"),
    Case(pp=2, family="deepseek_v3", changes={"num_nextn_predict_layers": 2}),
]


@pytest.mark.grid
def test_own_routing_and_weights_of_one_change_no_bit_on_four_ranks() -> None:
    assert all(map(all, run_ranks(same_bits, 4, BITS)))


def test_own_routing_and_weights_of_one_change_no_bit_on_a_rank() -> None:
    assert all(same_bits(0, 1, [replace(case, pp=1, ep=1) for case in BITS]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :, :1], r"routing has shape \(1, 2\) per token"),
        (lambda x: x + 3, r"routing has expert \d: give experts from 0 to 3"),
        (lambda x: x * 0 - 2, "routing has expert -2"),
        (lambda x: x * 0, "the same expert twice"),
        (lambda x: torch.cat((x[..., :1] * 0 - 1, x[..., 1:]), -1), "without an expert in some"),
    ],
)
def test_a_routing_that_is_none_of_the_model_is_refused_before_a_step(
    change: Any, message: str
) -> None:
    pair = make_pair(Case(schedule="sequential"))
    batch = global_batch(pair)
    wrong = change(batch.columns["routing"].clamp(min=0))
    with pytest.raises(DataError, match=message):
        pair.engine.launch_gradients(replace(batch, columns={"routing": wrong}))
    assert all(entry.parameter.grad is None for entry in pair.engine.parameters)


def test_a_refused_routing_names_data_set_and_sequence() -> None:
    pair = make_pair(Case(schedule="sequential"))
    batch = global_batch(pair)
    origins = tuple(f"data/foreign (train), sequence {n}" for n in range(len(batch.inputs_BS)))
    good = batch.columns["routing"].clamp(min=0)
    for value, words in ((77, "routing has expert 77"), (-1, "routing has a token without")):
        routing = good.clone()
        routing[1, 3, 0, 0] = value
        wrong = replace(batch, columns={"routing": routing}, origins=origins)
        with pytest.raises(DataError, match=rf"^data/foreign \(train\), sequence 1: {words}"):
            pair.engine.launch_gradients(wrong)
    wrong = replace(batch, columns={"routing": good[..., :1]}, origins=origins)
    with pytest.raises(DataError, match=r"^data/foreign \(train\), sequence 0: routing has shape"):
        pair.engine.launch_gradients(wrong)


def test_columns_have_the_shape_of_the_batch() -> None:
    pair = make_pair(Case(schedule="sequential"))
    batch = global_batch(pair)
    with pytest.raises(ValueError, match="the batch's weights have shape"):
        pair.engine.launch_gradients(replace(batch, columns={"weights": torch.ones(2, 3)}))


def test_validation_leaves_columns_out() -> None:
    pair = make_pair(Case(schedule="sequential"))
    batch = global_batch(pair)
    plain = pair.engine.validation_loss(replace(batch, columns={}))
    assert pair.engine.validation_loss(batch) == plain


# --- pairs of answers -----------------------------------------------------------------------------

BETA = 0.3


def preference_batch(pair: Pair) -> Batch:
    """Return sequences of one or two pairs of short documents, chosen or rejected first, behind
    them a document without a pair; each document begins with a token that is not learned."""
    tokens, generator = pair.tokens(), torch.Generator().manual_seed(3)
    batch = Batch.of_tokens(tokens)
    begins_BS = torch.zeros(batch.inputs_BS.shape, dtype=torch.bool)
    pairs_BS = torch.zeros(batch.inputs_BS.shape, dtype=torch.int64)
    labels_BS = batch.labels_BS.clone()
    for row in range(len(tokens)):
        for number in range(1 + row % 2):
            for answer, sign in enumerate((1, -1) if row % 3 else (-1, 1)):
                start = 4 * number + 2 * answer
                begins_BS[row, start] = True
                pairs_BS[row, start : start + 2] = sign * (7 + number + 1000 * row)
        begins_BS[row, start + 2] = True
        labels_BS[row, start + 2 :] = IGNORE_INDEX
    labels_BS[0, 0] = IGNORE_INDEX  # part of an answer that is not learned
    logprobs_BS = -torch.rand(labels_BS.shape, generator=generator) * 4
    logprobs_BS[pairs_BS == 0] = torch.nan
    columns = {"pairs": pairs_BS, "logprobs": logprobs_BS}
    return replace(batch, labels_BS=labels_BS, begins_BS=begins_BS, columns=columns)


def plain_preferences(pair: Pair, batch: Batch) -> tuple[float, list[Tensor]]:
    """Return one process's loss and gradients, by the formula of TRL: the sigmoid loss of
    `DPOTrainer`, -logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))."""
    num_pairs = len(batch.columns["pairs"].abs().unique()) - 1
    total = 0.0
    for row, inputs_S in enumerate(batch.inputs_BS):
        bounds = [*batch.begins_BS[row].nonzero().flatten().tolist(), len(inputs_S)]
        output = pair.plain(inputs_S[None], cu_seqlens=torch.tensor(bounds))
        logprobs_SV = F.log_softmax(output.logits_BSV[0], -1)
        answers: dict[int, Tensor] = {}
        references: dict[int, float] = {}
        for position, label in enumerate(batch.labels_BS[row].tolist()):
            answer = int(batch.columns["pairs"][row, position])
            if answer and label != IGNORE_INDEX:
                answers[answer] = answers.get(answer, 0) + logprobs_SV[position, label]
                reference = batch.columns["logprobs"][row, position].item()
                references[answer] = references.get(answer, 0) + reference
        share = 1 / len(batch.inputs_BS)
        loss = output.balance_loss() * (pair.moe.balance_coefficient or 0.0) * share
        for number in [answer for answer in answers if answer > 0]:
            chosen = answers[number] - references[number]
            rejected = answers[-number] - references[-number]
            of_pair = -F.logsigmoid(BETA * (chosen - rejected)) / num_pairs
            total, loss = total + of_pair.item(), loss + of_pair
        loss.backward()
    return total, [p.grad for p in pair.plain.parameters()]


def preference_errors(rank: int, world_size: int, cases: list[Case]) -> list[tuple[float, float]]:
    errors = []
    for case in cases:
        pair = make_pair(case)
        pair.engine.shares.dpo_beta = BETA
        batch = preference_batch(pair)
        found: list[Any] = [None]
        if rank == 0:
            found = [plain_preferences(pair, batch)]
        if world_size > 1:
            dist.broadcast_object_list(found, 0)
        loss, gradients = found[0]
        for p, gradient in zip(pair.plain.parameters(), gradients, strict=True):
            p.grad = gradient
        share = share_of(pair, batch)
        begins = batch.begins_BS.unflatten(0, (pair.num_data, -1))[pair.mesh.data_rank]
        reading = pair.engine.launch_gradients(replace(share, begins_BS=begins))
        error = abs(reading.read()[0].loss - loss) / abs(loss)
        errors.append((error, pair.largest_error("grad")))
    return errors


def test_pairs_have_the_loss_and_gradients_of_trl_in_one_process() -> None:
    cases = [Case(schedule="sequential", length=12), Case(length=12, family="llama")]
    assert max(map(max, preference_errors(0, 1, cases))) < 1e-12


def test_pairs_have_the_loss_and_gradients_of_trl_on_four_ranks() -> None:
    cases = [
        Case(pp=2, ep=2, length=12, poison=True),
        Case(ep=2, replicas=2, length=12, family="qwen3_moe", schedule="sequential"),
        Case(cp=2, pp=2, length=12, poison=True),
        Case(cp=2, ep=2, length=12, family="gpt_oss", recompute=ALL),
    ]
    for errors in run_ranks(preference_errors, 4, cases):
        assert max(map(max, errors)) < 1e-12


def test_pairs_and_dpo_belong_together() -> None:
    pair = make_pair(Case(schedule="sequential", length=12))
    batch = preference_batch(pair)
    with pytest.raises(DataError, match="the data has pairs of answers"):
        pair.engine.launch_gradients(batch)
    pair.engine.shares.dpo_beta = BETA
    with pytest.raises(DataError, match=r"dpo_beta = 0\.3, but the data has no pairs"):
        pair.engine.launch_gradients(replace(batch, columns={}))


def test_a_prelude_refuses_a_routing_of_another_model() -> None:
    pair = make_pair(Case(schedule="sequential"))
    batch = global_batch(pair)
    routing = batch.columns["routing"][:, :, :-1]
    batch = replace(batch, columns={**batch.columns, "routing": routing})
    with pytest.raises(DataError, match=r"routing has shape \(.*\) per token, but the"):
        pair.engine.run_prelude(batch)
