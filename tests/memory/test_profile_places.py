"""The places under which a profile files kept tensors (layers, modules, segments), and that it
leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lather.memory.profile import (
    BLOCK_SEGMENTS,
    OUTSIDE,
    SavedStorage,
    SavedTensors,
    expand,
    layer_of,
    profile_saved_tensors,
    tensors_in,
)
from memory.modules import F32, Act, Plan, leaf, profile_of, square

# --- places ---------------------------------------------------------------------------------------


class TinyBlock(nn.Module):
    """A block whose five segments keep a tensor of its own size each; its forward keeps one more
    between them."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Act(square)

    def attend_and_route(self, x: Tensor) -> tuple[Tensor, int]:
        return x[:1].exp(), 3

    def dispatch(self, x: Tensor) -> Tensor:
        return x.repeat(2, 1).exp()

    def run_experts(self, x: Tensor, *, scale: Tensor) -> Tensor:
        y: Tensor = self.mlp(x.repeat(2, 1) * scale)
        return y

    def combine(self, x: Tensor) -> Tensor:
        return x

    def aggregate(self, x: Tensor) -> Tensor:
        return x.repeat(2, 1).exp()

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = self.attend_and_route(x)
        rows = self.run_experts(self.dispatch(rows), scale=torch.tensor(2.0))
        return self.aggregate(self.combine(rows).repeat(4, 1).sin()).sum(0, keepdim=True)


class TinyDecoder(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(TinyBlock() for _ in range(num_layers))
        self.norm = Act(torch.exp)
        self.lm_head = nn.Linear(5, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x)).softmax(-1)


ROW = 5 * F32


def test_segments_of_a_block_and_of_what_is_around_it() -> None:
    model = TinyDecoder()
    profile = profile_saved_tensors(model, lambda: model(torch.arange(2)).square().sum())
    sizes = {
        (layer, segment): profile.bytes(layer=layer, segment=segment)
        for layer in profile.layers()
        for segment in profile.segments()
    }
    block = {
        "attend_and_route": ROW,
        "dispatch": 2 * ROW,
        "run_experts": 4 * ROW + F32,
        "other": 16 * ROW,
        "aggregate": 32 * ROW,
    }
    assert {place: size for place, size in sizes.items() if size} == {
        ("embed_tokens", "embedding"): 2 * 8,
        **{(f"layers.{n}", segment): size for n in (0, 1) for segment, size in block.items()},
        ("norm", "final_norm"): ROW,
        ("lm_head", "head_and_loss"): 3 * ROW,
        (OUTSIDE, "head_and_loss"): 3 * F32,  # softmax and square keep the same tensor
    }
    assert profile.bytes("weight") == 3 * ROW
    assert profile.segments() == (
        "embedding",
        "attend_and_route",
        "dispatch",
        "run_experts",
        "aggregate",
        "other",
        "final_norm",
        "head_and_loss",
    )
    modules = {
        one.segment: one.module
        for one in profile.storages
        if one.layer == "layers.1" and one.dtype == "float32" and one.shape
    }
    assert modules == {
        name: "layers.1.mlp" if name == "run_experts" else "layers.1" for name in block
    }


def test_a_storage_that_several_segments_keep_names_them() -> None:
    class Sharing(TinyBlock):
        def combine(self, x: Tensor) -> Tensor:
            return x * self.kept

        def attend_and_route(self, x: Tensor) -> tuple[Tensor, int]:
            self.kept = x.exp()
            return self.kept, 3

    one = profile_of(Sharing(), leaf(1, 5)).storages[0]
    assert (one.segment, one.also_saved_in) == ("attend_and_route", (f"{OUTSIDE} combine",))


def attributes_of(model: nn.Module) -> list[list[str]]:
    return [sorted(vars(module)) for module in model.modules()]


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


@pytest.mark.parametrize("fails", ["", "attend_and_route", "run_experts", "mlp", "after"])
def test_the_model_is_as_before_also_after_an_error(fails: str) -> None:
    model = TinyDecoder()
    block = model.layers[1]

    def error(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    if fails == "mlp":
        block.mlp.function = error
    elif fails in BLOCK_SEGMENTS:
        setattr(block, fails, error)  # on the instance; it must be there again afterwards
    before = attributes_of(model)

    def run() -> Tensor:
        loss: Tensor = model(torch.arange(2)).sum()
        return loss if fails != "after" else error() or loss

    if fails:
        with pytest.raises(ZeroDivisionError):
            profile_saved_tensors(model, run)
    else:
        profile_saved_tensors(model, run)
    assert attributes_of(model) == before
    assert hooks_of(model) == 0
    if fails in BLOCK_SEGMENTS:
        assert getattr(block, fails) is error
    else:
        assert all(name not in vars(block) for name in BLOCK_SEGMENTS)
        block.mlp.function = square
        x = leaf(7, 5)
        (x * x).sum().backward()  # no hook is left that would pack
        assert x.grad is not None
        assert model(torch.arange(2)).shape == (1, 3)


def test_an_error_that_the_model_deals_with_leaves_the_places_right() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Act(fails), Act(square)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.first(x)
            except ZeroDivisionError:
                x = x.exp()
            return self.second(x)

    profile = profile_of(nn.Sequential(Careful()), leaf(7, 5))
    assert [one.module for one in profile.storages] == ["0"]
    assert profile.storages[0].saved_by == "ExpBackward0.result"


def test_a_model_with_a_norm_is_not_yet_a_decoder() -> None:
    model = nn.Sequential()
    model.norm = Act(torch.exp)
    assert profile_of(model, leaf(7, 5)).segments() == ("other",)


def test_two_profiles_of_a_model_are_the_same() -> None:
    model = TinyDecoder()
    first, second = (
        profile_saved_tensors(model, lambda: model(torch.arange(2)).sum()) for _ in range(2)
    )
    assert first == second


def test_the_pass_gives_the_same_numbers_and_gradients_as_without_hooks() -> None:
    def pass_(profiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(11, 5), nn.Linear(5, 3), Act(torch.exp), Act(square), nn.Linear(3, 5)
        )
        losses: list[Tensor] = []

        def run() -> Tensor:
            loss: Tensor = model(torch.arange(2)).square().sum()
            losses.append(loss)
            return loss

        if profiled:
            profile_saved_tensors(model, run)
        else:
            run()
        losses[0].backward()
        return [losses[0], *(p.grad for p in model.parameters() if p.grad is not None)]

    plain, hooked = pass_(profiled=False), pass_(profiled=True)
    assert len(plain) == len(hooked) == 6
    assert all(a.equal(b) for a, b in zip(plain, hooked, strict=True))


def test_the_graph_is_freed_afterwards() -> None:
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def watched(x: Tensor) -> Tensor:
        y = x.exp()
        seen.append(weakref.ref(y.untyped_storage()))
        return y

    model = nn.Sequential(Act(watched), Act(square))
    # reference counts alone must free it: a cycle through autograd would never be found
    gc.disable()
    try:
        profile = profile_of(model, leaf(7, 5))
        assert profile.bytes() == 7 * 5 * F32
        assert seen[0]() is None
    finally:
        gc.enable()


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("layers.3.mlp.experts.0", "layers.3"),
        ("norm", "norm"),
        ("model.norm", "model"),
        ("0", "0"),
        ("", OUTSIDE),
    ],
)
def test_layer_of(path: str, layer: str) -> None:
    assert layer_of(path) == layer


def test_tensors_in_finds_all_and_takes_classes_for_what_they_are() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [
        t.numel() for t in tensors_in([a, {"x": (b, Plan(c, {"y": [a]}))}, Plan, "text", None, 3])
    ] == [1, 2, 3, 1]
    assert list(tensors_in({"x": 1})) == []


def test_layers_are_in_order_of_their_numbers() -> None:
    names = ["embed", "layers.0", "layers.10", "layers.9", "norm", "layers.2"]
    storages = tuple(
        SavedStorage(name, "other", name, "", (1,), "float32", 4, "activation", "", 1, ())
        for name in names
    )
    assert SavedTensors(storages, 1).layers() == (
        "embed",
        "layers.0",
        "layers.2",
        "layers.9",
        "layers.10",
        "norm",
    )


def test_expand_copies_the_second_of_a_kind_and_takes_weights_from_the_first() -> None:
    def storage(layer: str, kind: Any, size: int, also: tuple[str, ...] = ()) -> SavedStorage:
        weight = "" if kind == "activation" else f"{layer}.w"
        return SavedStorage(
            layer, "other", f"{layer}.mlp", "", (size,), "uint8", size, kind, weight, 1, also
        )

    measured = SavedTensors(
        (
            storage("layers.0", "activation", 1),
            storage("layers.1", "weight", 10),
            storage("layers.1", "weight copy", 20),
            storage("layers.1", "activation", 130, ("layers.10 other",)),
            storage("layers.10", "activation", 30, ("layers.10 combine", "layers.1 other")),
            storage("layers.10", "weight copy", 999),
            storage("norm", "activation", 5),
        ),
        7,
    )
    whole = expand(measured, [["layers.1", "layers.10", "layers.11", "layers.12"]])
    assert whole.layers() == ("layers.0", "layers.1", "layers.10", "layers.11", "layers.12", "norm")
    for layer in ("layers.10", "layers.11", "layers.12"):
        assert [
            whole.bytes(kind, layer=layer) for kind in ("activation", "weight copy", "weight")
        ] == [30, 20, 10]
        (one,) = (one for one in whole.storages if one.layer == layer and one.kind == "activation")
        assert (one.module, one.also_saved_in) == (
            f"{layer}.mlp",
            (f"{layer} combine", "layers.1 other"),
        )
        assert {one.weight for one in whole.storages if one.layer == layer} == {"", f"{layer}.w"}
    assert [
        whole.bytes(kind, layer="layers.1") for kind in ("activation", "weight copy", "weight")
    ] == [130, 20, 10]
    assert whole.num_tokens == 7
    assert whole.bytes() == 1 + 160 + 3 * 60 + 5
