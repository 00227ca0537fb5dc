"""What a forward pass keeps, counted by hand: bytes, kinds, places and names on modules whose saved tensors are known."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lather.memory.profile import BLOCK_SEGMENTS, OUTSIDE, SavedStorage, SavedTensors, expand, layer_of, profile_saved_tensors, tensors_in

F32 = 4


class Act(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x)
        return y


def square(x: Tensor) -> Tensor:
    return x * x


def leaf(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def profile_of(model: nn.Module, *inputs: Tensor) -> SavedTensors:
    return profile_saved_tensors(model, lambda: model(*inputs).sum(), num_tokens=7)


def only(profile: SavedTensors, kind: str = "activation") -> SavedStorage:
    (one,) = (one for one in profile.storages if one.kind == kind)
    return one


# --- bytes and kinds ----------------------------------------------------------------------------------------------------------------


def test_linear_keeps_its_input_once_and_its_weight_as_weight() -> None:
    model = nn.Sequential(nn.Linear(5, 3, bias=False))
    profile = profile_of(model, leaf(7, 5))
    assert {(one.kind, one.bytes, one.shape, one.weight) for one in profile.storages} == {
        ("activation", 7 * 5 * F32, (7, 5), ""),
        ("weight", 5 * 3 * F32, (5, 3), "0.weight"),  # as saved: transposed
    }
    assert only(profile).dtype == "float32"
    assert profile.bytes() == 7 * 5 * F32 + 5 * 3 * F32
    assert profile.per_token(profile.bytes("activation")) == 5 * F32


def test_without_gradient_for_the_input_the_weight_is_not_kept() -> None:
    assert profile_of(nn.Linear(5, 3, bias=False), torch.ones(7, 5)).bytes("weight") == 0


def test_nothing_is_kept_without_gradients() -> None:
    model = nn.Linear(5, 3)
    with torch.no_grad():
        assert profile_of(model, leaf(7, 5)).storages == ()


def test_a_tensor_saved_twice_by_one_operation_counts_once() -> None:
    one = only(profile_of(Act(square), leaf(7, 5)))
    assert (one.bytes, one.num_saves) == (7 * 5 * F32, 2)


def test_two_layers_that_share_an_input_keep_it_once_at_the_first() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(5, 3, bias=False), nn.Linear(5, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x).sum() + self.right(x).sum()

    profile = profile_of(Fork(), leaf(7, 5))
    one = only(profile)
    assert (one.bytes, one.layer, one.num_saves, one.also_saved_in) == (7 * 5 * F32, "left", 2, ("right other",))
    assert profile.bytes("activation", layer="right") == 0
    assert profile.bytes("weight", layer="right") == 5 * 2 * F32
    assert profile.layers() == ("left", "right")


def test_an_expanded_view_counts_the_storage_it_has() -> None:
    one = only(profile_of(Act(lambda x: square(x.expand(6, 7, 5))), leaf(7, 5)))
    assert (one.shape, one.bytes) == ((6, 7, 5), 7 * 5 * F32)


def test_a_slice_keeps_the_whole_of_a_bigger_storage() -> None:
    big = torch.ones(100, 5)
    one = only(profile_of(Act(lambda x: x * big[3:10]), leaf(7, 5)))
    assert (one.shape, one.bytes) == ((7, 5), 100 * 5 * F32)


def test_two_slices_of_a_storage_count_it_once() -> None:
    big = torch.ones(100, 5)
    one = only(profile_of(Act(lambda x: x * big[3:10] + x * big[50:57]), leaf(7, 5)))
    assert (one.num_saves, one.bytes) == (2, 100 * 5 * F32)


def test_different_storages_at_one_address_are_told_apart() -> None:
    """Each product is freed before the next is made, so that they may get the same memory; what is kept of them is not freed."""

    def many(x: Tensor) -> Tensor:
        for _ in range(5):
            (x * 2).cos()  # saved by a graph that is dropped at once
            x = x.exp()  # keeps its result
        return x

    profile = profile_of(Act(many), leaf(7, 5))
    assert [one.bytes for one in profile.storages] == [7 * 5 * F32] * 5
    assert {one.saved_by for one in profile.storages} == {"ExpBackward0.result"}


def test_what_is_changed_in_place_is_one_storage() -> None:
    def in_place(x: Tensor) -> Tensor:
        return (x + 1).relu_().add(1).exp_()

    profile = profile_of(Act(in_place), leaf(7, 5))
    assert [(one.saved_by, one.bytes) for one in profile.storages] == [
        ("ReluBackward0.result", 7 * 5 * F32),
        ("ExpBackward0.result", 7 * 5 * F32),
    ]


def test_a_storage_that_was_freed_by_resizing_counts_nothing() -> None:
    def freed(x: Tensor) -> Tensor:
        kept = x.exp()
        y = kept + 1
        kept.untyped_storage().resize_(0)
        return y

    assert only(profile_of(Act(freed), leaf(7, 5))).bytes == 0


@pytest.mark.parametrize("view", ["transposed", "slice", "buffer"])
def test_views_of_parameters_and_buffers_are_weights(view: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(9, 5))
            self.register_buffer("table", torch.ones(5, 9))

        def forward(self, x: Tensor) -> Tensor:
            other = {"transposed": self.w.t(), "slice": self.w[2:7], "buffer": self.table}[view]
            return x @ other

    one = only(profile_of(Product(), leaf(7, 5)), "weight")
    assert (one.bytes, one.weight) == (9 * 5 * F32, "table" if view == "buffer" else "w")


def test_a_tied_weight_counts_once() -> None:
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    model[1].weight = model[0].weight
    profile = profile_of(model, leaf(7, 5))
    one = only(profile, "weight")
    assert (one.bytes, one.num_saves, one.also_saved_in) == (5 * 5 * F32, 2, ("1 other",))
    assert profile.bytes("activation") == 2 * 7 * 5 * F32


def test_autocast_copies_of_weights_are_told_from_weights_and_activations() -> None:
    model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 3, bias=False))

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = model(leaf(7, 5))
        return y

    profile = profile_saved_tensors(model, run)
    assert profile.bytes("weight") == 0
    assert {one.weight: one.bytes for one in profile.storages if one.kind == "weight copy"} == {
        "0.weight": 5 * 3 * 2,
        "1.weight": 3 * 3 * 2,
    }
    assert profile.bytes("activation") == 7 * 5 * 2 + 7 * 3 * 2


def test_what_is_computed_from_a_weight_with_data_is_an_activation() -> None:
    """Every activation of a language model comes from an embedding alone, as far as autograd can see."""
    model = nn.Sequential(nn.Embedding(11, 5), Act(square))
    profile = profile_saved_tensors(model, lambda: model(torch.arange(7)).sum())
    assert [(one.kind, one.bytes) for one in profile.storages] == [("activation", 7 * 8), ("activation", 7 * 5 * F32)]


# --- custom functions, checkpoints, cut graphs --------------------------------------------------------------------------------------


@dataclass
class Plan:
    index: Tensor
    nested: dict[str, list[Tensor]]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.plan = plan
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return 2 * grad, None


def test_a_custom_function_keeps_what_it_saves_and_its_attributes() -> None:
    shared = torch.ones(3)
    plan = Plan(torch.arange(4), {"a": [torch.ones(2), shared], "b": [shared]})
    model = nn.Sequential(nn.Identity(), Act(lambda x: Twice.apply(x, plan)))
    profile = profile_of(model, leaf(7, 5))
    assert [(one.saved_by, one.bytes) for one in profile.storages] == [
        ("TwiceBackward", 7 * 5 * F32),
        ("TwiceBackward.plan", 4 * 8),
        ("TwiceBackward.plan", 2 * F32),
        ("TwiceBackward.plan", 3 * F32),
    ]
    assert {one.module for one in profile.storages} == {"1"}


@pytest.mark.parametrize("first", ["0", "1"])
def test_attributes_are_filed_under_the_module_that_was_running(first: str) -> None:
    """Under the first of two, too, and although nodes are made between the modules."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            plans = {first: Plan(torch.arange(4), {})}
            self.parts = nn.ModuleList(Act(lambda x, name=name: Twice.apply(x.exp(), plans.get(name))) for name in ("0", "1"))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x + 1) + 1
            return x

    (one,) = (one for one in profile_of(Chain(), leaf(7, 5)).storages if one.dtype == "int64")
    assert (one.layer, one.module) == (f"parts.{first}", f"parts.{first}")


def test_attributes_are_filed_under_the_module_that_calls_not_the_one_that_reads() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Act(torch.exp)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(Twice.apply(x, Plan(torch.arange(4), {})))

    (one,) = (one for one in profile_of(nn.Sequential(Outer()), leaf(7, 5)).storages if one.dtype == "int64")
    assert one.module == "0"


def test_a_checkpointed_region_keeps_its_input_alone() -> None:
    calls = []

    def region(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp().sin().cos()

    model = Act(lambda x: torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False))
    one = only(profile_of(model, leaf(7, 5)))
    assert (one.bytes, one.saved_by) == (7 * 5 * F32, "")
    assert len(calls) == 1, "the profile ran the region again"


def test_a_cut_graph_counts_as_long_as_something_holds_it() -> None:
    held: list[Tensor] = []

    def cut(x: Tensor) -> Tensor:
        held.append(x.exp())
        return held[-1].detach().requires_grad_() + 1

    model = nn.Sequential(Act(cut))
    one = only(profile_of(model, leaf(7, 5)))
    assert (one.bytes, one.layer, one.saved_by) == (7 * 5 * F32, "0", "")


def test_what_went_backward_during_the_run_is_not_kept() -> None:
    model = nn.Linear(5, 3, bias=False)

    def run() -> Tensor:
        model(leaf(7, 5)).sum().backward()
        y: Tensor = model(torch.ones(2, 5))
        return y

    profile = profile_saved_tensors(model, run)
    assert [(one.kind, one.bytes) for one in profile.storages] == [("activation", 2 * 5 * F32)]


def test_outputs_may_be_nested() -> None:
    model = Act(square)
    profile = profile_saved_tensors(model, lambda: {"losses": [model(leaf(7, 5)), Plan(model(leaf(3, 5)), {})], "step": 3})
    assert [one.saved_by for one in profile.storages] == ["MulBackward0.other", "MulBackward0.other"]
    assert profile.bytes() == (7 + 3) * 5 * F32


def test_no_tensors_at_all() -> None:
    profile = profile_saved_tensors(nn.Identity(), lambda: None)
    assert profile == SavedTensors((), 0)
    assert profile.bytes() == profile.per_token(0) == 0
    assert profile.layers() == profile.segments() == ()


def test_size_zero() -> None:
    assert profile_of(nn.Linear(5, 3), leaf(0, 5)).bytes("activation") == 0


# --- places -------------------------------------------------------------------------------------------------------------------------


class TinyBlock(nn.Module):
    """Five segments, each of which keeps a tensor of its own size; and one that its forward keeps between them."""

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
    sizes = {(layer, segment): profile.bytes(layer=layer, segment=segment) for layer in profile.layers() for segment in profile.segments()}
    block = {"attend_and_route": ROW, "dispatch": 2 * ROW, "run_experts": 4 * ROW + F32, "other": 16 * ROW, "aggregate": 32 * ROW}
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
    modules = {one.segment: one.module for one in profile.storages if one.layer == "layers.1" and one.dtype == "float32" and one.shape}
    assert modules == {name: "layers.1.mlp" if name == "run_experts" else "layers.1" for name in block}


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
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("fails", ["", "attend_and_route", "run_experts", "mlp", "after"])
def test_the_model_is_as_before_also_after_an_error(fails: str) -> None:
    model = TinyDecoder()
    block = model.layers[1]

    def error(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    if fails == "mlp":
        block.mlp.function = error
    elif fails in BLOCK_SEGMENTS:
        setattr(block, fails, error)  # in the instance: must be there again afterwards
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
    first, second = (profile_saved_tensors(model, lambda: model(torch.arange(2)).sum()) for _ in range(2))
    assert first == second


def test_the_pass_gives_the_same_numbers_and_gradients_as_without_hooks() -> None:
    def pass_(profiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 3), Act(torch.exp), Act(square), nn.Linear(3, 5))
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
    gc.disable()  # by counting alone: a cycle through autograd would not be found later either
    try:
        profile = profile_of(model, leaf(7, 5))
        assert profile.bytes() == 7 * 5 * F32
        assert seen[0]() is None
    finally:
        gc.enable()


# --- parts --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "layer"),
    [("layers.3.mlp.experts.0", "layers.3"), ("norm", "norm"), ("model.norm", "model"), ("0", "0"), ("", OUTSIDE)],
)
def test_layer_of(path: str, layer: str) -> None:
    assert layer_of(path) == layer


def test_tensors_in_finds_all_and_takes_classes_for_what_they_are() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [t.numel() for t in tensors_in([a, {"x": (b, Plan(c, {"y": [a]}))}, Plan, "text", None, 3])] == [1, 2, 3, 1]
    assert list(tensors_in({"x": 1})) == []


def test_layers_are_in_order_of_their_numbers() -> None:
    names = ["embed", "layers.0", "layers.10", "layers.9", "norm", "layers.2"]
    storages = tuple(SavedStorage(name, "other", name, "", (1,), "float32", 4, "activation", "", 1, ()) for name in names)
    assert SavedTensors(storages, 1).layers() == ("embed", "layers.0", "layers.2", "layers.9", "layers.10", "norm")


def test_expand_copies_the_second_of_a_kind_and_takes_weights_from_the_first() -> None:
    def storage(layer: str, kind: Any, size: int, also: tuple[str, ...] = ()) -> SavedStorage:
        weight = "" if kind == "activation" else f"{layer}.w"
        return SavedStorage(layer, "other", f"{layer}.mlp", "", (size,), "uint8", size, kind, weight, 1, also)

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
    whole = expand(measured, {"layers.1": ("layers.10", ["layers.11", "layers.12"])})
    assert whole.layers() == ("layers.0", "layers.1", "layers.10", "layers.11", "layers.12", "norm")
    for layer in ("layers.10", "layers.11", "layers.12"):
        assert [whole.bytes(kind, layer=layer) for kind in ("activation", "weight copy", "weight")] == [30, 20, 10]
        (one,) = (one for one in whole.storages if one.layer == layer and one.kind == "activation")
        assert (one.module, one.also_saved_in) == (f"{layer}.mlp", (f"{layer} combine", "layers.1 other"))
        assert {one.weight for one in whole.storages if one.layer == layer} == {"", f"{layer}.w"}
    assert [whole.bytes(kind, layer="layers.1") for kind in ("activation", "weight copy", "weight")] == [130, 20, 10]
    assert whole.num_tokens == 7
    assert whole.bytes() == 1 + 160 + 3 * 60 + 5
