"""The gated delta rule on slices of sequences against the rule on whole sequences, in fp64, with
all slices in one process: outputs and gradients, packed documents, the work; and by a stand-in for
fla."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kernels.test_gated_delta_rule import (
    BATCH,
    HEADS,
    KEY,
    VALUE,
    StandInForFla,
    draw,
    draw_documents,
    gradients,
    standin_for_fla,
)
from lather.kernels.gated_delta_rule import (
    Documents,
    StatePassing,
    chunks,
    gated_delta_rule,
    gated_delta_rule_of_slices,
    reference,
)

__all__ = ["standin_for_fla"]


def boundaries(number_RP: Tensor) -> Tensor:
    """Return where documents begin among the tokens of all rows, and the number of tokens."""
    begins_RP = torch.ones_like(number_RP, dtype=torch.bool)
    begins_RP[:, 1:] = number_RP[:, 1:] != number_RP[:, :-1]
    return F.pad(begins_RP.flatten().nonzero().flatten(), (0, 1), value=number_RP.numel())


def in_slices(inputs: list[Tensor], num: int, documents: Tensor | None = None) -> Tensor:
    """Return the outputs of whole sequences, computed in this number of slices."""

    def rows(x_BTx: Tensor) -> Tensor:
        return x_BTx.unflatten(1, (num, -1)).flatten(0, 1)

    continues, packing = None, None
    if documents is not None:
        number_BNP = documents.unflatten(1, (num, -1))
        continues = torch.zeros_like(number_BNP[:, :, 0], dtype=torch.bool)
        continues[:, 1:] = number_BNP[:, 1:, 0] == number_BNP[:, :-1, -1]
        packing = Documents(rows(documents), boundaries(rows(documents)))
    passing = StatePassing(
        lambda x: x.unflatten(0, (-1, num)), lambda x: x.flatten(0, 1), continues
    )
    out_RPHV = gated_delta_rule_of_slices(*map(rows, inputs), passing, packing)
    return out_RPHV.unflatten(0, (-1, num)).flatten(1, 2)


def documents_of(kind: str, length: int, num: int) -> Tensor | None:
    """Return None, documents of odd lengths, those that begin with slices alone, or one for each
    token."""
    if kind == "one":
        return None
    each_row = torch.arange(BATCH)[:, None] * length
    if kind == "short":
        return torch.arange(length) + each_row
    if kind == "odd":
        return draw_documents(length) + each_row
    starts = torch.arange(length) // (length // num)
    return starts.div(2, rounding_mode="floor") + each_row


@pytest.mark.parametrize("kind", ["one", "odd", "slices", "short"])
@pytest.mark.parametrize(
    ("length", "num"), [(4, 4), (12, 4), (8, 2), (128, 2), (280, 4), (520, 8), (7, 1)]
)
def test_slices_are_the_whole(length: int, num: int, kind: str) -> None:
    """Slices of single tokens, shorter and longer than a chunk."""
    inputs, documents = draw(length), documents_of(kind, length, num)
    packing = None if documents is None else Documents(documents)
    expected = gated_delta_rule(*inputs, packing)[:1]
    results = (in_slices(inputs, num, documents),)
    pairs = zip(
        (*results, *gradients(results, inputs)),
        (*expected, *gradients(expected, inputs)),
        strict=True,
    )
    for x, y in pairs:
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64, 150])
def test_a_transition_is_how_the_last_state_follows_from_the_first(
    length: int, with_documents: bool
) -> None:
    """By the recurrence, and chunk by chunk; a document that begins after the first token forgets
    the first state."""
    q, k, v, decay, rate = (x.detach() for x in draw(length))
    documents = draw_documents(length) if with_documents else None
    expected = reference.transition(k, v, decay, rate, documents)
    made = chunks.Chunks.of(q, k, v, decay, rate, documents, chunk=16)
    torch.testing.assert_close(made.transition(), expected, atol=1e-12, rtol=0)
    first = torch.randn(BATCH, HEADS, KEY, VALUE).double()
    last = expected[..., :VALUE] + expected[..., VALUE:] @ first
    results = reference.gated_delta_rule(q, k, v, decay, rate, documents, first)
    torch.testing.assert_close(results[1], last, atol=1e-12, rtol=0)
    if with_documents and documents is not None:
        several = documents[:, 0] != documents[:, -1]
        assert expected[several][..., VALUE:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_dtypes_round_as_the_whole_does(dtype: torch.dtype) -> None:
    """States pass in fp32; in bf16 the outputs are those of the whole but for one rounding."""
    inputs = draw(256, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    expected, results = gated_delta_rule(*inputs)[:1], (in_slices(inputs, 4),)
    assert results[0].dtype == dtype
    pairs = zip(
        (*results, *gradients(results, inputs)),
        (*expected, *gradients(expected, inputs)),
        strict=True,
    )
    for x, y in pairs:
        torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance)


def test_products_are_at_most_six_tenths_more() -> None:
    """Forward and backward, for keys as wide as values, and besides the triangular systems, which
    are solved as often as without slices."""

    def work_of(compute: Callable[[list[Tensor]], Tensor]) -> int:
        generator = torch.Generator().manual_seed(0)
        sizes = [(2, 32), (2, 32), (4, 32), (4,), (4,)]
        inputs = [torch.rand(BATCH, 1024, *size, generator=generator) for size in sizes]
        inputs[3] = -inputs[3]
        inputs = [x.requires_grad_() for x in inputs]
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(compute(inputs).sum(), inputs)
        return int(counter.get_total_flops())

    whole = work_of(lambda inputs: gated_delta_rule(*inputs)[0])
    assert whole < work_of(lambda inputs: in_slices(inputs, 4)) < 1.6 * whole


@pytest.mark.parametrize("kind", ["one", "odd", "slices", "short"])
def test_fla_passes_states(standin_for_fla: StandInForFla, kind: str) -> None:
    """It has a state per document, of which a row's first and last matter."""
    inputs, documents = draw(80, torch.bfloat16), documents_of(kind, 80, 4)
    results = (in_slices(inputs, 4, documents),)
    assert len(standin_for_fla.calls) == 2
    wide = [x.detach().float().requires_grad_() for x in inputs]
    packing = None if documents is None else Documents(documents)
    expected = gated_delta_rule(*wide, packing)[:1]
    torch.testing.assert_close(results[0].float(), expected[0], atol=0.02, rtol=0.02)
    for x, y in zip(gradients(results, inputs), gradients(expected, wide), strict=True):
        torch.testing.assert_close(x.float(), y, atol=0.03, rtol=0.03)
    assert len(standin_for_fla.calls) == 3
