"""Sharded parameters and gradients against one process: plain sums over data ranks, whatever the mesh; local rows, norm, count, clip.

Four ranks are started once and run every case; what each rank has is put together here by its `ShardInfo`, and compared with a model that
saw the data of all ranks. The loss of a block is made of its parts on fixed data, so that experts need no exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lather.models.decoder import Block, Decoder
from lather.models.moe import MoE
from lather.parallel.gradients import clip_, grad_norm, token_count
from lather.parallel.local import ShardInfo, local_parameters, rows_of
from lather.parallel.mesh import Mesh
from lather.parallel.shard import Unit, check_dtypes, shard
from lather.train.config import ParallelConfig
from models.tiny import largest_error, layout_of, random_normal, tiny_family_model

CPU = torch.device("cpu")
MICRO_BATCHES = 2
STEPS = 2
BATCH, LENGTH, HIDDEN, VOCAB = 1, 6, 24, 37
LR = 0.01


@dataclass(frozen=True)
class Case:
    pp: int = 1
    ep: int = 1
    replicas: int = 1
    replicate_dense: bool = False
    experts: int = 5
    tied: bool = False
    dtype: torch.dtype = torch.float64
    idle_rank: int | None = None
    """A data rank on which the routed experts and the first block's attention have no gradient."""

    @property
    def dp(self) -> int:
        return 4 // (self.pp * self.ep)

    @property
    def data_size(self) -> int:
        return self.dp * self.ep


CASES = {
    "dp4": Case(),
    "dp4-fp32-tied": Case(dtype=torch.float32, tied=True),
    "dp2-ep2": Case(ep=2, experts=2),
    "ep4": Case(ep=4, experts=8),
    "hsdp": Case(replicas=2, tied=True),
    "replicated-dense": Case(ep=2, experts=6, replicate_dense=True),
    "pp2-dp2": Case(pp=2),
    "pp4": Case(pp=4),
    "idle": Case(ep=2, experts=6, idle_rank=1),
}


class Part(nn.Module):
    """A rank's share of a decoder, in V order, with the decoder's names."""

    def __init__(self, decoder: Decoder, case: Case, mesh: Mesh) -> None:
        super().__init__()
        stages = 2 * case.pp
        firsts = [len(decoder.layers) * stage // stages for stage in range(stages + 1)]
        mine = (mesh.pp_rank, stages - 1 - mesh.pp_rank)
        ranges = [range(firsts[stage], firsts[stage + 1]) for stage in mine]
        self.layers = nn.ModuleDict({str(i): decoder.layers[i] for numbers in ranges for i in numbers})
        self.stages = [SimpleNamespace(blocks=[decoder.layers[i] for i in numbers]) for numbers in ranges]
        if mesh.pp_rank == 0:
            self.embed_tokens, self.norm, self.lm_head = decoder.embed_tokens, decoder.norm, decoder.lm_head
        for block in self.layers.values():
            keep_experts(block, mesh.ep_rank, case.ep)


def keep_experts(block: Block, ep_rank: int, ep: int) -> None:
    experts = block.mlp.experts
    for name, p in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(p.detach().chunk(ep)[ep_rank].clone()))


def whole_model(case: Case) -> Decoder:
    changes = {"num_experts": case.experts, "num_hidden_layers": 2 * case.pp, "tie_word_embeddings": case.tied}
    return tiny_family_model("qwen3_moe", **changes).to(case.dtype)


def tokens_of(data_rank: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Tokens, and labels with a mask that differs from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * data_rank + micro_batch)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, : data_rank + micro_batch] = -100
    return tokens[:, :-1], labels


def inputs_of(data_rank: int, step: int, micro_batch: int, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, and for the routed experts the router's decision."""
    seed = 1000 * step + 10 * data_rank + micro_batch
    experts_TK = torch.randint(case.experts, (LENGTH, 2), generator=torch.Generator().manual_seed(seed))
    return (
        random_normal(BATCH, LENGTH, HIDDEN, seed=seed).to(case.dtype),
        experts_TK,
        random_normal(LENGTH, 2, seed=seed + 5).to(case.dtype),
    )


def block_loss(block: Block, case: Case, data_rank: int, step: int, micro_batch: int) -> Tensor:
    """What this data rank adds: everything but the experts on its own data, its experts on that of all ranks of its ep group."""
    assert isinstance(block.mlp, MoE)
    x_BSD = inputs_of(data_rank, step, micro_batch, case)[0]
    attended = block.attend_and_route(x_BSD, layout_of(x_BSD))
    assert attended.routing is not None
    loss = attended.residual_BSD.sin().sum() + attended.normed_TD.cos().sum() + attended.routing.weights_TK.square().sum()
    ep_rank, share = data_rank % case.ep, case.experts // case.ep
    for other in range(data_rank - ep_rank, data_rank - ep_rank + case.ep):
        x_BSD, experts_TK, weights_TK = inputs_of(other, step, micro_batch, case)
        experts_TK = torch.where(experts_TK // share == ep_rank, experts_TK % len(block.mlp.experts.down_proj), -1)
        loss = loss + (block.mlp.experts(x_BSD[0], experts_TK, weights_TK) * x_BSD[0]).sum()
    return loss


def loss_of(decoder: Decoder, part: nn.Module, case: Case, data_rank: int, step: int, count: Tensor) -> list[Tensor]:
    """One loss for each micro-batch: the decoder's own where a rank has all of it, else that of the modules that are in `part`."""
    losses = []
    numbers = [number for number, block in enumerate(decoder.layers) if any(block is m for m in part.modules())]
    for micro_batch in range(MICRO_BATCHES):
        tokens, labels = tokens_of(data_rank, step, micro_batch)
        if case.data_size == 4 and case.ep == 1:
            loss = decoder(tokens, labels, normalizer=count).loss
            assert loss is not None
        else:
            loss = torch.zeros((), dtype=case.dtype)
            for number in numbers:
                if not (case.idle_rank == data_rank and number == 0):
                    loss = loss + block_loss(decoder.layers[number], case, data_rank, step, micro_batch)
            if any(decoder.norm is m for m in part.modules()):
                x_BSD = decoder.embed_tokens(tokens)
                loss = loss + decoder.lm_head(x_BSD if case.idle_rank is not None else decoder.norm(x_BSD)).square().sum()
        losses.append(loss)
    return losses


@dataclass
class Reference:
    """What one process has after each step."""

    losses: list[float]
    counts: list[int]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    params: list[dict[str, Tensor]]


def reference_of(case: Case) -> Reference:
    decoder = whole_model(case)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=LR)
    result = Reference([], [], [], [], [])
    for step in range(STEPS):
        labels = [tokens_of(rank, step, m)[1] for rank in range(case.data_size) for m in range(MICRO_BATCHES)]
        count = torch.tensor(sum(int((one != -100).sum()) for one in labels))
        losses = [loss for rank in range(case.data_size) for loss in loss_of(decoder, decoder, case, rank, step, count)]
        torch.stack(losses).sum().backward()
        for p in decoder.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        result.losses.append(sum(loss.item() for loss in losses))
        result.counts.append(int(count))
        result.norms.append(torch.nn.utils.get_total_norm([p.grad for p in decoder.parameters()]).item())
        result.grads.append({name: p.grad.clone() for name, p in decoder.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        result.params.append({name: p.detach().clone() for name, p in decoder.named_parameters()})
    return result


Rows = list[tuple[ShardInfo, Tensor]]


@dataclass
class Seen:
    """What a rank has after each step."""

    losses: list[float]
    validation: float
    """Of the last step, by a forward pass of its own."""
    counts: list[int]
    norms: list[float]
    grads: list[Rows]
    params: list[Rows]
    clipped: list[float]
    """Norm after a clip to half of it."""


def run_case(case: Case) -> Seen:
    config = ParallelConfig(pp=case.pp, ep=case.ep, replicas=case.replicas)
    mesh = Mesh.build(config, CPU, replicate_dense=case.replicate_dense)
    decoder = whole_model(case)
    part = Part(decoder, case, mesh)
    stages = shard(part, mesh)
    local = local_parameters(part, mesh)
    optimizer = torch.optim.AdamW([p for _, p in local.named()], lr=LR)
    seen = Seen([], 0.0, [], [], [], [], [])
    for step in range(STEPS):
        labels = torch.cat([tokens_of(mesh.data_rank, step, m)[1] for m in range(MICRO_BATCHES)])
        count = token_count(labels, mesh.data_group)
        args = (decoder, part, case, mesh.data_rank, step, count)
        if step == 1:
            gather(stages, async_op=True)
            with torch.no_grad():
                seen.validation = sum(loss.item() for loss in loss_of(*args))
            reshard(stages)
        gather(stages, async_op=step == 0)
        losses = []
        for loss in loss_of(*args):
            loss.backward()
            losses.append(loss.item())
        seen.losses.append(sum(losses))
        if step == 0:
            check_nothing_was_reduced(part, args)
        reduce(stages)
        local.collect_gradients()
        assert all(p.grad is not None and p.grad.shape == p.shape for _, p in local.named())
        seen.counts.append(int(count))
        seen.norms.append(grad_norm(local, mesh).item())
        seen.grads.append([(entry.info, entry.parameter.grad.clone()) for entry in local])
        optimizer.step()
        clip_(local.gradients(), grad_norm(local, mesh), seen.norms[-1] / 2)
        seen.clipped.append(grad_norm(local, mesh).item())
        local.clear_gradients()
        assert all(p.grad is None for p in part.parameters())
        seen.params.append([(entry.info, entry.parameter.detach().clone()) for entry in local])
    check_gathered(part, stages, local)
    return seen


def gather(stages: list[list[Unit]], *, async_op: bool) -> None:
    for stage in stages:
        for unit in stage:
            unit.unshard(async_op=async_op)
    for stage in stages:
        for unit in stage:
            unit.wait()


def reshard(stages: list[list[Unit]]) -> None:
    for stage in stages:
        for unit in stage:
            unit.reshard()


def reduce(stages: list[list[Unit]]) -> None:
    """What stages share stays as it is until the last of them is done."""
    for number, stage in enumerate(stages):
        for unit in stage:
            unit.reduce_gradients()
        for unit in stage:
            unit.reshard()
        for unit in (unit for unit in stage if unit.root is not None):
            is_in_use = unit.users > number + 1
            params = list(unit.modules.parameters())
            assert is_in_use != any(isinstance(p, DTensor) for p in params)
            assert any(p.grad is not None for p in params)
    for stage in stages:
        for unit in stage:
            unit.wait_for_gradients()


def check_nothing_was_reduced(part: Part, args: Any) -> None:
    """No hook ran: parameters are still whole, and gradients are this rank's alone, of all micro-batches."""
    seen = {name: p.grad for name, p in part.named_parameters()}
    assert not any(isinstance(p, DTensor) for p in part.parameters())
    params = {name: p for name, p in part.named_parameters() if seen[name] is not None}
    own = torch.autograd.grad(torch.stack(loss_of(*args)).sum(), list(params.values()))
    for name, grad in zip(params, own, strict=True):
        torch.testing.assert_close(seen[name], grad)


def check_gathered(part: Part, stages: list[list[Unit]], local: Any) -> None:
    """Whole parameters have the rows of the last optimizer step; what was gathered is freed."""
    gather(stages, async_op=False)
    whole = dict(part.named_parameters())
    for entry in local:
        p = whole[entry.info.name]
        start = entry.info.offset - (entry.info.offset // len(p) * len(p) if entry.info.is_expert and not entry.info.is_empty else 0)
        if not entry.info.is_empty:
            assert torch.equal(p[start : start + entry.info.length], entry.parameter)
    reshard(stages)
    for entry in local:
        if isinstance(entry.source, DTensor):
            assert whole[entry.info.name].untyped_storage().size() == 0


def run_cases(rank: int, world_size: int) -> dict[str, Seen]:
    mesh = Mesh.build(ParallelConfig(), CPU)
    with pytest.raises(ValueError, match="is not sharded, or is gathered at the moment"):
        local_parameters(Part(whole_model(Case()), Case(), mesh), mesh)
    return {name: run_case(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Seen]]:
    """Of each rank, by case."""
    return run_ranks(run_cases, 4)


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {name: reference_of(case) for name, case in CASES.items()}


def put_together(rows: list[Rows]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' rows: every row is there once in replica 0, and copies are equal."""
    infos = {info.name: info for one in rows for info, _ in one}
    whole = {name: torch.full(info.shape, torch.nan, dtype=rows[0][0][1].dtype) for name, info in infos.items()}
    for first in (True, False):
        for info, x in (pair for one in rows for pair in one):
            assert x.shape == info.local_shape
            place = whole[info.name][info.offset : info.offset + info.length]
            if first and info.replica == 0:
                assert place.isnan().all()
                place.copy_(x)
            elif not first:
                assert torch.equal(place, x)
    return whole


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    largest, name = largest_error(actual, expected)
    assert largest < tolerance, name


def tolerance_of(case: Case) -> float:
    return 1e-12 if case.dtype == torch.float64 else 1e-5


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name: str, seen: list[dict[str, Seen]], references: dict[str, Reference]) -> None:
    for step in range(STEPS):
        grads = put_together([rank[name].grads[step] for rank in seen])
        assert_close(grads, references[name].grads[step], tolerance_of(CASES[name]) * (1 if step == 0 else 100))


@pytest.mark.parametrize("name", CASES)
def test_parameters_after_steps_are_those_of_one_process(name: str, seen: list[dict[str, Seen]], references: dict[str, Reference]) -> None:
    for step in range(STEPS):
        params = put_together([rank[name].params[step] for rank in seen])
        assert_close(params, references[name].params[step], 1e-9 if CASES[name].dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_one_norm_and_the_one_count(name: str, seen: list[dict[str, Seen]], references: dict[str, Reference]) -> None:
    for rank in seen:
        assert rank[name].norms == pytest.approx(references[name].norms, rel=tolerance_of(CASES[name]) * 100)
        assert rank[name].counts == references[name].counts
        assert rank[name].clipped == pytest.approx([norm / 2 for norm in rank[name].norms], rel=1e-5)
    assert len({tuple(rank[name].norms) for rank in seen}) == 1


@pytest.mark.parametrize("name", CASES)
def test_a_forward_pass_without_gradients_has_the_same_loss(
    name: str, seen: list[dict[str, Seen]], references: dict[str, Reference]
) -> None:
    for rank in seen:
        assert rank[name].validation == pytest.approx(rank[name].losses[-1], rel=1e-6)
    total = [sum(rank[name].losses[step] for rank in seen) for step in range(STEPS)]
    assert total == pytest.approx(references[name].losses, rel=1e-5)


def test_shards_can_be_empty_and_uneven(seen: list[dict[str, Seen]]) -> None:
    def lengths(name: str, parameter: str) -> list[int]:
        return [info.length for rank in seen for info, _ in rank[name].grads[0] if info.name == parameter]

    assert lengths("dp4", "layers.0.mlp.gate.weight") == [2, 2, 1, 0]
    assert lengths("idle", "layers.0.mlp.experts.down_proj") == [2, 2, 1, 1]
    assert lengths("dp2-ep2", "layers.0.mlp.experts.down_proj") == [1, 1, 0, 0]
    assert lengths("replicated-dense", "lm_head.weight") == [VOCAB] * 4
    assert [info.name for info, _ in seen[0]["dp4-fp32-tied"].grads[0]].count("lm_head.weight") == 0


@pytest.mark.parametrize(("rows", "num_ranks"), [(5, 4), (4, 4), (1, 2), (0, 3), (63, 8), (2, 5)])
def test_rows_are_those_of_torch(rows: int, num_ranks: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(num_ranks)] if rows else []
    expected = chunks + [0] * (num_ranks - len(chunks))
    assert [rows_of(rows, num_ranks, rank)[1] for rank in range(num_ranks)] == expected
    assert [rows_of(rows, num_ranks, rank)[0] for rank in range(num_ranks)] == [sum(expected[:rank]) for rank in range(num_ranks)]


class TestOneProcess:
    """Everything is there, and does nothing but fill in gradients of zero."""

    case = Case(tied=True)

    def part(self) -> tuple[Decoder, Part, Mesh]:
        mesh = Mesh.single(CPU)
        decoder = whole_model(self.case)
        return decoder, Part(decoder, self.case, mesh), mesh

    def test_parameters_stay_what_they_are(self) -> None:
        decoder, part, mesh = self.part()
        before = dict(part.named_parameters())
        stages = shard(part, mesh)
        local = local_parameters(part, mesh)
        gather(stages, async_op=True)
        assert all(p is before[name] and p is dict(local.named())[name] for name, p in part.named_parameters())
        tokens, labels = tokens_of(0, 0, 0)
        loss = decoder(tokens, labels).loss
        assert loss is not None
        loss.backward()
        decoder.norm.weight.grad = None
        grads = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        reduce(stages)
        local.collect_gradients()
        assert all(p.grad is grads[name] for name, p in local.named() if name != "norm.weight")
        assert torch.equal(dict(local.named())["norm.weight"].grad, torch.zeros(HIDDEN, dtype=torch.float64))
        all_grads = [p.grad for p in part.parameters()]
        expected = torch.nn.utils.get_total_norm(all_grads)
        norm = grad_norm(local, mesh)
        torch.testing.assert_close(norm, expected)
        copies = [nn.Parameter(torch.zeros_like(grad)) for grad in all_grads]
        for max_norm in (0.7 * norm.item(), 2 * norm.item()):
            for copy, grad in zip(copies, all_grads, strict=True):
                copy.grad = grad.clone()
            torch.nn.utils.clip_grads_with_norm_(copies, max_norm, norm)
            clip_(local.gradients(), norm, max_norm)
            assert all(torch.equal(copy.grad, grad) for copy, grad in zip(copies, all_grads, strict=True))
        local.clear_gradients()
        assert all(p.grad is None for p in part.parameters())

    def test_count(self) -> None:
        assert token_count(torch.tensor([[3, -100], [0, 2]]), None).item() == 3
        assert token_count(torch.full((3, 2), -100), None).item() == 0
        assert token_count(torch.zeros(0, dtype=torch.int64), None).item() == 0
        assert token_count(torch.tensor([1, 7]), None, ignore_index=7).item() == 1

    @pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
    def test_a_clip_to_nothing_is_refused(self, max_norm: float) -> None:
        with pytest.raises(ValueError, match=r"max_norm=.* number > 0"):
            clip_([torch.ones(3)], torch.tensor(2.0), max_norm)

    def test_narrow_or_mixed_parameters_are_refused(self) -> None:
        decoder, part, _ = self.part()
        decoder.norm.float()
        with pytest.raises(TypeError, match=r"dtypes .*float32.*float64"):
            check_dtypes(part)
        part.to(torch.bfloat16)
        with pytest.raises(TypeError, match=r"bfloat16.*keep fp32 parameters"):
            check_dtypes(part)
