"""Counts what an MoE block keeps between forward and backward, to the byte: every alive storage,
whoever holds it.

    attention and norms     measured by themselves, without the normed rows, which are made again
                            from the residual
    experts                 2F for each pair of token and expert; under expert parallelism also the
                            R received rows (D)
    shared experts          nothing
    and                     scores (T, E), the router's weights, indices: `metadata`

Letters: T tokens, D hidden size, E experts, K experts per token, F intermediate size, R received
rows.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from benchmarks.live_bytes import PeakBytes
from lather.models.block import Block
from lather.models.layers import recomputed_norm
from lather.models.moe import MoE
from lather.models.pending import Pending
from lather.models.saving.recomputed import Recomputation
from lather.models.token_positions import SequenceLayout
from lather.parallel.exchange_plan import DispatchHandle
from lather.parallel.expert_exchange import ExpertExchange
from lather.pipeline import overlap
from lather.pipeline.chunk import ChunkTape, MicroBatch
from lather.pipeline.model_part import PartLayers, Stage, empty_part, fill
from lather.pipeline.segment_runner import RECOMPUTABLE
from lather.pipeline.segments import Segments
from lather.pipeline.tape import Frees
from models.tiny import build_model, random_normal, tiny_family_config, tiny_family_model

B, S, D, E, K, F = 3, 7, 24, 6, 2, 11
T = B * S
SIZES = {"n_routed_experts": E, "first_k_dense_replace": 0, "num_hidden_layers": 1}
NUMBER = 8
"""Bytes of an element of fp64, in which no row is padded; most indices have as many."""
SLACK = 32 * E * NUMBER
"""Bytes for numbers per expert, and losses: less than T * F elements, so that no further tensor per
token would pass."""


def attention_bytes(block: Block, x_BSD: Tensor, layout: SequenceLayout) -> int:
    """Count the bytes of attention and norms, without their input and without the second norm's
    output."""
    with PeakBytes() as alive:
        recomputation = Recomputation()
        with recomputation.watch():
            attended_BSD = block.self_attn(
                recomputed_norm(block.input_layernorm, x_BSD, recomputation)[1],
                layout,
                recomputation,
            )
            graph = get_gradient_edge(block.post_attention_layernorm(x_BSD + attended_BSD))
        del attended_BSD
        kept = alive.now
        # holds an edge, because on torch 2.11 a `grad_fn` of a Python Function does not keep what
        # the Function saved
        del graph
        return kept


@dataclass
class Kept:
    """The bytes of one block, without its input and output."""

    total: int
    attention: int
    after_backward: int
    pairs: int = T * K
    received: int = 0

    def beyond(self, elements: int) -> int:
        """The bytes that are left besides attention and these elements."""
        return self.total - self.attention - elements * NUMBER


def kept_by(block: Block, segments: Segments, seed: int = 0) -> Kept:
    layout = SequenceLayout(B, S, torch.device("cpu"))
    x_BSD, grad_BSD = random_normal(B, S, D, seed=seed), random_normal(B, S, D, seed=seed + 1)
    attention_bytes(block, x_BSD, layout)  # this makes the rotary tables, which all blocks share
    attention = attention_bytes(block, x_BSD, layout)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    tape = ChunkTape(MicroBatch(tokens, tokens, layout, balance_weight=0.1))
    for p in block.parameters():
        p.grad = torch.zeros_like(p)
    with PeakBytes() as alive:
        out_BSD = overlap.run(segments.forward(Stage(1, (block,)), x_BSD, tape, []))
        total = alive.now - out_BSD.nbytes
        grad_x_BSD = overlap.run(segments.backward(tape, grad_BSD))
        assert grad_x_BSD is not None
        left = out_BSD.nbytes + grad_x_BSD.nbytes
        deadline = time.monotonic() + 2
        while alive.now > left and time.monotonic() < deadline:
            # gloo's threads let go of what they sent a moment after it has arrived
            time.sleep(0.01)
        after = alive.now - left
    return Kept(total, attention, after)


def moe_block(memory: str = "saved") -> Block:
    model = tiny_family_model("deepseek_v2", **SIZES).double()
    model.set_memory(memory)
    block = model.layers[0]
    assert isinstance(block, Block)
    assert isinstance(block.mlp, MoE)
    return block


METADATA = (T * E + 3 * T * K + T * K) * NUMBER
"""Bytes of the scores; experts, weights and rows of each slot; and the token of each pair."""


def test_a_block_keeps_what_the_contract_says_and_nothing_else() -> None:
    assert SLACK < T * F * NUMBER
    kept = kept_by(moe_block(), Segments())
    assert 0 <= kept.beyond(T * 2 * K * F) - METADATA < SLACK
    assert kept.after_backward == 0


def test_recomputed_experts_keep_no_gate_and_up() -> None:
    assert 0 <= kept_by(moe_block("recompute"), Segments()).beyond(0) - METADATA < SLACK
    segments = Segments(recompute=("experts", "shared_experts"))
    # both are given the normed rows
    assert -2 * T * K * NUMBER <= kept_by(moe_block(), segments).beyond(T * D) - METADATA < SLACK


def test_with_everything_recomputed_two_inputs_are_kept() -> None:
    """They are the block's, which is not counted here, and the experts'."""
    kept = kept_by(moe_block(), Segments(recompute=RECOMPUTABLE))
    assert T * D * NUMBER <= kept.total < T * D * NUMBER + METADATA + SLACK
    assert kept.after_backward == 0


def test_without_early_frees_normed_rows_and_two_sums_more_are_kept() -> None:
    """The sums are those of the experts and of the shared experts; the normed rows count as one
    more tensor."""
    early, late = (
        kept_by(moe_block(), Segments(frees=Frees(enabled=enabled))) for enabled in (True, False)
    )
    assert late.total - early.total == 3 * T * D * NUMBER
    assert late.after_backward == 0


# --- experts on two ranks -------------------------------------------------------------------------


class Counting(ExpertExchange):
    """Notes how many rows and pairs the last dispatch brought here."""

    received = pairs = 0

    def start_combine(self, partial_RD: Tensor, handle: DispatchHandle) -> Pending[Tensor]:
        self.received, self.pairs = len(partial_RD), handle.num_pairs
        return super().start_combine(partial_RD, handle)


def kept_on_two_ranks(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    plain = tiny_family_model("deepseek_v2", **SIZES).double()
    share = PartLayers((range(1),), expert_rank=rank, expert_ranks=2)
    part = empty_part(
        build_model(tiny_family_config("deepseek_v2", **SIZES), None, torch.device("meta")),
        share,
        torch.device("cpu"),
    )
    part.double()
    fill(part, plain.named_parameters())
    results = {}
    for name, options in (
        ("saved", {}),
        ("recomputed", {"recompute": RECOMPUTABLE}),
        ("held", {"frees": Frees(enabled=False)}),
    ):
        exchange = Counting(torch.distributed.group.WORLD, E)
        kept = kept_by(part.block(0), Segments(exchange, **options), seed=10 * rank)  # type: ignore[arg-type]
        kept.pairs, kept.received = exchange.pairs, exchange.received
        results[name] = asdict(kept)
    return results


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Kept]]:
    return [
        {name: Kept(**kept) for name, kept in rank.items()}
        for rank in run_ranks(kept_on_two_ranks, 2)
    ]


def metadata_of(kept: Kept) -> int:
    """Count scores, and experts of each slot; weights and rows of each received slot; the token of
    each pair; the way back in int32."""
    numbers = T * E + T * K + 2 * kept.received * K + kept.pairs
    return numbers * NUMBER + T * K * 4


def test_under_expert_parallelism_received_rows_are_kept_besides(
    two_ranks: list[dict[str, Kept]],
) -> None:
    assert sum(rank["saved"].pairs for rank in two_ranks) == 2 * T * K
    for rank in two_ranks:
        kept = rank["saved"]
        assert kept.received < T * K
        rows = kept.pairs * 2 * F + kept.received * D
        sent_rows = 4 * 2 * T
        assert 0 <= kept.beyond(rows) - metadata_of(kept) < SLACK + sent_rows
        assert kept.after_backward == 0


def test_under_expert_parallelism_with_everything_recomputed(
    two_ranks: list[dict[str, Kept]],
) -> None:
    for rank in two_ranks:
        kept = rank["recomputed"]
        inputs = (T + kept.received) * D * NUMBER
        assert inputs <= kept.total < inputs + metadata_of(kept) + 8 * kept.received * K + SLACK
        assert kept.after_backward == 0


def test_under_expert_parallelism_the_partial_sums_are_one_more(
    two_ranks: list[dict[str, Kept]],
) -> None:
    for rank in two_ranks:
        assert (
            rank["held"].total - rank["saved"].total == (3 * T + rank["held"].received) * D * NUMBER
        )
        assert rank["held"].after_backward == 0
