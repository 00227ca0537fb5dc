"""Weights that are rounded once in a step: the bits of rounding them for each product, once for
each weight, and nothing kept afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lather.config.config import MoEConfig
from lather.config.loop import LoopConfig
from lather.data.batches import Batch
from lather.engine.engine import Engine
from lather.models.adapted import add_adapters
from lather.models.experts import Experts
from lather.models.families import build_model
from lather.models.lora import LoraConfig, fresh_adapters
from lather.models.saving.rounded_weights import RoundedWeights
from lather.parallel.mesh import Mesh
from lather.pipeline.model_part import PartLayers, empty_part, fill
from lather.pipeline.schedule import sequential
from lather.pipeline.tape import Frees
from lather.torch_private import TorchDispatchMode
from models.tiny import random_normal, random_tokens, tiny_family_config, tiny_family_model

ALL = ("attention", "experts", "shared_experts", "dense")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {}),
    ("deepseek_v2", {"recompute": ("attention", "experts", "shared_experts")}),
    ("deepseek_v2", {"lora": LoraConfig(rank=2, targets=ALL)}),
    ("qwen3_moe", {"lora": LoraConfig(rank=2)}),
    ("gpt_oss", {}),
]


def engine_of(
    family: str, keep: str, *, recompute: tuple[Any, ...] = (), lora: LoraConfig | None = None
) -> Engine:
    whole = tiny_family_model(family)
    empty = build_model(tiny_family_config(family), None, torch.device("meta"))
    for model in (whole, empty):
        add_adapters(model, lora or LoraConfig())
    part = empty_part(empty, PartLayers((range(len(whole.layers)),)), torch.device("cpu"))
    fill(part, whole.named_parameters())
    fill(part, fresh_adapters(whole, torch.Generator().manual_seed(1)))
    for name, p in part.named_parameters():
        if name.endswith(".B"):
            nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(2))
        p.requires_grad_(lora is None or name.endswith((".A", ".B")))
    loop = LoopConfig(
        batch_size=4, sequence_length=6, precision="bf16", rounded_weights=keep, recompute=recompute
    )  # type: ignore[arg-type]
    return Engine(
        part,
        Mesh.single(torch.device("cpu")),
        sequential(4),
        loop,
        MoEConfig(balance_coefficient=0.0),
        Frees(),
    )


def step(engine: Engine, seed: int) -> list[Tensor | float]:
    batch = Batch.of_tokens(random_tokens(4, 7, seed=seed))
    result, _ = engine.launch_gradients(batch).read()
    trained = [p for p in engine.part.parameters() if p.grad is not None]
    results = [result.loss, *(p.grad.clone() for p in trained)]
    with torch.no_grad():
        for p in trained:
            p.sub_(p.grad, alpha=0.1)
    engine.parameters.clear_gradients()
    return results


class Roundings(TorchDispatchMode):
    """Counts how often tensors of some shapes are rounded to bf16."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes, self.number = shapes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.ops.aten._to_copy.default
            and kwargs.get("dtype") == torch.bfloat16
            and args[0].shape in self.shapes
        ):
            self.number += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_steps_have_the_bits_of_rounding_each_time(family: str, options: dict[str, Any]) -> None:
    """There are two steps, because a copy of the first step's weights would show in the second."""
    engines = [engine_of(family, keep, **options) for keep in ("step", "product")]
    for seed in (3, 4):
        cached, plain = (step(engine, seed) for engine in engines)
        assert len(cached) == len(plain) > 10
        assert cached[0] == plain[0]
        assert all(x.equal(y) for x, y in zip(cached[1:], plain[1:], strict=True))  # type: ignore[union-attr, arg-type]
    batch = Batch.of_tokens(random_tokens(4, 7, seed=5))
    assert engines[0].validation_loss(batch) == engines[1].validation_loss(batch)
    assert not engines[0]._segments.rounded_weights.copies()


def test_each_stack_of_experts_is_rounded_once_in_a_step() -> None:
    numbers = {}
    for keep in ("step", "product"):
        engine = engine_of("qwen3_moe", keep)
        experts = [module for module in engine.part.modules() if isinstance(module, Experts)]
        shapes = {p.shape for layer in experts for p in layer.parameters()}
        with Roundings(shapes) as counted:
            step(engine, 3)
        numbers[keep] = counted.number
    # two stacks, three layers; four micro-batches, forward and backward
    assert numbers == {"step": 2 * 3, "product": 2 * 3 * 4 * 2}


def test_a_weight_that_changes_or_goes_is_rounded_again() -> None:
    cache, weight, bf16 = (
        RoundedWeights(),
        nn.Parameter(random_normal(3, 4).float()),
        torch.bfloat16,
    )
    assert cache.round(weight, bf16) is not cache.round(weight, bf16)
    with cache.caching():
        first = cache.round(weight, bf16)
        assert first is cache.round(weight, bf16)
        assert not first.requires_grad
        assert sum(copy.nbytes for copy in cache.copies()) == 3 * 4 * 2
        with torch.no_grad():
            weight.add_(1)
        assert cache.round(weight, bf16).equal(weight.detach().bfloat16())
        with torch.no_grad():  # as FSDP gathers: no version is counted
            weight.data.add_(1)
        assert not cache.round(weight, bf16).equal(weight.detach().bfloat16())
        cache.forget([weight])
        assert not cache.copies()
        assert cache.round(weight, bf16).equal(weight.detach().bfloat16())
        with cache.caching():
            pass
        assert cache.copies()
        other = weight.detach()
        assert cache.round(other, bf16) is not cache.round(other, bf16)
        assert cache.round(weight, torch.float32).data_ptr() == weight.data_ptr()
        assert cache.in_backward(weight, other) is weight
        assert cache.in_backward(other, weight) is weight
    assert not cache.copies()
    assert cache.in_backward(weight, other) is other


def test_an_error_leaves_nothing_cached() -> None:
    cache, weight = RoundedWeights(), nn.Parameter(torch.ones(2))

    def half_a_step() -> None:
        with cache.caching():
            cache.round(weight, torch.bfloat16)
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        half_a_step()
    assert not cache.copies()
    assert not cache.caches(weight)
