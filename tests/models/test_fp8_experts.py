"""Experts in FP8 against the formula in plain torch; what they keep for backward, how weights are
converted, and how far gradients and routing are from those in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.data.batches import Batch
from lather.kernels import block_scaled, swiglu
from lather.kernels.block_scaled import BLOCK, BlockScaled, scaled_rows, scaled_weights
from lather.kernels.swiglu import CLAMPED_SWIGLU, SWIGLU, Gate
from lather.models import experts as experts_module
from lather.models.experts import Experts, plain_gate
from lather.models.saving.rounded_weights import RoundedWeights, set_rounded_weights
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from models.test_rounded import engine_of, step
from models.tiny import random_tokens

E, T, D, F_ = 4, 24, 200, 72
"""Experts, tokens, and widths that are no multiples of a block."""


def dense(scaled: BlockScaled) -> Tensor:
    scales = scaled.scales
    for dim in range(1, scales.dim()):
        size = scaled.values.shape[dim]
        scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return scaled.values.float() * scales


class PlainGateUp(torch.autograd.Function):
    """The product of rows with a weight, both rounded to e4m3; the gradient of the weight reads the
    rows as the product did."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, (ctx.weight,) = dense(scaled_rows(x)), dense(scaled_weights(weight[None]))
        return (ctx.x @ ctx.weight.T).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return (dense(scaled_rows(grad)) @ ctx.weight).bfloat16(), grad.float().T @ ctx.x


class PlainDown(torch.autograd.Function):
    """The same for down and each row's weight of the router, which is multiplied after the product;
    the gradient of the weight reads the rows in bf16."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.h, ctx.factor = h.float(), factor
        (ctx.weight,) = dense(scaled_weights(weight[None]))
        return (dense(scaled_rows(h)) @ ctx.weight.T).bfloat16().float() * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        grad = grad.bfloat16()
        grad_h = (dense(scaled_rows(grad)) @ ctx.weight).bfloat16().float()
        of_factor = (grad_h * ctx.h).sum(1, keepdim=True)
        return grad_h * ctx.factor, grad.float().T @ (ctx.h * ctx.factor), of_factor


class Case:
    def __init__(self, *, gate: Gate = SWIGLU, bias: bool = False, empty: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.module = Experts(E, D, F_, gate=gate, bias=bias)
        for p in self.module.parameters():
            nn.init.normal_(p, std=0.1, generator=generator)
        tokens = 0 if empty else T
        # expert 2 has no rows, and -1 is elsewhere
        self.experts_TK = torch.tensor([[0, 1], [3, -1], [-1, 0]]).repeat(T // 3, 1)[:tokens]
        self.x_TD = torch.randn(tokens, D, generator=generator).requires_grad_()
        self.weights_TK = torch.rand(tokens, 2, generator=generator).requires_grad_()
        self.cotangent = torch.randn(tokens, D, generator=generator)

    def inputs(self) -> dict[str, Tensor]:
        named = dict(self.module.named_parameters())
        return {"x": self.x_TD, "weights": self.weights_TK, **named}

    def results(self, y_TD: Tensor) -> dict[str, Tensor]:
        inputs = self.inputs()
        grads = torch.autograd.grad(
            (y_TD * self.cotangent).sum(), list(inputs.values()), materialize_grads=True
        )
        return {"y": y_TD.detach(), **dict(zip(inputs, grads, strict=True))}

    def run(self, *, in_fp8: bool = True, received: bool = False, memory: str = "saved") -> Tensor:
        """With `received` x is given in FP8, and the input has no number."""
        self.module.memory, self.module.in_fp8 = memory, in_fp8
        x_TD, rows = self.x_TD, None
        if received:
            x_TD, rows = x_TD + torch.nan, self.module.rounded_input(x_TD.detach())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y_TD: Tensor = self.module(x_TD, self.experts_TK, self.weights_TK, received=rows)
        return y_TD

    def expected(self) -> dict[str, Tensor]:
        """The formula expert by expert."""
        module, y_TD = self.module, torch.zeros_like(self.x_TD)
        for expert in range(E):
            token, slot = (self.experts_TK == expert).nonzero(as_tuple=True)
            x = self.x_TD[token].bfloat16()
            gate_up = PlainGateUp.apply(x, module.gate_up_proj[expert])
            if module.gate_up_bias is not None:
                gate_up = gate_up + module.gate_up_bias[expert].bfloat16()
            h = plain_gate(gate_up.float(), module.gate).bfloat16()
            weight = self.weights_TK[token, slot, None]
            out = PlainDown.apply(h, module.down_proj[expert], weight)
            if module.down_bias is not None:
                out = out + module.down_bias[expert].bfloat16().float() * weight
            y_TD = y_TD.index_add(0, token, out)
        return self.results(y_TD)


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The error of each tensor in its norm, relative."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - x).norm() / x.norm()) if x.any() else float(found[name].norm())
        for name, x in expected.items()
    }


GATES = [(SWIGLU, False), (CLAMPED_SWIGLU, True)]


@pytest.mark.parametrize("memory", ["saved", "recompute"])
@pytest.mark.parametrize(("gate", "bias"), GATES, ids=str)
def test_output_and_every_gradient_are_those_of_the_formula(
    gate: Gate, bias: bool, memory: str
) -> None:
    """Within the rounding of bf16, which sometimes leads to the next number in e4m3; products in
    bf16 are farther away, so that the test sees which are in FP8."""
    case = Case(gate=gate, bias=bias)
    expected = case.expected()
    found = errors(case.results(case.run(memory=memory)), expected)
    plain = errors(case.results(case.run(in_fp8=False, memory=memory)), expected)
    assert found.pop("x") < 0.02
    assert plain["x"] > 0.03
    assert max(found.values()) < 0.006
    for name in ("y", "weights", "gate_up_proj", "down_proj"):
        assert plain[name] > 0.015, name


def test_only_rows_of_tokens_are_rounded_by_a_pass_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that they are the input, in backward once more, and the output's gradient; rows of
    experts are rounded where they are computed."""
    case, shapes = Case(), list[tuple[int, ...]]()

    def convert(x: Tensor) -> BlockScaled:
        shapes.append(tuple(x.shape))
        return scaled_rows(x)

    monkeypatch.setattr(experts_module, "scaled_rows", convert)
    case.results(case.run())
    assert shapes == 3 * [(T, D)]


def test_without_tokens_there_are_zeros() -> None:
    case = Case(empty=True)
    results = case.results(case.run())
    assert results["y"].shape == (0, D)
    assert not any(x.any() for x in results.values())


def test_experts_without_rows_get_zeros_and_padded_runs_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA, where runs are padded; fresh memory is NaN."""
    case = Case()
    plain = case.results(case.run())
    monkeypatch.setattr(experts_module, "run_alignment", lambda device, dtype: 8)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        padded = case.results(case.run())
    finally:
        torch.use_deterministic_algorithms(False)
    assert not padded["gate_up_proj"][2].any()
    assert max(errors(padded, plain).values()) < 1e-3


@pytest.mark.parametrize("memory", ["saved", "recompute"])
def test_received_rows_give_the_bits_of_rows_that_are_converted_here(memory: str) -> None:
    case = Case()
    here = case.results(case.run(memory=memory))
    received = case.results(case.run(received=True, memory=memory))
    assert all(received[name].equal(here[name]) for name in here)


def test_received_rows_are_saved_in_fp8_alone() -> None:
    case, saved = Case(), list[Tensor]()

    def save(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        case.run(received=True, memory="recompute")
    of_rows = [x for x in saved if x.is_floating_point() and len(x) == T]
    assert sum(x.nbytes for x in of_rows) == T * (D + 4 * 2) + case.weights_TK.nbytes


@pytest.mark.parametrize("received", [False, True])
def test_deferred_weight_gradients_hold_rows_in_fp8_and_have_the_same_bits(received: bool) -> None:
    case, queue = Case(), WeightGradients()
    expected = case.results(case.run(received=received))
    defer_weight_gradients(case.module, queue)
    queue.deferring = True
    (case.run(received=received) * case.cotangent).sum().backward()
    held = [
        argument
        for entry in queue.entries
        for argument in getattr(entry.compute, "args", ())
        if isinstance(argument, BlockScaled)
    ]
    assert len(held) == 1
    assert case.module.gate_up_proj.grad is None
    queue.run(queue.take())
    for name, p in case.module.named_parameters():
        assert p.grad is not None
        assert p.grad.equal(expected[name])


@pytest.mark.parametrize("keep", ["step", "product"])
def test_each_stack_is_converted_once_in_a_step_and_after_each_change(
    keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lather.models import scaled_products

    calls = list[tuple[int, ...]]()

    def convert(weight: Tensor) -> BlockScaled:
        calls.append(tuple(weight.shape))
        return scaled_weights(weight)

    monkeypatch.setattr(scaled_products, "scaled_weights", convert)
    case, cache = Case(), RoundedWeights()
    if keep == "step":
        set_rounded_weights(case.module, cache)
    for _ in range(2):
        with cache.caching():
            for _ in range(2):
                (case.run() * case.cotangent).sum().backward()
            copied = sum(x.nbytes for x in cache.copies())
            size = sum(p.numel() for p in case.module.parameters())
            assert copied == (size + 4 * E * (2 * 2 + 2 * 1) if keep == "step" else 0)
            with torch.no_grad():
                case.module.down_proj.mul_(2)
            case.run()
    assert len(calls) == (2 * (2 + 1) if keep == "step" else 2 * (2 * 4 + 2))
    assert not cache.copies()


def test_a_nan_in_a_token_reaches_its_output_and_no_other_token() -> None:
    case = Case()
    finite = case.run()
    with torch.no_grad():
        case.x_TD[4, 150] = torch.inf
    found = case.run()
    others = torch.arange(T) != 4
    assert found[4].isnan().all()
    assert found[others].equal(finite[others])


def test_gradients_are_near_those_in_bf16_with_block_scales_and_far_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token that is 100,000 times as large as the others takes all of the range of a common
    scale, so that the others' products are gone."""
    case = Case()
    case.experts_TK[case.experts_TK < 0] = 1
    with torch.no_grad():
        case.x_TD[3] *= 1e5
        case.cotangent[3] *= 1e-5
    exact = case.results(case.run(in_fp8=False))
    found = case.results(case.run())

    def with_one_scale(x: Tensor, values: Tensor, scales: Tensor) -> None:
        scale = x.float().abs().max() / 448
        values.copy_((x.float() / scale).clamp(-448, 448))
        scales.fill_(scale)

    for module in (block_scaled.reference, swiglu.reference):
        monkeypatch.setattr(module, "scale_rows", with_one_scale)
    control = case.results(case.run())

    def nearness(results: dict[str, Tensor]) -> list[float]:
        others = torch.arange(T) != 3
        pairs = [(results[name][others], exact[name][others]) for name in ("y", "x", "weights")]
        return [float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a, b in pairs]

    assert min(nearness(found)) > 0.995
    assert min(nearness(control)) < 0.9


def test_most_tokens_go_to_the_experts_to_which_bf16_sends_them() -> None:
    """The routers are in fp32 in both; 98 % of the choices are the same."""
    chosen: dict[bool, list[Tensor]] = {}
    for in_fp8 in (False, True):
        engine = engine_of("qwen3_moe", "step")
        for module in engine.part.modules():
            if isinstance(module, Experts):
                module.in_fp8 = in_fp8
        seen = chosen.setdefault(in_fp8, [])
        for router in engine.part.routers():
            router.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.experts_TK))
        engine.launch_gradients(Batch.of_tokens(random_tokens(4, 7, seed=3))).read()
    same = [
        bool((fp8_K == choice).any())
        for bf16_TK, fp8_TK in zip(chosen[False], chosen[True], strict=True)
        for bf16_K, fp8_K in zip(bf16_TK, fp8_TK, strict=True)
        for choice in bf16_K
    ]
    assert len(same) > 40
    assert sum(same) / len(same) > 0.98


def test_steps_have_the_bits_of_converting_each_time() -> None:
    engines = [engine_of("gpt_oss", keep) for keep in ("step", "product")]
    for engine in engines:
        for module in engine.part.modules():
            if isinstance(module, Experts):
                module.in_fp8 = True
    for seed in (3, 4):
        cached, plain = (step(engine, seed) for engine in engines)
        assert cached[0] == plain[0]
        assert all(x.equal(y) for x, y in zip(cached[1:], plain[1:], strict=True))  # type: ignore[union-attr, arg-type]
