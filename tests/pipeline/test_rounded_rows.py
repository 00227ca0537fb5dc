"""Norms that write rows in the dtype of products, with the residual stream added in the same pass:
the bits of norms in fp32 whose output each product rounds, in one graph and in segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lather.kernels import rms_norm
from lather.models.adapted import add_adapters
from lather.models.decoder import Decoder
from lather.models.layers import Linear, RMSNorm
from lather.models.lora import LoraConfig
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from lather.pipeline.segment_runner import RECOMPUTABLE
from lather.pipeline.segments import Segments
from lather.pipeline.tape import Frees
from pipeline.test_segments import gradients, micro_batch, model_of, plain_step, segments_step

BF16 = torch.bfloat16
CASES: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {}),
    ("deepseek_v2", {"q_lora_rank": 8}),
    ("qwen3_moe", {}),
    ("gpt_oss", {}),
    ("qwen2_moe", {}),  # the gate of the shared experts reads their rows, too
    ("qwen3_next", {}),
]


@pytest.fixture
def _plain_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNorm, "rounds_to", lambda *_: None)


def results(model: Decoder, *, in_segments: bool, **options: Any) -> dict[str, torch.Tensor]:
    queue = WeightGradients()
    defer_weight_gradients(model, queue)
    if in_segments:
        segments = Segments(weight_gradients=queue, autocast=BF16, **options)
        loss, _, _ = segments_step(model, segments, micro_batch(), defer=True)
        queue.run(queue.take())
    else:
        loss, _ = plain_step(model, micro_batch(), BF16)
    return {"loss": loss, **gradients(model)}


@pytest.mark.parametrize(("family", "changes"), CASES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"in_segments": False},
        {"in_segments": True},
        {"in_segments": True, "recompute": RECOMPUTABLE},
        {"in_segments": True, "frees": Frees(poison=True)},
    ],
    ids=["one graph", "segments", "recomputed", "poisoned"],
)
def test_they_have_the_bits_of_plain_norms(
    family: str, changes: dict[str, Any], options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    actual = results(model_of(family, **changes), **options)
    request.getfixturevalue("_plain_norms")
    expected = results(model_of(family, **changes), **options)
    assert actual.keys() == expected.keys()
    assert [name for name, x in actual.items() if not x.equal(expected[name])] == []


@pytest.mark.parametrize("targets", [("attention",), ("experts", "shared_experts", "dense")])
def test_adapters_add_their_gradients_as_before(
    targets: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    def trained() -> dict[str, torch.Tensor]:
        model = model_of("deepseek_v2")
        add_adapters(model, LoraConfig(rank=2, targets=targets))
        generator = torch.Generator().manual_seed(1)
        for name, p in model.named_parameters():
            if name.endswith((".A", ".B")):
                p.data.normal_(std=0.1, generator=generator)
        return results(model, in_segments=True)

    actual = trained()
    request.getfixturevalue("_plain_norms")
    expected = trained()
    assert [name for name, x in actual.items() if not x.equal(expected[name])] == []


def test_under_autocast_both_norms_of_a_block_and_a_latents_write_rounded_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The latent is normalized once more in backward, for keys and values."""
    calls: list[str] = []
    for name in ("round_rms_norm", "add_rms_norm"):

        def counted(*args: Any, name: str = name, **options: Any) -> Any:
            calls.append(name)
            return getattr(rms_norm, name)(*args, **options)

        monkeypatch.setattr(f"lather.models.layers.{name}", counted)
    model = model_of("deepseek_v2")
    plain_step(model, micro_batch(), BF16)
    assert Counter(calls) == {
        "round_rms_norm": 3 * len(model.layers),
        "add_rms_norm": len(model.layers),
    }


def test_fp32_and_fp64_keep_plain_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("rounded without autocast")

    monkeypatch.setattr(RMSNorm, "rounded_again", fail)
    for name in ("round_rms_norm", "add_rms_norm"):
        monkeypatch.setattr(f"lather.models.layers.{name}", fail)
    for dtype in (torch.float32, torch.float64, BF16):
        plain_step(model_of("deepseek_v2").to(dtype), micro_batch())


class Wrapped(nn.Module):
    """Stands in the place of a norm as the adapters and compiled modules of other libraries do:
    attributes are those of the norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.num_calls = norm, 0

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["inner"], name)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.inner(x)


def of_torch(norm: RMSNorm) -> nn.Module:
    made = nn.RMSNorm(norm.weight.shape[0], norm.eps)
    made.weight = norm.weight
    return made


@pytest.mark.parametrize("in_segments", [False, True], ids=["one graph", "segments"])
@pytest.mark.parametrize("kind", [of_torch, Wrapped])
def test_any_module_may_stand_in_the_place_of_a_norm(
    kind: Callable[[Any], nn.Module], in_segments: bool
) -> None:
    expected = results(model_of("deepseek_v2", q_lora_rank=8), in_segments=in_segments)
    model = model_of("deepseek_v2", q_lora_rank=8)
    for module in list(model.layers.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, RMSNorm):
                setattr(module, name, kind(norm))
    actual = results(model, in_segments=in_segments)
    actual = {name.replace(".inner", ""): x for name, x in actual.items()}
    assert actual.keys() == expected.keys()
    for name, x in actual.items():  # the norm of torch rounds elsewhere
        difference = torch.linalg.vector_norm(x - expected[name])
        assert difference <= 0.05 * torch.linalg.vector_norm(expected[name]), name
    wrapped = [module for module in model.modules() if isinstance(module, Wrapped)]
    assert len(wrapped) == (4 * len(model.layers) if kind is Wrapped else 0)
    assert all(module.num_calls for module in wrapped)


class Adapted(nn.Module):
    """An adapter of another library around a layer: both read the same rows."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = layer, nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_moe", {}), ("deepseek_v2", {"q_lora_rank": 8})], ids=str
)
def test_adapters_of_other_libraries_keep_no_more_than_with_plain_norms(
    family: str, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """They read the rows in fp32, which backward widens again."""

    def kept() -> tuple[int, dict[str, Tensor]]:
        model = model_of(family, **changes)
        torch.manual_seed(0)
        for block in model.layers:
            for name, layer in list(block.self_attn.named_children()):
                if isinstance(layer, Linear):
                    setattr(block.self_attn, name, Adapted(layer))
        storages: dict[int, Tensor] = {}

        def pack(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.detach()
            return x.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            plain_step(model, micro_batch(), BF16)
        return sum(x.untyped_storage().nbytes() for x in storages.values()), gradients(model)

    num_bytes, actual = kept()
    request.getfixturevalue("_plain_norms")
    most, expected = kept()
    assert num_bytes <= most
    assert actual.keys() == expected.keys()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_hooks_on_layers_behind_a_latents_norm_run(bf16: bool) -> None:
    model = model_of("deepseek_v2", q_lora_rank=8)
    calls: Counter[str] = Counter()
    for name in ("q_b_proj", "kv_b_proj"):
        layer = model.layers[1].self_attn.get_submodule(name)
        layer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    with torch.autocast("cpu", BF16, enabled=bf16):
        model(micro_batch().tokens_BS)
    assert calls == {"q_b_proj": 1, "kv_b_proj": 1}
