"""Rows that travel in FP8, as ranks see them: the exchange alone, and a whole engine. Ranks import
it without pytest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engines import Case, Pair, make_pair
from exchange_cases import FOUR, TWO, expected_dispatch
from exchange_cases import Case as Tokens
from torch import Tensor

from lather.engine.settings import compute_in_fp8
from lather.kernels.block_scaled import BLOCK, BlockScaled, scaled_rows
from lather.models.experts import Experts
from lather.models.routing import Routing
from lather.parallel.expert_exchange import ExpertExchange
from lather.pipeline.tape import Frees


@dataclass(frozen=True)
class PaddedTokens(Tokens):
    """Tokens of which every third is padding."""

    def routing(self, rank: int) -> Routing:
        routing = super().routing(rank)
        experts_TK = routing.experts_TK.clone()
        experts_TK[::3] = -1
        num_pairs = int((experts_TK >= 0).sum())
        return replace(routing, experts_TK=experts_TK, num_pairs=num_pairs)


EXCHANGES = {
    2: {
        **{f"{d} columns": replace(TWO["fp32"], d=d) for d in (1, 63, 130, 512)},
        "a rank without tokens": replace(TWO["a rank without tokens"], d=130),
        "no tokens at all": TWO["no tokens at all"],
        "everything to rank 1": replace(TWO["everything to rank 1"], d=130),
        "bf16 and weights as well": TWO["bf16 and weights as well"],
        "wide weights": replace(TWO["wide weights"], d=130),
        "padding": PaddedTokens((13, 7), d=130),
    },
    4: {"mixed": replace(FOUR["mixed"], d=130)},
}


@contextmanager
def sent_buffers() -> Iterator[list[Tensor]]:
    """Inside this context, note what every all-to-all of rows sends."""
    buffers, original = list[Tensor](), dist.all_to_all_single

    def note(received: Tensor, sent: Tensor, *splits: Any, **options: Any) -> Any:
        if splits:  # others have numbers of rows
            buffers.append(sent)
        return original(received, sent, *splits, **options)

    with mock.patch.object(dist, "all_to_all_single", note):
        yield buffers


def exchanges(rank: int, world_size: int) -> dict[str, dict[str, bool]]:
    return {name: _exchange(case, rank) for name, case in EXCHANGES[world_size].items()}


def _exchange(case: Tokens, me: int) -> dict[str, bool]:
    """Compare an exchange of rows in FP8, which poisons its buffers, with rows that are rounded
    where they arrive; count its bytes beside those of rows in bf16."""
    exchange = ExpertExchange(dist.group.WORLD, case.e, free_buffer=Frees(poison=True).free_buffer)
    x_TD, routing = case.x(me).bfloat16(), case.routing(me)
    with sent_buffers() as wide:
        exchange.start_dispatch(x_TD, routing).wait()
    with sent_buffers() as narrow:
        dispatched = exchange.start_dispatch(scaled_rows(x_TD), routing).wait()
    rows = dispatched.x_RD
    assert isinstance(rows, BlockScaled)
    x_RD, experts_RK, weights_RK = expected_dispatch(case, me)
    expected = scaled_rows(x_RD.bfloat16())
    sent, blocks = sum(dispatched.handle.sent_P), -(-case.d // BLOCK)
    bits = torch.promote_types(case.weights, torch.float32).itemsize
    tensors = (*rows, dispatched.experts_RK, dispatched.weights_RK)
    return {
        "values": rows.values.view(torch.uint8).equal(expected.values.view(torch.uint8)),
        "scales": rows.scales.equal(expected.scales),
        "contiguous": all(x.is_contiguous() for x in rows),
        "experts": dispatched.experts_RK.equal(experts_RK),
        "weights": dispatched.weights_RK.equal(weights_RK),
        "storages": len({x.untyped_storage().data_ptr() for x in tensors if len(x_RD)})
        == 4 * bool(len(x_RD)),
        "buffers are given back": all((x == torch.iinfo(x.dtype).max).all() for x in narrow),
        "bytes of rows in bf16": sum(x.nbytes for x in wide)
        == sent * (2 * case.d + bits * 2 * case.k),
        "bytes": sum(x.nbytes for x in narrow) == sent * (case.d + bits * (blocks + 2 * case.k)),
        "messages": len(narrow) == len(wide) == 2,
    }


WIDE = {"hidden_size": 160}
BF16: dict[str, Any] = {"dtype": torch.float32, "precision": "bf16"}
ALL = ("attention", "experts", "shared_experts")
ENGINES = {
    2: [
        Case(ep=2, layers=2, changes=WIDE, schedule="sequential", poison=True, **BF16),
        Case(
            ep=2, layers=2, changes=WIDE, schedule="sequential", recompute=ALL, poison=True, **BF16
        ),
        Case(ep=2, layers=1, family="gpt_oss", schedule="sequential", frees=False),
        Case(ep=2, layers=2, schedule="sequential", memory="recompute", lopsided=True, **BF16),
    ],
    4: [
        Case(pp=2, ep=2, changes=WIDE, poison=True, **BF16),
        Case(cp=2, ep=2, layers=2, schedule="sequential", length=8, **BF16),
    ],
}


def engines(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [_engine(make_pair(case)) for case in ENGINES[world_size]]


def _engine(pair: Pair) -> dict[str, Any]:
    """Run the same batch with rows that travel in FP8, and with rows that are rounded where they
    arrive; compare losses and gradients to the bit, and count what was sent."""
    compute_in_fp8(pair.engine.part, pair.mesh.device)
    narrow, wide = _run(pair, in_bf16=False), _run(pair, in_bf16=True)
    hidden = next(
        module.gate_up_proj.shape[2]
        for module in pair.engine.part.modules()
        if isinstance(module, Experts)
    )
    rows = sum(len(x) for x in narrow["sent"] if x.dtype == torch.uint8)
    saved, itemsize = (
        sum(x.nbytes for x in wide["sent"]) - sum(x.nbytes for x in narrow["sent"]),
        2 if pair.case.precision == "bf16" else 8,
    )
    packed = 8 if pair.case.dtype == torch.float64 else 4
    return {
        "loss": narrow["loss"] == wide["loss"],
        "gradients": len(narrow["gradients"]) > 5
        and all(map(torch.equal, narrow["gradients"], wide["gradients"])),
        "rows": rows,
        "bytes": saved == rows * (hidden * (itemsize - 1) - packed * -(-hidden // BLOCK)),
    }


def _run(pair: Pair, *, in_bf16: bool) -> dict[str, Any]:
    as_it_is = mock.patch.object(Experts, "rounded_input", lambda self, x_RD: x_RD)
    with as_it_is if in_bf16 else nullcontext(), sent_buffers() as sent:
        loss = pair.run(pair.tokens()).loss
    gradients = []
    for entry in pair.engine.parameters:
        if entry.parameter.grad is not None:
            gradients.append(entry.parameter.grad.clone())
            entry.parameter.grad = None
    return {"loss": loss, "gradients": gradients, "sent": sent}
