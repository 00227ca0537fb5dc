"""Cuts a model into parts, draws each rank's data, and takes a step without an engine, for the
tests of sharding.

The loss of a block is computed from its parts on fixed data, so that experts need no exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lather.models.decoder import Block, Decoder
from lather.models.moe import MoE
from lather.parallel.fsdp_units import FsdpUnit
from lather.parallel.local_parameters import LocalParameters, squared_norm
from lather.parallel.mesh import Mesh
from models.tiny import layout_of, random_normal, tiny_family_model

MICRO_BATCHES = 2
BATCH, LENGTH, HIDDEN, VOCAB = 1, 6, 24, 37


@dataclass(frozen=True)
class Case:
    pp: int = 1
    ep: int = 1
    replicas: int = 1
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


class Part(nn.Module):
    """A rank's share of a decoder: both ends of the V, with the decoder's names."""

    def __init__(self, decoder: Decoder, case: Case, mesh: Mesh) -> None:
        super().__init__()
        stages = 2 * case.pp
        firsts = [len(decoder.layers) * stage // stages for stage in range(stages + 1)]
        mine = (mesh.pp_rank, stages - 1 - mesh.pp_rank)
        ranges = [range(firsts[stage], firsts[stage + 1]) for stage in mine]
        self.layers = nn.ModuleDict(
            {str(i): decoder.layers[i] for numbers in ranges for i in numbers}
        )
        self.stages = [
            SimpleNamespace(blocks=[decoder.layers[i] for i in numbers]) for numbers in ranges
        ]
        if mesh.pp_rank == 0:
            self.embed_tokens, self.norm, self.lm_head = (
                decoder.embed_tokens,
                decoder.norm,
                decoder.lm_head,
            )
        for block in self.layers.values():
            keep_experts(block, mesh.ep_rank, case.ep)


def keep_experts(block: Block, ep_rank: int, ep: int) -> None:
    experts = block.mlp.experts
    for name, p in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(p.detach().chunk(ep)[ep_rank].clone()))


def whole_model(case: Case) -> Decoder:
    changes = {
        "num_experts": case.experts,
        "num_hidden_layers": 2 * case.pp,
        "tie_word_embeddings": case.tied,
    }
    return tiny_family_model("qwen3_moe", **changes).to(case.dtype)


def tokens_of(data_rank: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Draw tokens, and labels whose mask differs from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * data_rank + micro_batch)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, : data_rank + micro_batch] = -100
    return tokens[:, :-1], labels


def inputs_of(
    data_rank: int, step: int, micro_batch: int, case: Case
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states and, for the routed experts, the router's decision."""
    seed = 1000 * step + 10 * data_rank + micro_batch
    experts_TK = torch.randint(
        case.experts, (LENGTH, 2), generator=torch.Generator().manual_seed(seed)
    )
    return (
        random_normal(BATCH, LENGTH, HIDDEN, seed=seed).to(case.dtype),
        experts_TK,
        random_normal(LENGTH, 2, seed=seed + 5).to(case.dtype),
    )


def block_loss(block: Block, case: Case, data_rank: int, step: int, micro_batch: int) -> Tensor:
    """The loss that this data rank adds: the block without experts on its own data, and its experts
    on the data of all ranks of its ep group."""
    assert isinstance(block.mlp, MoE)
    x_BSD = inputs_of(data_rank, step, micro_batch, case)[0]
    attended = block.attend_and_route(x_BSD, layout_of(x_BSD))
    assert attended.routing is not None
    loss = (
        attended.residual_BSD.sin().sum()
        + attended.normed_TD.cos().sum()
        + attended.routing.weights_TK.square().sum()
    )
    ep_rank, share = data_rank % case.ep, case.experts // case.ep
    for other in range(data_rank - ep_rank, data_rank - ep_rank + case.ep):
        x_BSD, experts_TK, weights_TK = inputs_of(other, step, micro_batch, case)
        experts_TK = torch.where(
            experts_TK // share == ep_rank, experts_TK % len(block.mlp.experts.down_proj), -1
        )
        loss = loss + (block.mlp.experts(x_BSD[0], experts_TK, weights_TK) * x_BSD[0]).sum()
    return loss


def loss_of(
    decoder: Decoder, part: nn.Module, case: Case, data_rank: int, step: int, count: Tensor
) -> list[Tensor]:
    """A loss for each micro-batch: the decoder's own where a rank has all of it, else the loss of
    the modules that are in `part`."""
    losses = []
    numbers = [
        number
        for number, block in enumerate(decoder.layers)
        if any(block is m for m in part.modules())
    ]
    for micro_batch in range(MICRO_BATCHES):
        tokens, labels = tokens_of(data_rank, step, micro_batch)
        if case.data_size == 4 and case.ep == 1:
            loss = decoder(tokens, labels, normalizer=count).loss
            assert loss is not None
        else:
            loss = torch.zeros((), dtype=case.dtype)
            for number in numbers:
                if not (case.idle_rank == data_rank and number == 0):
                    loss = loss + block_loss(
                        decoder.layers[number], case, data_rank, step, micro_batch
                    )
            if any(decoder.norm is m for m in part.modules()):
                x_BSD = decoder.embed_tokens(tokens)
                loss = (
                    loss
                    + decoder.lm_head(x_BSD if case.idle_rank is not None else decoder.norm(x_BSD))
                    .square()
                    .sum()
                )
        losses.append(loss)
    return losses


def gather(stages: list[list[FsdpUnit]], *, async_op: bool) -> None:
    for stage in stages:
        for unit in stage:
            unit.unshard(async_op=async_op)
    for stage in stages:
        for unit in stage:
            unit.wait()


def reshard(stages: list[list[FsdpUnit]]) -> None:
    for stage in stages:
        for unit in stage:
            unit.reshard()


def reduce(stages: list[list[FsdpUnit]]) -> None:
    """Reduce all gradients; units that stages share must stay gathered until the last of these
    stages is done."""
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


@torch.no_grad()
def grad_norm(parameters: LocalParameters, mesh: Mesh) -> Tensor:
    """Return the 2-norm of the gradients of the whole model, the same on all ranks, as a training
    step does."""
    square = squared_norm(parameters, mesh, {})
    if mesh.size > 1:
        dist.all_reduce(square)
    return square.sqrt().to(parameters.norm_dtype)
