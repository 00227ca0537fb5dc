"""The gated delta rule in chunks against the recurrence over tokens, in fp64: outputs, states and
gradients, for odd lengths, packed documents and an earlier state; and by a stand-in for fla."""

from __future__ import annotations

import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lather.kernels.gated_delta_rule import (
    Documents,
    chunks,
    fla,
    gated_delta_rule,
    reference,
    validate,
)

BATCH, KEY_HEADS, HEADS, KEY, VALUE = 2, 2, 4, 8, 5


def draw(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw queries, keys, values, decays and rates, which require gradients."""
    generator = torch.Generator().manual_seed(length)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(BATCH, length, *sizes, generator=generator, dtype=torch.float64)

    q, k = (normal(KEY_HEADS, KEY) for _ in "qk")
    tensors = [q, k, normal(HEADS, VALUE), -normal(HEADS).abs(), normal(HEADS).sigmoid()]
    return [x.to(dtype).requires_grad_() for x in tensors]


def draw_documents(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return (torch.rand(BATCH, length, generator=generator) < 0.1).long().cumsum(1)


def gradients(results: tuple[Tensor | None, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a sum of all results with fixed weights."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in results]  # type: ignore[union-attr]
    sums = [(x * weight).sum() for x, weight in zip(results, weights, strict=True)]
    return torch.autograd.grad(torch.stack(sums).sum(), inputs)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 63, 64, 65, 200])
def test_chunks_are_the_recurrence(length: int, with_documents: bool, with_state: bool) -> None:
    inputs = draw(length)
    documents = draw_documents(length) if with_documents else None
    if with_state:
        inputs.append(torch.randn(BATCH, HEADS, KEY, VALUE).double().requires_grad_())
    tokens, state = inputs[:5], inputs[5] if with_state else None
    packing = None if documents is None else Documents(documents)
    results = gated_delta_rule(*tokens, packing, state, with_state=True)
    expected = reference.gated_delta_rule(*tokens, documents, state)
    pairs = zip(
        (*results, *gradients(results, inputs)),
        (*expected, *gradients(expected, inputs)),
        strict=True,
    )
    for x, y in pairs:
        torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


def test_the_recurrence_is_the_paper_s() -> None:
    """It is equation 10 of arXiv:2412.06464: S_t = S_{t-1} (a (I - b k k^T)) + b v k^T, V x K."""
    q, k, v, decay, rate = (x.detach()[0] for x in draw(6))
    q, k = (F.normalize(x, dim=-1).repeat_interleave(2, dim=1) for x in (q, k))
    out, last = reference.gated_delta_rule(*(x.detach() for x in draw(6)))
    for head in range(HEADS):
        state = torch.zeros(VALUE, KEY, dtype=torch.float64)
        for t in range(6):
            key, b = k[t, head], rate[t, head]
            shrink = decay[t, head].exp() * (torch.eye(KEY) - b * torch.outer(key, key))
            state = state @ shrink.double() + b * torch.outer(v[t, head], key)
            expected = state @ q[t, head] / KEY**0.5
            torch.testing.assert_close(out[0, t, head], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(last[0, head], state.T, atol=1e-5, rtol=0)


def test_packed_documents_are_separate_sequences() -> None:
    inputs = [x.detach() for x in draw(90)]
    bounds = [0, 13, 77, 90]
    documents = torch.cat(
        [torch.full((BATCH, end - start), start) for start, end in itertools.pairwise(bounds)],
        dim=1,
    )
    packed, last = chunks.gated_delta_rule(*inputs, documents, chunk=16)
    for start, end in itertools.pairwise(bounds):
        alone, state = chunks.gated_delta_rule(*(x[:, start:end] for x in inputs), chunk=16)
        torch.testing.assert_close(packed[:, start:end], alone, atol=1e-12, rtol=0)
    torch.testing.assert_close(last, state, atol=1e-12, rtol=0)


def test_tokens_after_a_state_continue_its_sequence() -> None:
    inputs = [x.detach() for x in draw(70)]
    whole, last = gated_delta_rule(*inputs, with_state=True)
    state = None
    for start, end in ((0, 33), (33, 34), (34, 70)):
        tokens = (x[:, start:end] for x in inputs)
        part, state = gated_delta_rule(*tokens, None, state, with_state=True)
        torch.testing.assert_close(part, whole[:, start:end], atol=1e-12, rtol=0)
    torch.testing.assert_close(state, last, atol=1e-12, rtol=0)


def test_strong_decays_neither_overflow_nor_lose_gradients() -> None:
    inputs = draw(130, torch.float32)
    inputs[3] = torch.full_like(inputs[3], -80.0).requires_grad_()
    results = gated_delta_rule(*inputs, with_state=True)
    assert all(x.isfinite().all() for x in (*results, *gradients(results, inputs)))  # type: ignore[union-attr]


def test_only_the_inputs_are_saved() -> None:
    inputs, saved = draw(70), []
    with saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        gated_delta_rule(*inputs)
    assert saved == [x.data_ptr() for x in inputs]


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_computed_in_fp32(autocast: bool) -> None:
    inputs = draw(70, torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    expected, _ = gated_delta_rule(*wide)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, _ = gated_delta_rule(*inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0, rtol=2**-8)
    for x, y in zip(gradients((out,), inputs), gradients((expected,), wide), strict=True):
        torch.testing.assert_close(x.float(), y, atol=0.02, rtol=0.02)


def test_agrees_with_transformers() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = [x.detach() for x in draw(130, torch.float32)]
    theirs, _ = qwen.torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    ours, _ = gated_delta_rule(*inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_bad_shapes_are_refused() -> None:
    q, k, v, decay, rate = draw(4)
    with pytest.raises(ValueError, match=r"rate has shape \(2, 3, 4\): .* has to be \(2, 4, 4\)"):
        validate(q, k, v, decay, rate[:, :3], None, None)
    with pytest.raises(ValueError, match="4 value heads: has to be a multiple of the 3 key heads"):
        validate(q, k.repeat(1, 1, 2, 1)[:, :, :3], v, decay, rate, None, None)


# --- fla -----------------------------------------------------------------------------------------


class StandInForFla:
    """Has the signature and the numerics that `fla.ops.gated_delta_rule` documents: operands in
    bf16 or fp16, states and sums in fp32, packed documents as one sequence."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def chunk_gated_delta_rule(  # noqa: PLR0917
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert q.dtype == k.dtype == v.dtype != torch.float32
        assert q.shape == k.shape == (*v.shape[:3], KEY)
        assert g.shape == beta.shape == v.shape[:3]
        assert scale is None
        assert use_qk_l2norm_in_kernel
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        assert cu_seqlens is None or len(q) == 1
        self.calls.append({"cu_seqlens": cu_seqlens, "state": initial_state})
        bounds = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        states = [initial_state]
        if cu_seqlens is not None:  # a state for each document
            count = len(bounds) - 1
            states = [None] * count if initial_state is None else [*initial_state.split(1)]
            assert len(states) == count
        outputs, last = [], []
        for (start, end), state in zip(itertools.pairwise(bounds), states, strict=True):
            assert end > start, "fla numbers documents without counting empty ones"
            assert state is None or state.dtype == torch.float32
            tokens = (x[:, start:end].float() for x in (q, k, v, g, beta))
            out, after = reference.gated_delta_rule(*tokens, None, state)
            outputs.append(out.to(v.dtype))
            last.append(after)
        return torch.cat(outputs, dim=1), torch.cat(last) if output_final_state else None


@pytest.fixture
def standin_for_fla(monkeypatch: pytest.MonkeyPatch) -> StandInForFla:
    """Put the stand-in in place of fla, and treat the CPU as a GPU there."""
    standin = StandInForFla()
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        sys.modules["fla.ops.gated_delta_rule"],
        "chunk_gated_delta_rule",
        standin.chunk_gated_delta_rule,
        raising=False,
    )
    monkeypatch.setattr(fla, "is_gpu", lambda x: True)
    return standin


@pytest.mark.parametrize("documents", [False, True])
def test_fla_gets_what_it_documents(standin_for_fla: StandInForFla, documents: bool) -> None:
    inputs = draw(70, torch.bfloat16)
    packing = cu_seqlens = None
    if documents:
        number_BS = draw_documents(70) + torch.tensor([[0], [100]])
        starts = number_BS.flatten().diff().nonzero().flatten() + 1
        cu_seqlens = torch.tensor([0, *starts.tolist(), 140])
        packing = Documents(number_BS, cu_seqlens)
    out, _ = gated_delta_rule(*inputs, packing)
    results = gradients((out,), inputs)
    assert [call["cu_seqlens"] is cu_seqlens for call in standin_for_fla.calls] == [True, True]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    expected, _ = gated_delta_rule(*wide, packing)
    torch.testing.assert_close(out.float(), expected, atol=0, rtol=2**-8)
    for x, y in zip(results, gradients((expected,), wide), strict=True):
        torch.testing.assert_close(x.float(), y, atol=0.02, rtol=0.02)


def test_fla_continues_a_state(standin_for_fla: StandInForFla) -> None:
    inputs = [x.detach() for x in draw(70, torch.bfloat16)]
    whole, last = gated_delta_rule(*inputs, with_state=True)
    state = None
    for start, end in ((0, 33), (33, 34), (34, 70)):
        tokens = (x[:, start:end] for x in inputs)
        part, state = gated_delta_rule(*tokens, None, state, with_state=True)
        assert torch.equal(part, whole[:, start:end])
    torch.testing.assert_close(state, last)
    assert len(standin_for_fla.calls) == 3  # a single token takes the recurrence


def test_fla_has_the_last_state_of_each_row(standin_for_fla: StandInForFla) -> None:
    """Among packed documents; the state before a row is that before its first document."""
    inputs, state = draw(70, torch.bfloat16), torch.randn(BATCH, HEADS, KEY, VALUE)
    number_BS = draw_documents(70) + torch.tensor([[0], [100]])
    starts = number_BS.flatten().diff().nonzero().flatten() + 1
    packing = Documents(number_BS, torch.tensor([0, *starts.tolist(), 140]))
    results = gated_delta_rule(*inputs, packing, state, with_state=True)
    assert standin_for_fla.calls
    wide = [x.detach().float() for x in inputs]
    expected = reference.gated_delta_rule(*wide, number_BS, state)
    for x, y in zip(results, expected, strict=True):
        assert x is not None
        torch.testing.assert_close(x.float(), y, atol=0.02, rtol=0.02)


def test_fla_is_not_asked_for_what_it_has_not(standin_for_fla: StandInForFla) -> None:
    k, bounds = draw(4, torch.bfloat16)[1], torch.tensor([0, 8])
    assert fla.takes(k, None, is_packed=False)
    assert fla.takes(k, bounds, is_packed=True)
    assert not fla.takes(k, None, is_packed=True)
    assert not fla.takes(k.float(), None, is_packed=False)
    assert not fla.takes(k.repeat(1, 1, 1, 40), None, is_packed=False)
