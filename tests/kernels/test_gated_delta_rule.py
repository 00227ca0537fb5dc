"""The gated delta rule in chunks against the recurrence over tokens, in fp64: outputs, states and
gradients, for odd lengths, packed documents and an earlier state."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.kernels.gated_delta_rule import gated_delta_rule, reference, validate

BATCH, HEADS, KEY, VALUE = 2, 3, 8, 5


def draw(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw queries, keys, values, decays and rates, which require gradients."""
    generator = torch.Generator().manual_seed(length)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(BATCH, length, HEADS, *sizes, generator=generator, dtype=dtype)

    q, k = (F.normalize(normal(KEY), dim=-1) for _ in "qk")
    tensors = [q, k, normal(VALUE), -normal().abs(), normal().sigmoid()]
    return [x.requires_grad_() for x in tensors]


def draw_documents(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return (torch.rand(BATCH, length, generator=generator) < 0.1).long().cumsum(1)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 63, 64, 65, 200])
def test_chunks_are_the_recurrence(length: int, with_documents: bool, with_state: bool) -> None:
    inputs = draw(length)
    documents = draw_documents(length) if with_documents else None
    state = torch.randn(BATCH, HEADS, KEY, VALUE, dtype=torch.float64) if with_state else None
    results = gated_delta_rule(*inputs, documents, state)
    expected = reference.gated_delta_rule(*inputs, documents, state)
    weights = [torch.randn_like(x) for x in expected]
    sums = [
        sum((x * weight).sum() for x, weight in zip(pair, weights, strict=True))
        for pair in (results, expected)
    ]
    gradients = [torch.autograd.grad(total, inputs) for total in sums]
    for x, y in zip((*results, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


def test_packed_documents_are_separate_sequences() -> None:
    inputs = [x.detach() for x in draw(90)]
    bounds = [0, 13, 77, 90]
    documents = torch.cat(
        [torch.full((BATCH, end - start), start) for start, end in itertools.pairwise(bounds)],
        dim=1,
    )
    packed, last = gated_delta_rule(*inputs, documents, chunk=16)
    for start, end in itertools.pairwise(bounds):
        alone, state = gated_delta_rule(*(x[:, start:end] for x in inputs), chunk=16)
        torch.testing.assert_close(packed[:, start:end], alone, atol=1e-12, rtol=0)
    torch.testing.assert_close(last, state, atol=1e-12, rtol=0)


def test_tokens_after_a_state_continue_its_sequence() -> None:
    inputs = [x.detach() for x in draw(70)]
    whole, last = gated_delta_rule(*inputs)
    state = None
    for start, end in ((0, 33), (33, 34), (34, 70)):
        part, state = gated_delta_rule(*(x[:, start:end] for x in inputs), None, state)
        torch.testing.assert_close(part, whole[:, start:end], atol=1e-12, rtol=0)
    torch.testing.assert_close(state, last, atol=1e-12, rtol=0)


def test_strong_decays_neither_overflow_nor_lose_gradients() -> None:
    inputs = draw(130, torch.float32)
    inputs[3] = torch.full_like(inputs[3], -80.0).requires_grad_()
    out, state = gated_delta_rule(*inputs)
    gradients = torch.autograd.grad(out.sum() + state.sum(), inputs)
    assert all(x.isfinite().all() for x in (out, state, *gradients))


def test_agrees_with_transformers() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = [x.detach() for x in draw(130, torch.float32)]
    theirs, _ = qwen.torch_chunk_gated_delta_rule(*inputs)
    ours, _ = gated_delta_rule(*inputs)
    torch.testing.assert_close(ours * KEY**-0.5, theirs, atol=1e-6, rtol=1e-5)


def test_bad_shapes_are_refused() -> None:
    q, k, v, decay, rate = draw(4)
    with pytest.raises(ValueError, match=r"rate has shape \(2, 3, 3\): .* has to be \(2, 4, 3\)"):
        validate(q, k, v, decay, rate[:, :3], None, None)
