"""The tensors that a forward pass keeps, counted by hand: bytes, kinds and names on modules whose
saved tensors are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lather.memory.profile import SavedTensors, profile_saved_tensors
from memory.modules import F32, Act, Plan, leaf, only, profile_of, square

# --- bytes and kinds ------------------------------------------------------------------------------


def test_linear_keeps_its_input_once_and_its_weight_as_weight() -> None:
    model = nn.Sequential(nn.Linear(5, 3, bias=False))
    profile = profile_of(model, leaf(7, 5))
    assert {(one.kind, one.bytes, one.shape, one.weight) for one in profile.storages} == {
        ("activation", 7 * 5 * F32, (7, 5), ""),
        ("weight", 5 * 3 * F32, (5, 3), "0.weight"),  # transposed, as it is saved
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
    assert (one.bytes, one.layer, one.num_saves, one.also_saved_in) == (
        7 * 5 * F32,
        "left",
        2,
        ("right other",),
    )
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
    """Each product is freed before the next is made, so that both may lie at one address; the
    tensors that they save are not freed."""

    def many(x: Tensor) -> Tensor:
        for _ in range(5):
            (x * 2).cos()  # this graph saves, and is dropped at once
            x = x.exp()  # exp saves its result
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
    """As far as autograd can see, every activation of a language model comes from an embedding
    alone."""
    model = nn.Sequential(nn.Embedding(11, 5), Act(square))
    profile = profile_saved_tensors(model, lambda: model(torch.arange(7)).sum())
    assert [(one.kind, one.bytes) for one in profile.storages] == [
        ("activation", 7 * 8),
        ("activation", 7 * 5 * F32),
    ]


# --- custom functions, checkpoints, cut graphs ----------------------------------------------------


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
    """The module is the first of two, too, although nodes are made between the modules."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            plans = {first: Plan(torch.arange(4), {})}
            self.parts = nn.ModuleList(
                Act(lambda x, name=name: Twice.apply(x.exp(), plans.get(name)))
                for name in ("0", "1")
            )

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

    (one,) = (
        one
        for one in profile_of(nn.Sequential(Outer()), leaf(7, 5)).storages
        if one.dtype == "int64"
    )
    assert one.module == "0"


def test_a_checkpointed_region_keeps_its_input_alone() -> None:
    calls = []

    def region(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp().sin().cos()

    model = Act(lambda x: torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False))
    # torch 2.11 also keeps an empty tensor
    (one,) = (one for one in profile_of(model, leaf(7, 5)).storages if one.bytes)
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
    profile = profile_saved_tensors(
        model, lambda: {"losses": [model(leaf(7, 5)), Plan(model(leaf(3, 5)), {})], "step": 3}
    )
    assert [one.saved_by for one in profile.storages] == [
        "MulBackward0.other",
        "MulBackward0.other",
    ]
    assert profile.bytes() == (7 + 3) * 5 * F32


def test_no_tensors_at_all() -> None:
    profile = profile_saved_tensors(nn.Identity(), lambda: None)
    assert profile == SavedTensors((), 0)
    assert profile.bytes() == profile.per_token(0) == 0
    assert profile.layers() == profile.segments() == ()


def test_size_zero() -> None:
    assert profile_of(nn.Linear(5, 3), leaf(0, 5)).bytes("activation") == 0
