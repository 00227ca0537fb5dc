"""The in-place loss against `F.cross_entropy` in fp64; reading logits that are gone raises,
whatever the way; Triton against torch."""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.live_bytes import PeakBytes
from kernels.implementations import largest_error, with_gradients
from kernels.implementations import plain_cross_entropy as plain
from lather.kernels import backend
from lather.kernels import cross_entropy as op
from lather.kernels.cross_entropy import SpentLogits, cross_entropy_, reference

pytest.importorskip("triton")
from lather.kernels.cross_entropy import triton

SIZES = [(63, 500), (1, 500), (13, 63), (7, 1), (1, 1), (0, 5)]
"""Sizes T, V."""
OPTIONS = {"z_loss": 1e-3, "normalizer": 7.0}


def inputs(t: int, v: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Draw a leaf, of which `leaf * 1` are the logits, and labels."""
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(t, v, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    labels = torch.randint(0, v, (t,), generator=generator)
    labels[2::5] = -100
    return leaf.requires_grad_(), labels


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_is_cross_entropy(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK", 2000)
    leaf, labels = inputs(*size)
    actual = with_gradients(cross_entropy_(leaf * 1, labels, **OPTIONS) * 2, leaf)
    expected = with_gradients(plain(leaf, labels, **OPTIONS) * 2, leaf)
    assert largest_error(actual, expected) < 1e-13
    if expected[0]:
        assert largest_error([1.01 * a for a in actual], expected) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits_are_computed_in_fp32(dtype: torch.dtype) -> None:
    leaf, labels = inputs(63, 500, dtype)
    loss, gradient = with_gradients(cross_entropy_(leaf * 1, labels, **OPTIONS), leaf)
    expected, expected_gradient = with_gradients(plain(leaf, labels, **OPTIONS), leaf)
    assert (loss.dtype, gradient.dtype) == (torch.float32, dtype)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert largest_error([gradient], [expected_gradient]) < max(torch.finfo(dtype).eps, 3e-6)


def test_rows_without_a_label_may_hold_anything_and_masked_columns_are_left_out() -> None:
    leaf, labels = inputs(13, 63)
    with torch.no_grad():
        leaf[labels == -100] = torch.nan
        leaf[:, 50:] = -torch.inf
    labels[labels >= 50] = 3
    loss, gradient = with_gradients(cross_entropy_(leaf * 1, labels), leaf)
    rows = labels != -100
    expected = with_gradients(plain(leaf[rows], labels[rows]), leaf)
    assert largest_error([loss, gradient[rows]], [expected[0], expected[1][rows]]) < 1e-13
    assert not gradient[~rows].any()


def test_labels_that_do_not_count_and_a_normalizer_on_the_device() -> None:
    leaf, labels = inputs(13, 63)
    ignored = cross_entropy_(leaf * 1, torch.full_like(labels, -100), z_loss=1.0)
    assert not any(a.any() for a in with_gradients(ignored, leaf))
    padded = labels.where(labels >= 0, 0)
    loss = cross_entropy_(leaf * 1, padded, ignore_index=0, normalizer=torch.tensor(11))
    expected = plain(leaf, padded.where(padded > 0, -100), normalizer=11.0)
    assert largest_error(with_gradients(loss, leaf), with_gradients(expected, leaf)) < 1e-13


@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_a_linear_layer_with_a_batch_dim(bias: bool) -> None:
    """With a bias, torch makes the logits as a view of a tensor that nobody holds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(9, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 8, -100], [3, 3, 1]])
    logits = partial(F.linear, x, weight, weight[:, 0] if bias else None)
    actual = with_gradients(cross_entropy_(logits(), labels), weight)
    expected = with_gradients(plain(logits().flatten(0, 1), labels.flatten()), weight)
    assert largest_error(actual, expected) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_second_tensor_of_their_size(dtype: torch.dtype) -> None:
    """The gradient is the memory of the logits; that of the leaf is another tensor."""
    leaf, labels = inputs(400, 6000, dtype)
    logits = leaf * 1
    address, gradients = logits.data_ptr(), []
    logits.register_hook(lambda gradient: gradients.append(gradient.data_ptr()))
    with PeakBytes() as peak:
        loss = cross_entropy_(logits, labels)
    assert peak.bytes < 3 * 4 * reference.BLOCK < 0.7 * leaf.nbytes
    with PeakBytes() as peak:
        loss.backward()
    assert gradients == [address]
    assert leaf.grad is not None
    assert leaf.grad.nbytes <= peak.bytes < 1.01 * leaf.nbytes


# --- spent logits ---------------------------------------------------------------------------------

READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: x.__array__(),
    "format": lambda x: f"{x}",
    "index": operator.itemgetter(0),
    "assign": lambda x: operator.setitem(x, 0, 0.0),
    "iterate": list,
    "plus": lambda x: x + 1,
    "plus from the right": lambda x: 1 + x,
    "equal": lambda x: x == 1,
    "argument": lambda x: torch.equal(torch.zeros(3), x),
    "in a list": lambda x: torch.stack([x]),
    "out": lambda x: torch.add(torch.zeros(3), 1, out=x),
    "source": torch.zeros_like,
    "aten": torch.ops.aten.sum.default,
    "truth": bool,
    "number": float,
    "view": lambda x: x.view(-1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "memory": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "dlpack": lambda x: x.__dlpack__(),
    "in place": lambda x: x.mul_(2),
    "to": lambda x: x.to("cpu"),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": lambda x: torch.save(x, io.BytesIO()),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64)),
    "cross_entropy_": lambda x: cross_entropy_(x, torch.zeros(3, dtype=torch.int64)),
}
GONE = "went into cross_entropy_, which has overwritten them"


@pytest.mark.parametrize("read", READS)
def test_a_later_read_raises(read: str) -> None:
    leaf, labels = inputs(3, 4)
    logits = leaf * 1
    cross_entropy_(logits, labels)
    with pytest.raises(RuntimeError, match=GONE):
        READS[read](logits)


def test_shape_dtype_and_device_can_still_be_asked_and_a_debugger_shows_why_they_are_gone() -> None:
    leaf, labels = inputs(3, 4)
    logits = leaf * 1
    loss = cross_entropy_(logits, labels)
    assert (logits.shape, logits.dtype, logits.device) == ((3, 4), leaf.dtype, leaf.device)
    assert (logits.dim(), logits.numel()) == (2, 12)
    assert isinstance(logits, SpentLogits)
    assert type(loss) is Tensor
    assert repr(logits) == str(logits) == f"<{SpentLogits.explanation}>"
    assert repr([logits]) == f"[<{SpentLogits.explanation}>]"


def test_the_base_of_a_view_is_spent_with_it() -> None:
    leaf, labels = inputs(6, 4)
    base = (leaf * 1).view(2, 3, 4).clone()
    expected = with_gradients(plain(leaf, labels), leaf)
    loss = cross_entropy_(base.flatten(0, 1), labels)
    assert largest_error(with_gradients(loss, leaf), expected) < 1e-13
    with pytest.raises(RuntimeError, match=GONE):
        base.sum()


def test_a_graph_that_needs_the_logits_or_a_changed_gradient_raises() -> None:
    leaf, labels = inputs(3, 4)
    logits, other = leaf * 1, leaf * 1
    penalty, alias = logits.square().sum(), other.detach()  # the square saves its argument
    losses = [
        cross_entropy_(leaf.tanh(), labels),  # tanh saves its result
        cross_entropy_(logits, labels) + penalty,
        cross_entropy_(other, labels),
    ]
    alias.zero_()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_raises(retain: bool) -> None:
    leaf, labels = inputs(3, 4)
    loss = cross_entropy_(leaf * 1, labels)
    loss.backward(retain_graph=retain)
    assert leaf.grad is not None
    first = leaf.grad.clone()
    with pytest.raises(RuntimeError, match="through cross_entropy_ a second time"):
        loss.backward()
    assert torch.equal(leaf.grad, first)


def test_without_gradient_the_logits_stay() -> None:
    leaf, labels = inputs(13, 63)
    expected = pytest.approx(plain(leaf, labels).item(), rel=1e-13)
    logits, frozen = leaf * 1, leaf.detach()
    before = frozen.clone()
    with torch.no_grad():
        assert cross_entropy_(logits, labels).item() == expected
        assert cross_entropy_(leaf, labels).item() == expected
    loss = cross_entropy_(frozen.T.contiguous().T, labels)
    assert loss.item() == expected
    assert not loss.requires_grad
    assert torch.equal(logits, before)
    assert torch.equal(frozen, before)
    logits.square().sum().backward()


class Other(Tensor):
    pass


def test_inputs_that_do_not_fit_raise_and_the_logits_are_as_before() -> None:
    leaf, labels = inputs(6, 4)
    whole = leaf * 1
    for logits, message in (
        (leaf, "are a leaf"),
        (whole[1:], "view of a part"),
        (leaf.view(6, 4), "view of a part|leaf"),
        ((leaf.T.contiguous() * 1).T, "not contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            cross_entropy_(logits, labels[: len(logits)])
    with pytest.raises(TypeError, match="plain tensor, not Other"):
        cross_entropy_((leaf * 1).as_subclass(Other), labels)
    with pytest.raises(ValueError, match="normalizer=0"):
        cross_entropy_(whole, labels, normalizer=0.0)
    for label in (4, -1, -99):
        labels[1] = label
        with pytest.raises(ValueError, match=rf"label {label} is out of range: .* in \[0, 4\)"):
            cross_entropy_(whole, labels)
    assert torch.equal(whole, leaf)


def test_under_checkpointing() -> None:
    leaf, labels = inputs(13, 63)
    expected = with_gradients(plain(leaf.tanh(), labels), leaf)
    loss = checkpoint(lambda x: cross_entropy_(x.tanh() * 1, labels), leaf, use_reentrant=False)
    assert largest_error(with_gradients(loss, leaf), expected) < 1e-13


# --- Triton ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [*SIZES, (3, 5000)], ids=str)
def test_triton_is_the_reference(size: tuple[int, int], dtype: torch.dtype) -> None:
    leaf, labels = inputs(*size, dtype)
    logits = leaf.detach()
    logits[labels == -100] = torch.nan
    logits[:, 100:200] = -torch.inf
    labels = labels.where(labels >= 0, -1)
    labels[(labels >= 100) & (labels < 200)] = 1
    results = []
    for module in (reference, triton):
        gradient = logits.clone()
        losses = module.token_losses(gradient, labels, torch.tensor(0.3), z_loss=0.01)
        alone = module.token_losses(logits, labels, z_loss=0.01)
        torch.testing.assert_close(alone, losses, rtol=1e-6, atol=1e-6)
        results.append((losses, gradient))
    (expected, expected_gradient), (actual, gradient) = results
    assert actual.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    rtol = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(gradient, expected_gradient, rtol=rtol, atol=1e-6)
    if size[0] > 1 and size[1] > 1:
        assert not torch.allclose(1.01 * actual, expected, rtol=1e-3)
        assert not torch.allclose(1.01 * gradient, expected_gradient, rtol=8e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("scale", [0.0, torch.inf, torch.nan])
def test_rows_of_any_numbers_are_zero_with_scale_zero_and_not_finite_with_others(
    scale: float,
) -> None:
    logits = torch.zeros(4, 8)
    logits[0, 3], logits[1], logits[2, 5] = torch.nan, torch.inf, -torch.inf
    labels = torch.tensor([1, 2, 3, -1])
    gradients = [logits.clone(), logits.clone()]
    for module, gradient in zip((reference, triton), gradients, strict=True):
        module.token_losses(gradient, labels, torch.tensor(scale), z_loss=0.01)
    expected, actual = gradients
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert expected.any() == (scale != 0)


def test_the_whole_operation_on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, labels = inputs(13, 63, torch.float32)
    expected = with_gradients(cross_entropy_(leaf * 1, labels, **OPTIONS), leaf)
    calls, original = [], triton.launch
    monkeypatch.setattr(
        triton, "launch", lambda *args, **kw: calls.append(1) or original(*args, **kw)
    )
    monkeypatch.setattr(backend, "use_triton", lambda *tensors: True)
    loss = cross_entropy_(leaf * 1, labels, **OPTIONS)
    assert largest_error(with_gradients(loss, leaf), expected) < 3e-6
    assert calls == [1]


def test_a_node_that_saved_the_logits_raises_though_a_kernel_tells_torch_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        version_of_its_own = torch.from_numpy(logits.numpy())
        return reference.token_losses(version_of_its_own, *args, **options)

    monkeypatch.setattr(op, "fastest", lambda operation, *tensors, **options: kernel)
    leaf, labels = inputs(3, 4)
    logits = leaf * 1
    penalty = logits.square().sum()
    loss = cross_entropy_(logits, labels)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
    expected = with_gradients(plain(leaf, labels), leaf)
    assert largest_error(with_gradients(loss, leaf), expected) < 1e-13
