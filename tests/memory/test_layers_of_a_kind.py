"""Two layers of each kind stand for all: the numbers equal those of running every layer, in every
family, memory mode and precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lather.memory.block_samples import block_kinds, keep_two_of_each, materialize
from lather.memory.profile import SavedTensors, profile_saved_tensors
from lather.models.decoder import Decoder
from lather.models.families import ModelConfig, build_model
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.models.families.gpt_oss import GptOssConfig
from lather.models.families.qwen3_moe import Qwen3MoeConfig

SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "initializer_range": 0.15,
}
DEEPSEEK: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN: dict[str, Any] = {
    **SMALL,
    "moe_intermediate_size": 12,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GPT_OSS: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 12,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 3,
}
MODELS: dict[str, ModelConfig] = {
    "one dense, three MoE": DeepseekV2Config(
        **DEEPSEEK, num_hidden_layers=4, first_k_dense_replace=1, tie_word_embeddings=True
    ),
    "three dense, three MoE": DeepseekV2Config(
        **DEEPSEEK, num_hidden_layers=6, first_k_dense_replace=3
    ),
    "one of each": DeepseekV2Config(**DEEPSEEK, num_hidden_layers=2, first_k_dense_replace=1),
    "two alike": Qwen3MoeConfig(**QWEN, num_hidden_layers=2),
    "four alike": Qwen3MoeConfig(**QWEN, num_hidden_layers=4),
    "alternating": GptOssConfig(**GPT_OSS, num_hidden_layers=5),
}


def profile_of(model: Decoder, vocab_size: int, precision: str) -> SavedTensors:
    tokens = torch.randint(vocab_size, (2, 10), generator=torch.Generator().manual_seed(0))

    def losses() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            output = model(tokens[:, :-1], tokens[:, 1:])
        assert output.loss is not None
        return [output.loss, output.balance_loss()]

    return profile_saved_tensors(model, losses, num_tokens=18)


def totals(profile: SavedTensors) -> dict[tuple[str, str, str], int]:
    """Return the bytes by layer, segment and kind."""
    sums: dict[tuple[str, str, str], int] = {}
    for one in profile.storages:
        key = (one.layer, one.segment, one.kind)
        sums[key] = sums.get(key, 0) + one.bytes
    return sums


@pytest.mark.parametrize(
    ("name", "precision", "mode"),
    [
        ("one dense, three MoE", "bf16", "saved"),
        ("one dense, three MoE", "fp32", "reference"),
        ("three dense, three MoE", "bf16", "recompute"),
        ("one of each", "fp32", "saved"),
        ("two alike", "bf16", "saved"),
        ("four alike", "bf16", "reference"),
        ("alternating", "fp32", "saved"),
        ("alternating", "bf16", "reference"),
    ],
)
def test_two_of_each_kind_give_what_all_layers_give(name: str, precision: str, mode: str) -> None:
    config = MODELS[name]
    whole = build_model(config, torch.Generator().manual_seed(0))
    small = build_model(config, torch.Generator(), torch.device("meta"))
    cut = keep_two_of_each(small)
    materialize(small, torch.device("cpu"), torch.Generator().manual_seed(1))
    assert sorted(index for kind in cut.kinds for index in kind) == list(
        range(config.num_hidden_layers)
    )
    for model in (whole, small):
        model.set_memory(mode)
    expected = profile_of(whole, config.vocab_size, precision)
    restored = cut.restore(profile_of(small, config.vocab_size, precision))
    assert restored.layers() == expected.layers()
    assert totals(restored) == totals(expected)
    assert restored.num_tokens == expected.num_tokens


@pytest.mark.parametrize(
    ("name", "kinds", "kept"),
    [
        ("one dense, three MoE", [[0], [1, 2, 3]], (0, 1, 2)),
        ("three dense, three MoE", [[0, 1, 2], [3, 4, 5]], (0, 1, 3, 4)),
        ("four alike", [[0, 1, 2, 3]], (0, 1)),
        ("alternating", [[0, 2, 4], [1, 3]], (0, 1, 2, 3)),
    ],
)
def test_kinds(name: str, kinds: list[list[int]], kept: tuple[int, ...]) -> None:
    model = build_model(MODELS[name], torch.Generator(), torch.device("meta"))
    assert block_kinds(model.layers) == kinds
    assert keep_two_of_each(model).kept == kept


def test_the_two_of_a_kind_share_their_parameters_and_no_two_kinds_do() -> None:
    model = build_model(MODELS["alternating"], torch.Generator(), torch.device("meta"))
    keep_two_of_each(model)
    blocks = list(model.layers)
    names = [[name for name, _ in block.named_parameters()] for block in blocks]
    for first, second in ((0, 2), (1, 3)):
        assert blocks[first] is not blocks[second]
        assert names[first] == names[second] != []
        for one, other in zip(blocks[first].parameters(), blocks[second].parameters(), strict=True):
            assert one is other
    assert len(list(model.layers.parameters())) == len(names[0]) + len(names[1])
    materialize(model, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert all(
        one is other
        for one, other in zip(
            model.layers[1].parameters(), model.layers[3].parameters(), strict=True
        )
    )


class Settings:
    """A value whose repr has an address, as it is the default one."""

    def __init__(self, value: int) -> None:
        self.value = value


class Part(nn.Module):
    def __init__(self, size: int = 3, value: int = 1, flag: bool = False, buffer: int = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))
        self.register_buffer("b", torch.ones(buffer))
        self.settings = [Settings(value)]
        self.flag = flag


@pytest.mark.parametrize(
    "changes", [{"size": 4}, {"value": 2}, {"flag": True}, {"buffer": 3}], ids=str
)
def test_what_makes_blocks_differ(changes: dict[str, Any]) -> None:
    blocks = nn.ModuleList(nn.Sequential(Part(**kwargs)) for kwargs in ({}, changes, {}))
    blocks[2].eval()  # evaluation is a mode, and makes no other kind
    assert block_kinds(blocks) == [[0, 2], [1]]


def test_materialize_keeps_ties_and_leaves_real_tensors_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model.append(nn.Linear(3, 2))
    model.append(nn.Conv1d(2, 2, 1, device="meta"))
    before = model[3].weight
    materialize(model, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert model[1].weight is model[0].weight
    assert model[3].weight is before
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert 0 < model[0].weight.abs().max() <= 0.02
    assert model[4].weight.abs().max() == 0
    assert model[2].running_mean.tolist() == [0, 0, 0]
    assert len(list(model.parameters())) == 9
