"""The bytes that pipeline ranks keep: the walk along tables with known numbers; chunks of layers
against the profile of a whole model."""

from __future__ import annotations

import io
import json
from itertools import pairwise

import pytest
import torch
from rich.console import Console

from lather.memory import rank_peaks as ranks
from lather.memory.block_samples import keep_two_of_each
from lather.memory.chunk_bytes import (
    ChunkBytes,
    ChunkMeter,
    MemoryLevers,
    ModelChunks,
    _Mirror,
    layer_places,
)
from lather.memory.profile import profile_saved_tensors
from lather.memory.rank_peaks import RankBytes, rank_bytes
from lather.models.decoder import Decoder
from lather.models.saving.weight_gradients import Deferrable
from lather.models.token_positions import SequenceLayout
from lather.pipeline.partition import stages_of, uniform
from lather.pipeline.schedule import Schedule, dualpipev, sequential
from lather.pipeline.segments import RECOMPUTABLE, MicroBatch
from lather.pipeline.tape import Frees
from lather.pipeline.transfer_queues import MOST_SENDS_UNDER_WAY
from models.tiny import random_normal, tiny_family_model

CPU = torch.device("cpu")
MIB = 2**20

# --- the walk -------------------------------------------------------------------------------------


def walked(
    schedule: Schedule, kept: int, waiting: int, boundary: int, head: int = 0
) -> list[RankBytes]:
    """Walk a schedule with one layer per stage, all alike."""
    chunks = ModelChunks(
        (ChunkBytes(kept, waiting),) * schedule.num_stages, ChunkBytes(head), boundary, boundary
    )
    return rank_bytes(
        schedule, chunks, stages_of(uniform(schedule.num_stages, schedule.num_stages))
    )


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(1, 2), (1, 7), (2, 4), (3, 11), (4, 8)])
def test_chunks_of_one_byte_are_the_schedule_s_live_chunks(
    num_ranks: int, micro_batches: int
) -> None:
    schedule = dualpipev(num_ranks, micro_batches)
    for rank, one in enumerate(walked(schedule, 1, 0, 0)):
        alive = [0]
        for action in schedule.ranks[rank]:
            alive.append(
                alive[-1]
                + sum({"F": 1, "B": -1, "I": -1}.get(chunk.kind, 0) for chunk in action.chunks)
            )
        assert one.peak == max(alive) == sum(stage.chunks_at_peak for stage in one.stages)
        assert (
            one.most_chunks == schedule.peak_live_chunks(rank) <= one.peak + 1
        )  # one more within an overlap
        assert tuple(stage.stage for stage in one.stages) == schedule.stages_of(rank)


def test_which_chunks_are_alive_at_the_peak_depends_on_their_sizes() -> None:
    """Worked by hand for the second of 3 ranks: before the first backward, or with one more chunk
    of the later stage in the overlaps."""
    layers = stages_of(uniform(6, 6))
    for heavy, expected in ((1, [5, 1]), (4, [4, 2])):
        chunks = ModelChunks(
            tuple(ChunkBytes(1000 if stage == heavy else 1) for stage in range(6)),
            ChunkBytes(),
            0,
            0,
        )
        one = rank_bytes(dualpipev(3, 6), chunks, layers)[1]
        assert [stage.stage for stage in one.stages] == [1, 4]
        assert [stage.chunks_at_peak for stage in one.stages] == expected
        assert one.peak == sum(stage.chunks_at_peak * stage.kept for stage in one.stages)


def test_weight_gradients_wait_from_i_to_w() -> None:
    table = dualpipev(2, 4)
    for rank, one in enumerate(walked(table, 0, 1, 0)):
        alive = most = 0
        for action in table.ranks[rank]:
            for chunk in action.chunks:
                alive += {"I": 1, "W": -1}.get(chunk.kind, 0)
            most = max(most, alive)
        assert one.peak == most > 0
        assert sum(stage.waiting_at_peak for stage in one.stages) == most


def test_what_travels_is_gone_in_the_end() -> None:
    for schedule in (dualpipev(1, 2), dualpipev(3, 7), sequential(3)):
        for rank in range(schedule.num_ranks):
            for alive in ranks.alive_after_actions(schedule, rank):
                assert min(alive.values(), default=0) >= 0
                assert alive[ranks.SENT] <= MOST_SENDS_UNDER_WAY
            assert set(+alive) <= {ranks.SENT}


def test_the_peak_does_not_grow_with_the_micro_batches() -> None:
    peaks = [
        [one.peak for one in walked(dualpipev(4, number), 100, 120, 7)] for number in (16, 32, 64)
    ]
    assert all(first == second for first, second in pairwise(peaks))


def test_one_rank_keeps_one_chunk_of_all_layers() -> None:
    chunks = ModelChunks(
        (ChunkBytes(3, 9), ChunkBytes(5, 9)), ChunkBytes(7, 0), 100, 100, tables=11
    )
    (one,) = rank_bytes(sequential(4), chunks, (range(2),))
    assert (one.peak, one.most_chunks, one.stages[0].kept) == (3 + 5 + 7 + 11, 1, 26)


# --- chunks ---------------------------------------------------------------------------------------


def batch_of(tokens: torch.Tensor, boundaries: torch.Tensor | None = None) -> MicroBatch:
    return MicroBatch(
        tokens[:, :-1],
        tokens[:, 1:],
        SequenceLayout(len(tokens), tokens.shape[1] - 1, CPU, boundaries),
    )


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model of one dense block and three MoE blocks."""
    return tiny_family_model("deepseek_v2", num_hidden_layers=4, n_routed_experts=4)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(37, (2, 31), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("memory", ["saved", "recompute", "reference"])
def test_chunks_of_all_layers_are_the_profile_of_the_model(
    model: Decoder, tokens: torch.Tensor, memory: str
) -> None:
    """The profile counts in another way, and only what autograd holds of the same model without
    cuts."""
    chunks = ChunkMeter(model, layer_places(model, None), batch_of(tokens)).measure(
        MemoryLevers(memory)
    )
    saved = profile_saved_tensors(model, lambda: model(tokens[:, :-1], tokens[:, 1:]).loss)
    (kept,) = (one.kept for one in chunks.of_stages([range(4)]))
    assert kept == pytest.approx(saved.bytes("activation"), rel=0.05)
    assert all(p.grad is None for p in model.parameters())
    assert all(m.weight_gradients is None for m in model.modules() if isinstance(m, Deferrable))


def test_levers_lower_what_is_kept(model: Decoder, tokens: torch.Tensor) -> None:
    meter = ChunkMeter(model, layer_places(model, None), batch_of(tokens))
    order = [
        MemoryLevers("reference", early_frees=False),
        MemoryLevers("saved", early_frees=False),
        MemoryLevers("saved"),
        MemoryLevers("saved", ("attention",)),
        MemoryLevers("saved", RECOMPUTABLE),
    ]
    sums = [meter.measure(levers).of_stages([range(4)])[0].kept for levers in order]
    assert sums == sorted(sums, reverse=True)
    assert len(set(sums)) == len(sums)
    assert [
        bool(meter.measure(MemoryLevers(memory)).layers[1].waiting)
        for memory in ("saved", "reference")
    ] == [True, False]


def test_a_cut_model_gives_what_the_whole_one_does(model: Decoder, tokens: torch.Tensor) -> None:
    whole = ChunkMeter(model, layer_places(model, None), batch_of(tokens)).measure(MemoryLevers())
    other = tiny_family_model("deepseek_v2", num_hidden_layers=4, n_routed_experts=4)
    cut = keep_two_of_each(other)
    assert layer_places(other, cut) == [0, 2, 2, 2]
    assert (
        ChunkMeter(other, layer_places(other, cut), batch_of(tokens)).measure(MemoryLevers())
        == whole
    )
    assert len({layer.kept for layer in whole.layers}) == 2


def test_masks_of_documents_are_counted_once_per_chunk(
    model: Decoder, tokens: torch.Tensor
) -> None:
    places = layer_places(model, None)
    plain = ChunkMeter(model, places, batch_of(tokens)).measure(MemoryLevers("reference"))
    packed = ChunkMeter(model, places, batch_of(tokens, torch.tensor([0, 7, 60]))).measure(
        MemoryLevers("reference")
    )
    assert plain.tables == 0
    mask = 2 * 31 * 31  # of booleans; cosines and sines come on top
    assert mask < packed.tables < 2 * mask + 60 * 24 * 4
    grown = [
        one.of_stages([range(4)])[0].kept - sum(layer.kept for layer in one.layers) - one.head.kept
        for one in (plain, packed)
    ]
    assert grown == [0, packed.tables]


def test_expert_ranks_that_are_not_there_send_what_is_sent_to_them(
    model: Decoder, tokens: torch.Tensor
) -> None:
    normed_TD = random_normal(60, 24)
    routing = model.routers()[0](normed_TD.to(model.norm.weight))
    exchange = _Mirror(4, 2, Frees().free_buffer)
    dispatched = exchange.start_dispatch(normed_TD, routing).wait()
    rows = [int(((routing.experts_TK // 2) == rank).any(1).sum()) for rank in (0, 1)]
    assert len(dispatched.x_RD) == sum(rows)
    assert (
        int((dispatched.experts_RK >= 0).sum())
        == dispatched.num_pairs
        == routing.experts_TK.numel()
    )
    assert int(dispatched.experts_RK.max()) < 2
    assert exchange._launch(normed_TD, (), (), own=False).wait().equal(normed_TD)

    one, two = (
        ChunkMeter(model, layer_places(model, None), batch_of(tokens), ep).measure(MemoryLevers())
        for ep in (1, 2)
    )
    assert two.layers[0] == one.layers[0]  # the dense layer
    received = two.layers[1].kept - one.layers[1].kept
    assert (
        60 * 24 * 4 < received < 2 * 60 * 24 * 4 + 60 * 200
    )  # each token has one row at least and two at most, and indices


# --- what is shown --------------------------------------------------------------------------------


def test_tables_and_json() -> None:
    schedule = dualpipev(2, 4)
    chunks = ModelChunks((ChunkBytes(MIB, 2 * MIB),) * 5, ChunkBytes(MIB // 2), MIB // 4, MIB // 4)
    found = rank_bytes(schedule, chunks, stages_of(uniform(5, 4)))
    console = Console(file=io.StringIO(), width=150)
    ranks.print_ranks(found, console)
    ranks.print_levers({"saved": found, "other": found}, console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    first, last = found[0].stages
    sizes = [f"{found[0].peak / MIB:.2f}", f"{found[1].peak / MIB:.2f}"]
    of_first = [
        "0",
        "0",
        "0",
        "1.00",
        "2.00",
        str(first.chunks_at_peak),
        str(first.waiting_at_peak),
    ]
    assert [*of_first, str(found[0].boundaries_at_peak), sizes[0]] in lines
    assert ["3", "4", "1.50", "2.00", str(last.chunks_at_peak), str(last.waiting_at_peak)] in lines
    assert ["saved", *sizes, max(sizes)] in lines
    document = json.loads(json.dumps(ranks.to_json({"saved": found})))
    assert [one["peak"] for one in document["saved"]] == [one.peak for one in found]
    assert [stage["layers"] for one in document["saved"] for stage in one["stages"]] == [
        [0],
        [4],
        [1, 2],
        [3],
    ]
