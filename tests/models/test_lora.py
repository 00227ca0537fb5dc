"""Adapters beside frozen weights compute the function and gradients of W + s B A in plain autograd,
without its copies and products."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lather.errors import ConfigError
from lather.models import experts, layers, lora
from lather.models.adapted import MergedTensors, add_adapters, factor_names, is_adapters
from lather.models.decoder import Decoder
from lather.models.key_value_cache import KeyValueCache
from lather.models.lora import Adapter, LoraConfig, fresh_adapters
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from models.tiny import error, largest_error, random_tokens, tiny_family_config, tiny_family_model

FAMILIES = {
    "deepseek_v2": {},
    "deepseek_v2 with q-LoRA": {"q_lora_rank": 9},
    "qwen3_moe": {"mlp_only_layers": (1,)},
    "gpt_oss": {},
}
TARGETS = {
    "deepseek_v2": ("attention", "experts", "shared_experts", "dense"),
    "qwen3_moe": ("attention", "experts", "dense"),
}
RANK = 3


def make(
    name: str, memory: str = "saved", *, dtype: torch.dtype = torch.float64, **changes: Any
) -> Decoder:
    """Make a model in which only adapters, with B other than zero, are trained."""
    family = name.partition(" ")[0]
    model = tiny_family_model(family, **FAMILIES[name], **changes).to(dtype)
    targets = TARGETS.get(family, ("attention", "experts"))
    add_adapters(model, LoraConfig(rank=RANK, alpha=4.0, targets=targets))
    generator = torch.Generator().manual_seed(3)
    for parameter, p in model.named_parameters():
        p.requires_grad_(is_adapters(parameter))
        if is_adapters(parameter):
            torch.nn.init.normal_(p, std=0.2, generator=generator)
    model.set_memory(memory)
    return model


def gradients_of(model: Decoder, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = random_tokens(2, 9, seed=seed)
    output = model(tokens, tokens.roll(1, 1), normalizer=18.0)
    assert output.loss is not None
    (output.loss + 0.1 * output.balance_loss()).backward()
    return output.loss.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_sum_in_plain_autograd(name: str) -> None:
    loss, gradients = gradients_of(make(name))
    expected_loss, expected = gradients_of(make(name, "reference"))
    assert all(is_adapters(parameter) for parameter in gradients)
    assert error(loss, expected_loss) < 1e-12
    assert largest_error(gradients, expected)[0] < 1e-11
    wrong = make(name)
    for module in wrong.modules():
        if isinstance(module, Adapter):
            module.scale *= 1.01
    assert largest_error(gradients_of(wrong)[1], expected)[0] > 1e-3


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen3_moe", "gpt_oss"])
def test_under_autocast_they_agree_within_its_rounding(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, found = gradients_of(make(name, dtype=torch.float32))
    expected_loss, expected = gradients_of(make(name, "reference", dtype=torch.float32))
    assert error(loss, expected_loss) < 0.02
    norms = [torch.stack([x.norm() for x in each.values()]).norm() for each in (found, expected)]
    assert norms[0] == pytest.approx(norms[1].item(), rel=0.1)
    assert {x.dtype for x in found.values()} == {torch.float32}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fresh_adapter_changes_no_bit_and_is_drawn_as_peft_draws_it(name: str) -> None:
    tokens, model = random_tokens(2, 9), make(name)
    plain = tiny_family_model(name.partition(" ")[0], **FAMILIES[name]).double()
    with torch.no_grad():
        for parameter, value in fresh_adapters(model, torch.Generator().manual_seed(0)):
            model.get_parameter(parameter).copy_(value)
            if parameter.endswith("B"):
                assert not value.any()
            else:  # Kaiming's uniform with a = sqrt 5 is within 1 / sqrt(inputs)
                bound = value.shape[-1] ** -0.5
                assert 0.7 * bound < value.abs().max() <= bound
        assert torch.equal(model(tokens).logits_BSV, plain(tokens).logits_BSV)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_put_off_have_the_same_bits(name: str) -> None:
    at_once, deferred = make(name), make(name)
    queue = WeightGradients()
    queue.deferring = True
    defer_weight_gradients(deferred, queue)
    for seed in range(2):
        gradients_of(at_once, seed)
        gradients_of(deferred, seed)
        WeightGradients.run(queue.take())
    found, expected = (dict(model.named_parameters()) for model in (deferred, at_once))
    for parameter, p in expected.items():
        assert (p.grad is None) == (found[parameter].grad is None) == (not is_adapters(parameter))
        assert p.grad is None or torch.equal(found[parameter].grad, p.grad), parameter


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen3_moe", "gpt_oss"])
def test_no_product_is_as_large_as_a_frozen_weight(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gradient of a frozen weight is made, neither to throw it away nor to make those of A and B
    from it."""
    shapes: list[tuple[int, ...]] = []

    def recorded(function: Any) -> Any:
        def run(*arguments: Tensor, **options: Any) -> Tensor:
            shapes.append(tuple((result := function(*arguments, **options)).shape))
            return result

        return run

    monkeypatch.setattr(layers, "weight_product", recorded(layers.weight_product))
    for module in (experts, lora):
        monkeypatch.setattr(
            module, "grouped_weight_gradient", recorded(lora.grouped_weight_gradient)
        )
    model = make(name)
    gradients_of(model)
    trained = {tuple(p.shape) for p in model.parameters() if p.requires_grad}
    assert shapes
    assert set(shapes) <= trained
    monkeypatch.undo()


def kept(memory: str) -> int:
    """Count the bytes that autograd keeps besides parameters and their storages, in a wide model
    with few tokens."""
    model = make("qwen3_moe", memory, dtype=torch.float32, hidden_size=96, moe_intermediate_size=64)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = random_tokens(1, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model(tokens, tokens, normalizer=4.0)
    assert output.loss is not None
    return sum(found.values())


def test_no_copy_of_a_weight_is_kept() -> None:
    config = tiny_family_config("qwen3_moe", hidden_size=96, moe_intermediate_size=64)
    stacks = 2 * 3 * 5 * 96 * 64 * 4  # two blocks, three matrices, five experts, fp32
    assert config.num_experts == 5
    assert kept("reference") > stacks
    assert kept("saved") < stacks / 8


NO_MATCH = "it matches no weight that can have an adapter; the nearest are"


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("layers.9.*",), f"'layers.9.*' is not valid: {NO_MATCH} layers."),
        (("attention", "*.qproj"), f"'*.qproj' is not valid: {NO_MATCH}"),
        (
            ("shared_experts",),
            "'shared_experts' is not valid: the model has none; it has attention",
        ),
        (("lm_head",), "'lm_head' is not valid"),
    ],
)
def test_a_target_that_is_not_there_is_refused(targets: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"lora.targets = {words}")):
        add_adapters(tiny_family_model("qwen3_moe"), LoraConfig(rank=2, targets=targets))


def test_a_model_without_experts_has_adapters_of_its_dense_layers_instead() -> None:
    model = tiny_family_model("llama")
    add_adapters(model, LoraConfig(rank=2))
    for layer in model.layers:
        for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
            linears = (layer.get_submodule(f"{part}.{name}_proj") for name in names)
            assert all(linear.lora is not None for linear in linears)


def test_the_input_of_multi_token_prediction_is_no_shared_expert() -> None:
    model = tiny_family_model("deepseek_v3", num_nextn_predict_layers=1)
    add_adapters(model, LoraConfig(rank=2, targets=("shared_experts",)))
    block = model.layers[-1]
    assert block.mlp.shared_experts.up_proj.lora is not None
    assert block.mtp.eh_proj.lora is None


def test_patterns_choose_weights_by_name() -> None:
    model = tiny_family_model("qwen3_moe")
    add_adapters(
        model, LoraConfig(rank=2, targets=("layers.1.self_attn.[qv]_proj", "*.experts.down_proj"))
    )
    names = [
        name for name, _ in model.named_parameters() if name.endswith("A") and is_adapters(name)
    ]
    assert sorted(names) == [
        *(f"layers.{layer}.mlp.experts.down_lora.A" for layer in (0, 1)),
        "layers.1.self_attn.q_proj.lora.A",
        "layers.1.self_attn.v_proj.lora.A",
        "layers.2.mlp.experts.down_lora.A",
    ]
    add_adapters(untouched := tiny_family_model("qwen3_moe"), LoraConfig(targets=("nothing",)))
    assert not any(is_adapters(name) for name, _ in untouched.named_parameters())


class Tensors:
    """A checkpoint in memory, with one entry for each expert."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors: Any = tensors

    def read(self, name: str, index: Any = ()) -> Tensor:
        return self.tensors[name][index].clone()


def test_merged_weights_are_the_sum() -> None:
    model = make("deepseek_v2")
    stored = {}
    for name, p in model.named_parameters():
        is_stack = ".experts." in name
        stored |= (
            {f"{name}.{e}": row for e, row in enumerate(p.detach())}
            if is_stack
            else {name: p.detach()}
        )
    merged = MergedTensors(Tensors(stored), 4.0 / RANK)
    assert not any(is_adapters(name) for name in merged.tensors)
    for name in merged.tensors:
        a, b = (stored.get(factor) for factor in factor_names(name))
        expected = stored[name] if a is None or b is None else stored[name] + 4.0 / RANK * b @ a
        torch.testing.assert_close(merged.read(name), expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(
            merged.read(name, (slice(1, 3),)), expected[1:3], rtol=1e-13, atol=1e-13
        )
    assert torch.equal(merged.read("norm.weight"), stored["norm.weight"])
    assert not torch.equal(
        merged.read("layers.1.mlp.experts.down_proj.2"), stored["layers.1.mlp.experts.down_proj.2"]
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_value_cache_reads_adapted_weights(name: str) -> None:
    model, tokens_BS = make(name), random_tokens(2, 9)
    with torch.no_grad():
        expected = model(tokens_BS).logits_BSV
        cache = KeyValueCache()
        found = torch.cat(
            [
                model(piece_BS, cache=cache).logits_BSV
                for piece_BS in tokens_BS.split([4, 5], dim=1)
            ],
            dim=1,
        )
    assert expected is not None
    assert error(found, expected) < 1e-10
