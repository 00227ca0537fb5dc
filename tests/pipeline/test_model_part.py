"""A rank's part has the names, sizes and fresh weights, bit for bit, of one process's model, and no
more memory than it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.live_bytes import PeakBytes
from lather.models.decoder import Decoder
from lather.models.families import ModelConfig, build_model
from lather.models.lora import LoraConfig
from lather.models.token_positions import SequenceLayout
from lather.pipeline import overlap
from lather.pipeline.chunk import ChunkTape, MicroBatch
from lather.pipeline.model_part import (
    ModelPart,
    PartLayers,
    Stage,
    allocate,
    empty_part,
    fill,
    fresh_weights,
    outlined_part,
)
from lather.pipeline.partition import stages_of, uniform
from lather.pipeline.segments import Segments
from models.tiny import random_tokens, tiny_family_config, tiny_family_model

CPU, META = torch.device("cpu"), torch.device("meta")
FAMILIES = ("deepseek_v2", "qwen3_moe", "gpt_oss")
EXPERTS = {
    "deepseek_v2": "n_routed_experts",
    "qwen3_moe": "num_experts",
    "gpt_oss": "num_local_experts",
}


def config_of(family: str, *, layers: int = 5, experts: int = 6, tied: bool = False) -> ModelConfig:
    return tiny_family_config(
        family, num_hidden_layers=layers, tie_word_embeddings=tied, **{EXPERTS[family]: experts}
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def fresh_part(config: ModelConfig, share: PartLayers) -> ModelPart:
    part = outlined_part(config, share, torch.float32, LoraConfig())
    allocate([part], CPU)
    fill(part, fresh_weights(config, generator(), LoraConfig()))
    return part


def shares(layers: int, pp: int, ep: int, *, v: bool = True) -> Iterator[PartLayers]:
    """The shares of all ranks."""
    stages = 2 * pp if v else 1
    division = stages_of(uniform(layers, stages))
    for pp_rank in range(pp):
        own = tuple(sorted({pp_rank, stages - 1 - pp_rank}))
        for ep_rank in range(ep):
            yield PartLayers(division, own, ep_rank, ep)


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("pp", "ep", "v"), [(1, 1, False), (1, 3, True), (2, 1, True), (2, 2, True)]
)
def test_fresh_parts_together_are_the_model_of_one_process(
    family: str, tied: bool, pp: int, ep: int, v: bool
) -> None:
    config = config_of(family, tied=tied)
    whole = {name: p.detach() for name, p in build_model(config, generator()).named_parameters()}
    seen: dict[str, list[Tensor]] = {}
    for share in shares(5, pp, ep, v=v):
        for name, p in fresh_part(config, share).named_parameters():
            assert p.requires_grad
            expected = whole[name].chunk(ep)[share.expert_rank] if is_expert(name) else whole[name]
            assert torch.equal(p, expected), name
            seen.setdefault(name, []).append(p.detach())
    assert seen.keys() == whole.keys()
    for name, pieces in seen.items():
        assert len(pieces) == ep
        if is_expert(name):
            assert torch.equal(torch.cat(pieces), whole[name])


def test_tied_embeddings_are_one_parameter_on_the_rank_that_has_both_ends() -> None:
    config = config_of("deepseek_v2", tied=True)
    first, second = (fresh_part(config, share) for share in shares(5, 2, 1))
    assert first.lm_head is not None
    assert first.embed_tokens is not None
    assert first.lm_head.weight is first.embed_tokens.weight
    assert [name for name, _ in first.named_parameters()].count("embed_tokens.weight") == 1
    assert "lm_head.weight" not in dict(first.named_parameters())
    assert second.embed_tokens is second.lm_head is second.norm is None


def test_stages_have_their_layers_and_the_ends_theirs() -> None:
    whole = build_model(config_of("deepseek_v2"), None, META)
    blocks = list(whole.layers)
    ends = (whole.embed_tokens, whole.norm, whole.lm_head)
    first, second = (ModelPart(whole, share) for share in shares(5, 2, 1))
    assert [stage.index for stage in first.stages] == [0, 3]
    assert [stage.index for stage in second.stages] == [1, 2]
    assert [list(stage.blocks) for stage in first.stages + second.stages] == [
        blocks[:1],
        blocks[4:],
        blocks[1:3],
        blocks[3:4],
    ]
    begin, end = first.stages
    assert (begin.embed_tokens, end.norm, end.lm_head) == ends
    for stage in (begin, *second.stages):
        assert stage.norm is stage.lm_head is None
    for stage in (end, *second.stages):
        assert stage.embed_tokens is None
    assert (
        first.moe_layers
        == second.moe_layers
        == tuple(i for i, block in enumerate(blocks) if hasattr(block.mlp, "experts"))
    )
    assert second.local_moe_layers() == [1, 2, 3]
    assert len(second.routers()) == 3
    assert (first.num_experts, first.hidden_size) == (6, 24)


def loss_through(stages: list[Stage]) -> Tensor:
    tokens = random_tokens(2, 5)
    batch = MicroBatch(tokens, random_tokens(2, 5, seed=1), SequenceLayout(2, 5, CPU))
    x: Tensor | None = None
    with torch.no_grad():
        for stage in stages:
            x = overlap.run(Segments().forward(stage, x, ChunkTape(batch), []))
    assert x is not None
    return x[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_filled_part_computes_what_the_model_does(family: str) -> None:
    """Buffers and constants, too, survive the way over the meta device."""
    plain = tiny_family_model(family, num_hidden_layers=5)
    stages = {}
    for share in shares(5, 2, 1):
        part = empty_part(
            build_model(tiny_family_config(family, num_hidden_layers=5), None, META), share, CPU
        )
        fill(part, plain.named_parameters())
        stages |= {stage.index: stage for stage in part.stages}
    expected = plain(random_tokens(2, 5), random_tokens(2, 5, seed=1)).loss
    assert torch.equal(loss_through([stages[index] for index in range(4)]), expected)


def test_the_experts_of_a_rank_are_neighbors() -> None:
    values = torch.arange(6)
    parts = [
        PartLayers((range(1),), expert_rank=r, expert_ranks=3).of_parameter(
            "layers.0.mlp.experts.down_proj", values
        )
        for r in range(3)
    ]
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    for name in (
        "layers.0.mlp.shared_experts.down_proj.weight",
        "layers.0.mlp.gate.weight",
        "embed_tokens.weight",
    ):
        assert (
            PartLayers((range(1),), expert_rank=1, expert_ranks=3).of_parameter(name, values)
            is values
        )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_memory_is_the_part_s_and_one_whole_parameter_s(tied: bool) -> None:
    config = config_of("deepseek_v2", experts=12, tied=tied)
    largest = max(p.numel() * 4 for p in build_model(config, None, META).parameters())
    for share in shares(5, 2, 2):
        with PeakBytes(count_meta=False) as peak:
            part = fresh_part(config, share)
        own = sum(p.numel() * 4 for p in part.parameters())
        assert peak.now == own
        assert own < peak.bytes <= own + largest
    assert isinstance(part, nn.Module)
    assert not isinstance(part, Decoder)
