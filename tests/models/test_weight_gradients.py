"""Weight gradients that are put off have the bits of those made at once, for whole models; and what
waits keeps no more than it says."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.live_bytes import PeakBytes
from lather.kernels.linear_cross_entropy import linear_cross_entropy
from lather.models import grouped_products
from lather.models.block import Block
from lather.models.decoder import Decoder
from lather.models.experts import Experts
from lather.models.gated_mlp import GatedMLP
from lather.models.layers import Linear, project
from lather.models.moe import LOCAL_EXCHANGE
from lather.models.routing import Router
from lather.models.saving.rounded_weights import product_weights
from lather.models.saving.weight_gradients import (
    Accumulable,
    DeferredGradient,
    WeightGradients,
    defer_weight_gradients,
    weight_gradient,
)
from lather.models.token_positions import SequenceLayout
from models.tiny import deferring, random_normal, random_tokens, tiny_family_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {"first_k_dense_replace": 1}),
    "deepseek_v2 with q-LoRA, tied": (
        "deepseek_v2",
        {"q_lora_rank": 9, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
}
PRECISIONS = ("fp32", "fp64", "bf16 autocast")


def make(model: str, precision: str = "fp32") -> Decoder:
    family, changes = MODELS[model]
    made = tiny_family_model(family, **changes)
    for router in made.routers():
        router.takes_z_loss = True
    return made.double() if precision == "fp64" else made


def autocast(precision: str = "bf16 autocast") -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16 autocast")


def backward(model: Decoder, seed: int, precision: str = "fp32") -> None:
    tokens = random_tokens(2, 7, seed=seed)
    with autocast(precision):
        output = model(tokens, tokens.roll(1, 1), normalizer=14.0)
    assert output.loss is not None
    (output.loss + 0.1 * output.balance_loss() + 0.01 * output.z_loss()).backward()


def assert_same_gradients(actual: nn.Module, expected: nn.Module) -> None:
    theirs = dict(expected.named_parameters())
    for name, p in actual.named_parameters():
        other = theirs[name].grad
        assert (p.grad is None) == (other is None), name
        assert p.grad is None or (p.grad.dtype == other.dtype and torch.equal(p.grad, other)), name


# --- whole models ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "memory"),
    [*((each, "saved") for each in PRECISIONS), ("bf16 autocast", "recompute")],
)
@pytest.mark.parametrize("model", MODELS)
def test_micro_batches_with_gradients_put_off_have_the_same_bits(
    model: str, precision: str, memory: str
) -> None:
    """The order is backward, backward, weights of the first, backward, weights of the second and
    third."""
    expected, actual = make(model, precision), make(model, precision)
    for each in (expected, actual):
        each.set_memory(memory)
    for seed in range(3):
        backward(expected, seed, precision)
    queue = deferring(actual)
    backward(actual, 0, precision)
    assert not any(p.grad is not None for name, p in actual.named_parameters() if "proj" in name)
    first = queue.take()
    backward(actual, 1, precision)
    second = queue.take()
    WeightGradients.run(first)
    backward(actual, 2, precision)
    with autocast(precision):
        WeightGradients.run(second + queue.take())
    assert len(queue.entries) == 0
    assert all(p.grad is not None and p.grad.any() for p in actual.parameters())
    assert_same_gradients(actual, expected)


@pytest.mark.parametrize("model", MODELS)
def test_every_weight_in_a_product_but_the_heads_is_queued(model: str) -> None:
    """Without a loss the head is queued, too."""
    made = make(model)
    queue = deferring(made)
    backward(made, 0)
    queued = {id(entry.weight) for entry in queue.take()}
    at_once = {name for name, p in made.named_parameters() if id(p) not in queued}
    ends = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "sinks")
    assert all(name.endswith(ends) for name in at_once)
    assert len(queued) + len(at_once) == len(list(made.parameters()))
    made(random_tokens(2, 7)).logits_BSV.sum().backward()
    assert id(made.lm_head.weight) in {id(entry.weight) for entry in queue.take()}


@pytest.mark.parametrize("model", MODELS)
def test_frozen_weights_are_not_queued(model: str) -> None:
    expected, actual = make(model), make(model)
    queue = deferring(actual)
    for each in (expected, actual):
        for index, p in enumerate(each.parameters()):
            p.requires_grad_(index % 2 == 0)
        backward(each, 0)
    entries = queue.take()
    assert all(entry.weight.requires_grad for entry in entries)
    WeightGradients.run(entries)
    assert_same_gradients(actual, expected)


@pytest.mark.parametrize("deferred", [None, False], ids=["no queue", "not deferring"])
def test_a_queue_that_does_not_defer_changes_nothing(deferred: bool | None) -> None:
    expected, actual = make("gpt_oss"), make("gpt_oss")
    queue = deferring(actual)
    queue.deferring = False
    if deferred is None:
        defer_weight_gradients(actual, None)
        queue.deferring = True
    for each in (expected, actual):
        for seed in range(3):
            backward(each, seed)
    assert len(queue.entries) == 0
    assert_same_gradients(actual, expected)


def test_reference_memory_stays_plain_autograd() -> None:
    model = make("deepseek_v2")
    model.set_memory("reference")
    queue = deferring(model)
    logits = model(random_tokens(2, 7)).logits_BSV
    assert "Linear" not in type(logits.grad_fn).__name__
    backward(model, 0)
    routers = {id(p) for router in model.routers() for p in router.parameters()}
    assert {id(entry.weight) for entry in queue.take()} == routers


# --- activation checkpointing ---------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor hooks", "reentrant"])
@pytest.mark.parametrize("model", MODELS)
def test_checkpointed_blocks_have_the_same_bits(model: str, reentrant: bool) -> None:
    expected, actual = make(model), make(model)
    queue = deferring(actual)
    tokens = random_tokens(2, 7)
    layout = SequenceLayout(2, 7, tokens.device)
    for each in (expected, actual):
        x = each.embed_tokens(tokens)
        for block in each.layers:
            run = partial(without_routing, block)
            if each is actual:
                run = partial(checkpoint, run, use_reentrant=reentrant)
            x = run(x, layout)
        linear_cross_entropy(each.norm(x), each.lm_head.weight, tokens).backward()
    WeightGradients.run(queue.take())
    assert_same_gradients(actual, expected)


def without_routing(block: Block, x: Tensor, layout: SequenceLayout) -> Tensor:
    y: Tensor = block(x, layout)[0]
    return y


def test_a_segment_made_again_in_backward_gives_the_same_bits() -> None:
    """Attention and router run without autograd first; what the later segments send back goes
    through a second run of them."""
    expected, actual = make("deepseek_v2").layers[1], make("deepseek_v2").layers[1]
    x, cotangent = (random_normal(2, 7, 24, seed=seed).float() for seed in (1, 2))
    layout, queue = SequenceLayout(2, 7, x.device), deferring(actual)
    plain = x.clone().requires_grad_()
    y, routing = expected(plain, layout)
    ((y * cotangent).sum() + routing.balance_loss + routing.z_loss).backward()

    with torch.no_grad():
        attended = actual.attend_and_route(x, layout)
    assert attended.routing is not None
    cuts = [attended.residual_BSD, attended.normed_TD, attended.routing.weights_TK]
    attended.residual_BSD, attended.normed_TD, attended.routing.weights_TK = (
        cut.detach().requires_grad_() for cut in cuts
    )
    cuts = [attended.residual_BSD, attended.normed_TD, attended.routing.weights_TK]
    dispatched = actual.dispatch(attended, LOCAL_EXCHANGE)
    combined = actual.combine(actual.run_experts(attended, dispatched), dispatched, LOCAL_EXCHANGE)
    actual.aggregate(attended, combined).backward(cotangent)
    again = x.clone().requires_grad_()
    with actual.mlp.gate.recompute(attended.routing):
        second = actual.attend_and_route(again, layout)
    outputs = [
        second.residual_BSD,
        second.normed_TD,
        second.routing.weights_TK,
        second.routing.balance_loss,
        second.routing.z_loss,
    ]
    torch.autograd.backward(outputs, [*(cut.grad for cut in cuts), torch.ones(()), torch.ones(())])
    WeightGradients.run(queue.take())
    assert torch.equal(again.grad, plain.grad)
    assert_same_gradients(actual, expected)


# --- parameters that are swapped ------------------------------------------------------------------


def test_the_parameter_of_the_forward_pass_gets_the_gradient_even_if_its_values_are_gone() -> None:
    """This happens under FSDP: outside its forward and backward the module has another parameter,
    and the whole one's memory is given back."""
    expected, actual = make("gpt_oss"), make("gpt_oss")
    backward(expected, 0)
    queue, stand_ins = deferring(actual), {}
    owners = [
        (module, name, p)
        for module in actual.modules()
        for name, p in module.named_parameters(recurse=False)
    ]
    for module, name, p in owners:
        stand_ins[id(p)] = nn.Parameter(p.detach().clone())
        setattr(module, name, stand_ins[id(p)])
    backward(actual, 0)
    for module, name, p in owners:
        setattr(module, name, p)
        stand_ins[id(p)].untyped_storage().resize_(0)
    WeightGradients.run(queue.take())
    for name, p in actual.named_parameters():
        assert p.grad is None
        assert torch.equal(stand_ins[id(p)].grad, expected.get_parameter(name).grad), name


# --- what waits keeps -----------------------------------------------------------------------------

T, D, F_, E, K = 13, 8, 6, 5, 2


def held_bytes(module: nn.Module, call: Callable[[], Tensor]) -> tuple[int, WeightGradients]:
    """Return the bytes that were made in forward and backward and are still alive, and the queue
    that keeps them."""
    queue = deferring(module)
    with PeakBytes() as peak:
        y = call()
        y.backward(torch.ones_like(y))
        del y
        held = peak.now
    assert held > 0
    return held, queue


def test_linear_layers_share_what_they_keep() -> None:
    layers = nn.ModuleList(Linear(D, width, bias=True) for width in (3, 5, 7))
    x = torch.randn(T, D)
    cotangents = [torch.randn(T, width, dtype=torch.bfloat16) for width in (3, 5, 7)]
    queue = deferring(layers)
    with PeakBytes() as peak:
        with autocast():
            outputs = project(x, *layers)
        torch.autograd.backward(outputs, cotangents)
        del outputs
        assert peak.now == 2 * T * D  # x in bf16, once
        WeightGradients.run(queue.take())
        assert peak.now == sum(4 * p.numel() for p in layers.parameters())


def test_a_gated_mlp_keeps_the_product_and_the_gradient_of_gate_up() -> None:
    mlp, x = GatedMLP(D, F_), torch.randn(T, D)
    held, queue = held_bytes(mlp, lambda: mlp(x))
    assert held == 4 * T * (3 * F_ + D)  # and the output's gradient, which was made there
    assert len(queue.take()) == 3


@pytest.mark.parametrize("memory", ["saved", "recompute"])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_keep_no_gathered_rows(bias: bool, memory: str) -> None:
    experts, x = Experts(E, D, F_, bias=bias), torch.randn(T, D)
    experts.memory = memory
    for p in experts.parameters():
        nn.init.normal_(p)
    experts_TK, weights_TK = torch.rand(T, E).topk(K).indices, torch.rand(T, K)
    held, queue = held_bytes(experts, lambda: experts(x, experts_TK, weights_TK))
    rows = T * K
    tokens, ends, row_weights = 8 * rows, 4 * E, 4 * (rows + 1) * bias
    assert held == 4 * rows * 3 * F_ + 4 * T * D + tokens + ends + row_weights
    assert len(queue.take()) == (4 if bias else 2)


def test_a_router_keeps_the_gradient_of_its_logits() -> None:
    router, x = Router(D, E, K, bias=True), torch.randn(T, D)
    held, queue = held_bytes(router, lambda: router(x).weights_TK)
    assert held == 4 * T * E
    assert len(queue.take()) == 2


class Witness(torch.autograd.Function):
    """An object that lives as long as the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, thing: object) -> Tensor:
        ctx.thing = thing
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Thing:
    pass


@pytest.mark.parametrize("kind", ["Linear", "GatedMLP", "Experts", "Router"])
def test_what_waits_does_not_keep_the_graph_before_it(kind: str) -> None:
    modules = {
        "Linear": Linear(D, D),
        "GatedMLP": GatedMLP(D, F_),
        "Experts": Experts(E, D, F_),
        "Router": Router(D, E, K),
    }
    module = modules[kind]
    queue, thing = deferring(module), Thing()
    witness = weakref.ref(thing)
    x = Witness.apply(torch.randn(T, D, requires_grad=True), thing)
    del thing
    if kind == "Experts":
        y = module(x, torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1))
    else:
        y = module(x).weights_TK if kind == "Router" else module(x)
    y.sum().backward()
    del x, y
    assert len(queue.entries) > 0
    assert witness() is None


def test_each_entry_lets_go_when_it_is_done() -> None:
    mlp, x = GatedMLP(D, F_), torch.randn(T, D)
    _, queue = held_bytes(mlp, lambda: mlp(x))
    entries = queue.take()
    product = weakref.ref(entries[2].compute.args[1])  # only the last one needs h
    WeightGradients.run(entries[:2])
    assert product() is not None
    WeightGradients.run(entries[2:])
    assert product() is None
    with pytest.raises(RuntimeError, match="run before"):
        WeightGradients.run(entries)


# --- the queue ------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferring", [True, False])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", [torch.float32, torch.bfloat16])
def test_further_gradients_are_added_in_the_weights_dtype_without_a_copy(
    weight: torch.dtype, product: torch.dtype, deferring: bool
) -> None:
    """The bits are those of a copy in the weight's dtype; where that is the wider one, none is
    made, whether the gradient is computed later or, as in a single process, at once."""
    first, second = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1)).to(product)
    expected = first.to(weight) + second.to(weight)
    p = torch.nn.Parameter(torch.zeros(64, 32, dtype=weight))
    queue = WeightGradients()
    DeferredGradient(p, lambda: first).run()
    queue.deferring = deferring
    with PeakBytes() as peak:
        assert weight_gradient(queue, p, lambda: second) is None
        WeightGradients.run(queue.take())
    assert p.grad is not None
    assert p.grad.equal(expected)
    if torch.promote_types(weight, product) == weight:
        assert peak.bytes == 0


def adding(first: Tensor) -> Accumulable:
    """Make a function that adds to the sum, if it is given one, and then returns it."""

    def compute(gradient: Tensor, total: Tensor | None = None) -> Tensor:
        return gradient if total is None else total.add_(gradient)

    return Accumulable(compute, first)


@pytest.mark.parametrize("deferring", [True, False])
def test_a_product_that_adds_to_the_sum_itself_is_not_added_again(deferring: bool) -> None:
    """The sum is in the memory of the first gradient."""
    p, queue = nn.Parameter(torch.zeros(3, 2)), WeightGradients()
    queue.deferring = True
    assert weight_gradient(queue, p, adding(torch.ones(3, 2))) is None
    WeightGradients.run(queue.take())
    total, queue.deferring = p.grad, deferring
    for _ in range(2):
        assert weight_gradient(queue, p, adding(torch.ones(3, 2))) is None
    WeightGradients.run(queue.take())
    assert p.grad is total
    assert total.equal(torch.full((3, 2), 3.0))


def test_only_a_contiguous_fp32_sum_is_given_to_a_product() -> None:
    for total in (torch.ones(2, 3).T, torch.ones(3, 2, dtype=torch.bfloat16)):
        p = nn.Parameter(torch.zeros(3, 2, dtype=total.dtype))
        p.grad = total

        def compute(total: Tensor | None = None) -> Tensor:
            assert total is None
            return torch.ones(3, 2)

        DeferredGradient(p, Accumulable(compute)).run()
        assert p.grad.equal(torch.full_like(total, 2.0))


@pytest.mark.parametrize("memory", ["saved", "recompute"])
def test_on_a_gpu_gradients_of_experts_add_up_in_fp32_in_place(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are put off have the bits of those that are not, and differ from the gradients
    of a CPU, whose products are rounded to bf16, by this rounding alone."""
    monkeypatch.setattr(grouped_products, "use_triton", lambda *tensors: True)

    def gradients(defer: bool | None) -> list[Tensor]:
        experts, generator = Experts(E, D, F_, bias=True), torch.Generator().manual_seed(0)
        experts.memory, queue = memory, None if defer is None else deferring(experts)
        for p in experts.parameters():
            nn.init.normal_(p, generator=generator)
        for _ in range(3):
            if queue is not None:
                queue.deferring = bool(defer)
            x, weights_TK = torch.randn(T, D, generator=generator), torch.rand(T, K)
            chosen_TK = torch.rand(T, E, generator=generator).topk(K).indices
            with autocast():
                y = experts(x.requires_grad_(), chosen_TK, weights_TK.fill_(0.5))
            before = [p.grad for p in experts.parameters()]
            y.backward(torch.randn(T, D, generator=generator))
            if queue is not None:
                WeightGradients.run(queue.take())
            if queue is not None and before[0] is not None:
                assert all(p.grad is b for p, b in zip(experts.parameters(), before, strict=True))
        return [p.grad for p in experts.parameters()]

    put_off, at_once, by_autograd = map(gradients, (True, False, None))
    for a, b, c in zip(put_off, at_once, by_autograd, strict=True):
        assert a.dtype == torch.float32
        assert a.equal(b)
        assert (a - c).norm() < 1e-6 * a.norm()  # autograd adds after the product
    monkeypatch.undo()
    rounded = gradients(defer=False)
    for number, (a, b) in enumerate(zip(put_off, rounded, strict=True)):
        difference = float((a - b).norm() / a.norm())
        assert (1e-4 if number < 2 else 0) <= difference < 4e-3


def test_a_weight_that_is_no_leaf_gets_its_gradient_at_once() -> None:
    layer, source = Linear(D, 3, bias=False), torch.randn(6, D, requires_grad=True)
    del layer.weight
    layer.weight = source[:3]
    queue = deferring(layer)
    layer(torch.ones(2, D)).sum().backward()
    assert len(queue.entries) == 0
    assert torch.equal(source.grad, torch.tensor([2.0] * 3 + [0.0] * 3)[:, None].expand(6, D))


# --- weights that are rounded before products -----------------------------------------------------


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_bf16_weights_have_the_gradients_of_fp32_weights_that_products_round(
    model: str, defer: bool
) -> None:
    """To the bit, over two micro-batches; sums in bf16 would differ by up to 2^-9."""
    expected, actual = make(model), make(model)
    narrow = product_weights([actual])
    assert (actual.lm_head.weight in narrow) == ("tied" not in model)
    for p in narrow:
        p.data = p.data.bfloat16()
        p.grad_dtype = torch.float32
    queue = deferring(actual)
    queue.deferring = defer
    for seed in range(2):
        for each in (expected, actual):
            backward(each, seed, "bf16 autocast")
        WeightGradients.run(queue.take())
    assert_same_gradients(actual, expected)
    assert {p.grad.dtype for p in actual.parameters()} == {torch.float32}
    assert sum(p.numel() for p in narrow) > 0.5 * sum(p.numel() for p in actual.parameters())
