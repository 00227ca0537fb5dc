"""The heads of the projections that `optim.per_head` divides into heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lather.config.optim import optim_config
from lather.engine.optimizer import build_optimizer, head_rows_of
from lather.models.adapted import add_adapters
from lather.models.lora import LoraConfig
from models.tiny import random_tokens, tiny_family_model

EQUAL = {"linear_key_head_dim": 5, "linear_value_head_dim": 5}
CHANGES = {"deepseek_v3": {"q_lora_rank": 9}, "qwen3_next": EQUAL, "qwen3_5_moe": EQUAL}
HEADS = {
    "deepseek_v2": {"kv_b_proj", "q_proj"},
    "deepseek_v3": {"kv_b_proj", "q_b_proj"},
    "gpt_oss": {"q_proj", "k_proj", "v_proj"},
    "llama": {"q_proj", "k_proj", "v_proj"},
    "qwen3_next": {"q_proj", "k_proj", "v_proj", "in_proj_qkvz"},
    "qwen3_5_moe": {"q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z"},
}
"""Names of the projections that have heads, by family."""


def changed_heads(model: nn.Module, weight: nn.Parameter, rows: slice, path: str) -> int:
    """Change some rows of a projection; return how many heads give the output projection of the
    module at `path` another input."""
    module = model.get_submodule(path)
    inputs: list[Tensor] = []
    output = module.out_proj if hasattr(module, "out_proj") else module.o_proj
    hook = output.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    with torch.no_grad():
        model(random_tokens(2, 12))
        weight[rows] += torch.randn_like(weight[rows])
        model(random_tokens(2, 12))
    hook.remove()
    num_heads = getattr(module, "num_heads", 0) or module.sizes.num_value_heads
    before, after = (x.unflatten(-1, (num_heads, -1)) for x in inputs)
    return int((before != after).flatten(0, -3).any(-1).any(0).sum())


@pytest.mark.parametrize("family", HEADS)
def test_rows_of_a_head_change_what_that_head_or_its_group_gives(family: str) -> None:
    model = tiny_family_model(family, **CHANGES.get(family, {}))
    sizes = head_rows_of(model)
    assert {name.split(".")[-2] for name in sizes} == HEADS[family]
    for name, rows in sizes.items():
        weight, path = model.get_parameter(name), name.rpartition(".")[0].rpartition(".")[0]
        assert len(weight) % rows == 0
        module = model.get_submodule(path)
        num_heads = getattr(module, "num_heads", 0) or module.sizes.num_value_heads
        assert len(weight) // rows > 1
        for first in range(0, len(weight), rows):
            found = changed_heads(model, weight, slice(first, first + rows), path)
            assert 1 <= found < num_heads, (name, first)


@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_the_trainer_cuts_what_has_heads_and_leaves_the_rest_whole(rule: str) -> None:
    model = tiny_family_model("llama")
    named = list(model.named_parameters())
    sizes = head_rows_of(model)
    optimizer = build_optimizer(optim_config(rule, per_head=True), named, sizes)
    found = {
        name: group["head_rows"]
        for group in optimizer.param_groups
        for name in group["param_names"]
        if group["matrix_layout"] == "per_head"
    }
    assert found == sizes
    whole = build_optimizer(optim_config(rule), named)
    assert not any(group["matrix_layout"] == "per_head" for group in whole.param_groups)


def test_adapters_of_projections_with_heads_stay_whole() -> None:
    model = tiny_family_model("llama")
    add_adapters(model, LoraConfig(rank=2, targets=("*.q_proj",)))
    optimizer = build_optimizer(
        optim_config("muon", per_head=True), model.named_parameters(), head_rows_of(model)
    )
    layouts = {
        name: group["matrix_layout"]
        for group in optimizer.param_groups
        for name in group["param_names"]
        if "q_proj" in name
    }
    assert {layout for name, layout in layouts.items() if "lora" in name} == {"tensor"}
    assert {layout for name, layout in layouts.items() if "lora" not in name} == {"per_head"}
