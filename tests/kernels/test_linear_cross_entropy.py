"""The loss without logits against `F.cross_entropy` with them in fp64; its tiles in Triton against
the reference; its memory, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.live_bytes import PeakBytes
from kernels.implementations import WideProducts, largest_error, plain_cross_entropy, with_gradients
from lather.kernels import backend
from lather.kernels import linear_cross_entropy as op
from lather.kernels.linear_cross_entropy import linear_cross_entropy, linear_token_losses, reference
from lather.torch_private import TorchDispatchMode

pytest.importorskip("triton")
from lather.kernels.linear_cross_entropy import triton

SIZES = [(63, 500, 16), (1, 500, 3), (13, 63, 8), (7, 1, 4), (1, 1, 1), (0, 5, 4)]
"""Sizes T, V, D."""


def inputs(
    t: int, v: int, d: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(t, d, generator=generator, dtype=torch.float64).mul(2).to(dtype)
    weight = torch.randn(v, d, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, v, (t,), generator=generator)
    labels[2::5] = -100
    return x.requires_grad_(), weight.requires_grad_(), labels


def plain(x: Tensor, weight: Tensor, labels: Tensor, **options: float) -> Tensor:
    return plain_cross_entropy(F.linear(x.double(), weight.double()), labels, **options)


OPTIONS = {"z_loss": 1e-3, "normalizer": 7.0}


@pytest.mark.parametrize("tile", [None, (8, 63), (1, 1000), (100, 7)], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_is_cross_entropy_of_the_logits(
    size: tuple[int, int, int], tile: tuple[int, int] | None
) -> None:
    x, weight, labels = inputs(*size)
    loss = -3 * linear_cross_entropy(x, weight, labels, tile=tile, **OPTIONS)
    actual = with_gradients(loss, x, weight)
    expected = with_gradients(-3 * plain(x, weight, labels, **OPTIONS), x, weight)
    assert largest_error(actual, expected) < 1e-12
    if expected[0]:
        assert largest_error([1.01 * a for a in actual], expected) > 1e-3


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_losses_of_tokens_can_be_weighed(size: tuple[int, int, int], accumulate: bool) -> None:
    x, weight, labels = inputs(*size)
    factors = torch.randn(len(labels), generator=torch.Generator().manual_seed(1)).double()
    losses = linear_token_losses(x, weight, labels, tile=(8, 63), accumulate=accumulate)
    assert losses[labels < 0].eq(0).all()
    actual = with_gradients((losses * factors).sum(), x, weight)
    each = F.cross_entropy(F.linear(x, weight), labels, reduction="none")
    expected = with_gradients((each * factors).sum(), x, weight)
    assert largest_error(actual, expected) < 1e-12
    if expected[0]:
        assert largest_error([1.01 * a for a in actual], expected) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_losses_of_tokens_add_up_to_the_bits_of_the_loss(dtype: torch.dtype) -> None:
    x, weight, labels = inputs(63, 500, 16, dtype)
    summed = with_gradients(linear_cross_entropy(x, weight, labels, normalizer=7.0), x, weight)
    losses = linear_token_losses(x, weight, labels) * torch.ones(63)
    again = with_gradients(losses.sum() / 7.0, x, weight)
    assert all(torch.equal(a, b) for a, b in zip(summed, again, strict=True))


def test_inputs_of_any_shape_and_layout() -> None:
    x, weight, labels = inputs(6, 11, 3)
    shaped = x.detach().view(2, 3, 3).requires_grad_()
    options = {"z_loss": 0.1, "normalizer": 3.0}
    assert torch.autograd.gradcheck(
        lambda a, b: linear_cross_entropy(a, b, labels.view(2, 3), tile=(4, 4), **options),
        (shaped, weight),
    )
    single = linear_cross_entropy(x[0], weight, labels[0])
    assert single.item() == pytest.approx(plain(x[:1], weight, labels[:1]).item(), rel=1e-13)
    columns, rows = (a.detach().T.contiguous().T.requires_grad_() for a in (x, weight))
    shared = x.detach()[:1].expand(6, 3).requires_grad_()
    for a, b in ((columns, rows), (shared, weight)):
        actual = with_gradients(linear_cross_entropy(a, b, labels, tile=(3, 4)), a, b)
        assert largest_error(actual, with_gradients(plain(a, b, labels), a, b)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs_lose_nothing_but_the_rounding_of_the_gradients(dtype: torch.dtype) -> None:
    """Logits that are rounded to bf16 would be noticed."""
    x, weight, labels = inputs(63, 500, 16, dtype)
    loss = linear_cross_entropy(x, weight, labels, tile=(16, 100), **OPTIONS)
    actual = with_gradients(loss, x, weight)
    expected = with_gradients(plain(x, weight, labels, **OPTIONS), x, weight)
    assert [a.dtype for a in actual] == [torch.float32, dtype, dtype]
    assert largest_error(actual[:1], expected[:1]) < 1e-6
    assert largest_error(actual[1:], expected[1:]) < max(torch.finfo(dtype).eps, 3e-6)
    rounded = F.linear(x, weight).bfloat16()
    assert largest_error([plain_cross_entropy(rounded, labels, **OPTIONS)], expected[:1]) > 1e-5


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_takes_its_dtype_and_gives_gradients_of_the_inputs_own(
    x_dtype: torch.dtype,
) -> None:
    x, weight, labels = inputs(63, 500, 16, torch.float32)
    x = x.detach().to(x_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels, tile=(16, 100))
        inside = with_gradients(loss * 1, x, weight)
        loss = linear_cross_entropy(x, weight, labels, tile=(16, 100))
    outside = with_gradients(loss, x, weight)
    rounded = [a.detach().bfloat16().requires_grad_() for a in (x, weight)]
    expected = with_gradients(plain(*rounded, labels), *rounded)
    assert [a.dtype for a in outside] == [torch.float32, x_dtype, torch.float32]
    assert largest_error(outside[:1], expected[:1]) < 1e-6
    assert largest_error(outside[1:], expected[1:]) < 8e-3  # autograd rounds its gradients to bf16
    assert all(map(torch.equal, inside, outside))


def test_products_of_a_gpu_are_added_to_the_sums_without_a_pass_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both gradients are those that a CPU computes, but for the rounding of a tile's gradient."""
    x, weight, labels = inputs(63, 500, 16, torch.bfloat16)
    expected = with_gradients(linear_cross_entropy(x, weight, labels, tile=(16, 100)), x, weight)
    monkeypatch.setattr(op, "is_gpu", lambda x: True)
    with WideProducts() as products:
        loss = linear_cross_entropy(x, weight, labels, tile=(16, 100))
        actual = with_gradients(loss, x, weight)
    assert largest_error(actual[:1], expected[:1]) < 1e-6
    assert largest_error(actual[1:], expected[1:]) < 8e-3
    num_tiles = 4 * 5
    assert products.calls["mm.dtype"] == products.calls["addmm.dtype_out"] == 2 * num_tiles


@pytest.mark.parametrize("frozen", [(False, False), (True, False), (False, True), (True, True)])
def test_there_are_four_products_and_a_frozen_operand_costs_none(
    frozen: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, labels = inputs(16, 30, 4)
    expected = with_gradients(plain(x, weight, labels), x, weight)[1:]
    flops: list[int] = []

    def counting(name: str, first: int) -> None:
        original = getattr(op._Products, name)

        def counted(*args: Any) -> Any:
            a, b = args[first : first + 2]
            flops.append(a.shape[0] * a.shape[1] * b.shape[1])
            return original(*args)

        monkeypatch.setattr(op._Products, name, counted)

    counting("product", 1)
    counting("add_product_", 2)
    for a, is_frozen in zip((x, weight), frozen, strict=True):
        a.requires_grad_(not is_frozen)
    loss = linear_cross_entropy(x, weight, labels, tile=(8, 10))
    assert loss.requires_grad == (not all(frozen))
    if loss.requires_grad:
        loss.backward()
    assert sum(flops) == (1 + loss.requires_grad + frozen.count(False)) * 16 * 30 * 4
    for a, is_frozen, gradient in zip((x, weight), frozen, expected, strict=True):
        assert (a.grad is None) == is_frozen
        if a.grad is not None:
            assert largest_error([a.grad], [gradient]) < 1e-12


def test_backward_keeps_the_inputs_and_one_number_per_token_alone() -> None:
    x, weight, labels = inputs(16, 30, 4)
    saved: list[Tensor] = []
    for is_enabled in (False, True):
        with (
            torch.set_grad_enabled(is_enabled),
            torch.autograd.graph.saved_tensors_hooks(lambda a: saved.append(a) or a, lambda a: a),
        ):
            linear_cross_entropy(x, weight, labels)
        assert bool(saved) == is_enabled
    assert [a.data_ptr() for a in saved[:2]] == [x.data_ptr(), weight.data_ptr()]
    assert [(a.shape, a.dtype) for a in saved[2:]] == [((16,), torch.int64), ((16,), torch.float64)]


def test_a_retained_graph_gives_the_same_bits_again_and_no_second_derivative() -> None:
    x, weight, labels = inputs(16, 30, 4)
    loss = linear_cross_entropy(x, weight, labels)
    first, second = (torch.autograd.grad(loss, (x, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_is_added_to_the_one_that_exists_tile_by_tile(dtype: torch.dtype) -> None:
    """The sum has autograd's bits, and takes the memory of a tile, not of the weight."""
    grads, peaks = [], []
    for accumulate in (False, True):
        x, weight, labels = inputs(20, 64, 512, dtype)
        for factor in (1.0, 0.3):
            loss = linear_cross_entropy(
                factor * x, weight, labels, tile=(8, 8), accumulate=accumulate
            )
            with PeakBytes() as peak:
                loss.backward()
        assert weight.grad is not None
        grads.append(weight.grad)
        peaks.append(peak.bytes)
    assert torch.equal(*grads)
    assert peaks[0] - peaks[1] > 0.6 * grads[0].nbytes


def test_labels_that_do_not_count() -> None:
    x, weight, labels = inputs(16, 30, 4)
    ignored = linear_cross_entropy(x, weight, torch.full((16,), -100), z_loss=0.1)
    assert not any(a.any() for a in with_gradients(ignored, x, weight))
    padded = labels.where(labels >= 0, 0)
    expected = plain(x, weight, padded.where(padded > 0, -100)).item()
    actual = linear_cross_entropy(x, weight, padded, ignore_index=0).item()
    assert actual == pytest.approx(expected, rel=1e-13)


def test_large_logits_overflow_nothing() -> None:
    x, weight, labels = inputs(16, 30, 4, torch.float32)
    x = (x.detach() * 1e4).requires_grad_()
    actual = with_gradients(linear_cross_entropy(x, weight, labels, tile=(8, 7)), x, weight)
    assert largest_error(actual, with_gradients(plain(x, weight, labels), x, weight)) < 1e-5


def test_normalizer_may_be_a_tensor_of_another_dtype_that_is_not_differentiated() -> None:
    x, weight, labels = inputs(16, 30, 4)
    count = torch.tensor(13, dtype=torch.int64)
    actual = with_gradients(linear_cross_entropy(x, weight, labels, normalizer=count), x, weight)
    expected = with_gradients(plain(x, weight, labels, normalizer=13.0), x, weight)
    assert largest_error(actual, expected) < 1e-12
    scale = torch.tensor([13.0], requires_grad=True)
    linear_cross_entropy(x, weight, labels, normalizer=scale).backward()
    assert scale.grad is None


X, WEIGHT, LABELS = (x.detach() for x in inputs(3, 5, 2))
WRONG: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    *((ValueError, rf"label {label} is out of range: labels are in \[0, 5\).*ignore_index \(-100\)",
       (X, WEIGHT, LABELS.where(torch.arange(3) != 1, label)), {}) for label in (5, -1, 2**40)),
    *((ValueError, "normalizer=.*> 0", (X, WEIGHT, LABELS), {"normalizer": normalizer})
      for normalizer in (0.0, -1.0, float("nan"), float("inf"))),
    (ValueError, "normalizer has shape", (X, WEIGHT, LABELS), {"normalizer": torch.ones(2)}),
    (ValueError, "tile=", (X, WEIGHT, LABELS), {"tile": (0, 5)}),
    (TypeError, r"weight has dtype torch\.float32", (X, WEIGHT.float(), LABELS), {}),
    (ValueError, "weight is on meta", (X, WEIGHT.to("meta"), LABELS), {}),
    (ValueError, "labels are on meta", (X, WEIGHT, LABELS.to("meta")), {}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "arguments", "options"), WRONG)
def test_inputs_that_do_not_fit_are_refused(
    error: type[Exception], words: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=words):
        linear_cross_entropy(*arguments, **options)


def test_inputs_of_other_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(5, 1\)"):
        op._check_weight(X, WEIGHT[:, :1])
    with pytest.raises(ValueError, match=r"labels have shape \(2,\)"):
        op.check_inputs(X, LABELS[:2], 1.0, "x")
    for x, labels, words in [
        (X, LABELS.double(), "labels have"),
        (LABELS[:, None], LABELS, "x has"),
    ]:
        with pytest.raises(TypeError, match=f"{words} dtype"):
            op.check_inputs(x, labels, 1.0, "x")


# --- memory ---------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU; torch 2.11 has no shapes of a product
    that is added to a wider sum on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.count += not func.is_view and name not in ("empty", "empty_like", "promote_types")
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


def extra_bytes(t: int, v: int, d: int, dtype: torch.dtype, tile: tuple[int, int]) -> int:
    """Count, on shapes alone, the peak of forward and backward beyond the gradients."""
    x, weight = (
        torch.empty(rows, d, dtype=dtype, device="meta", requires_grad=True) for rows in (t, v)
    )
    labels = torch.empty(t, dtype=torch.int64, device="meta")
    with PeakBytes() as forward:
        loss = linear_cross_entropy(x, weight, labels, tile=tile)
    with PeakBytes() as backward:
        loss.backward()
    return max(forward.bytes, backward.bytes - x.nbytes - weight.nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_that_of_some_tiles(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T 4096, V 102400, D 2048; only a part of the vocabulary is gone through, as the rest adds
    nothing. On a CPU the memory is a twentieth of the logits; on a GPU at most two tiles of logits
    and of their gradient, and dx in fp32."""
    monkeypatch.setattr(op, "is_gpu", lambda x: device == "cuda")
    t, v, d, tile = 4096, 102400, 2048, op.gpu_tile(4096) if device == "cuda" else op.CPU_TILE
    with Launches():
        two, four = (extra_bytes(t, num * tile[1], d, dtype, tile) for num in (2, 4))
    assert two == four
    assert t * tile[1] < two if device == "cuda" else two <= 0.05 * t * v * dtype.itemsize
    # elementwise work of the reference has two tiles at once
    assert two <= 2 * (4 + dtype.itemsize) * tile[0] * tile[1] + 4 * t * d


def test_a_large_vocabulary_takes_few_launches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of forward and backward at T 8192, V 102400, D 2048 in bf16, with one kernel for
    the elementwise work on a tile."""

    class Kernels:
        @staticmethod
        def update_logsumexp_(max_N: Tensor, *_: Any) -> None:
            max_N.zero_()

        @staticmethod
        def softmax_gradient(logits_NC: Tensor, *_: Any, dtype: torch.dtype, **__: Any) -> Tensor:
            return logits_NC.to(dtype)

    monkeypatch.setattr(op, "is_gpu", lambda x: True)
    monkeypatch.setattr(
        op, "fastest", lambda function, *_, **__: getattr(Kernels, function.__name__)
    )
    rows, columns = op.gpu_tile(8192)
    num_tiles = (8192 // rows) * (102400 // columns)
    with Launches() as launches:
        extra_bytes(8192, 102400, 2048, torch.bfloat16, (rows, columns))
    assert 6 * num_tiles <= launches.count <= 600


# --- the tiles in Triton --------------------------------------------------------------------------

TILES = [(63, 500), (5, 1), (1, 63), (3, 1500), (0, 7)]
"""Sizes N, C."""


def tile_of(n: int, c: int, first: int) -> tuple[Tensor, Tensor]:
    """Draw a tile of logits with -inf among them; labels are before, in and after the tile's
    columns, and missing."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(n, c, generator=generator) * 3
    logits[::4, 1::3] = -torch.inf
    labels = torch.randint(0, 2 * first + c, (n,), generator=generator)
    labels[1::3] = first + torch.randint(0, c, labels[1::3].shape, generator=generator)
    labels[3::7] = -1
    return logits, labels


@pytest.mark.parametrize("first", [0, 500])
@pytest.mark.parametrize("size", TILES, ids=str)
def test_triton_logsumexp_of_tiles_is_the_references(size: tuple[int, int], first: int) -> None:
    logits, labels = tile_of(*size, first)
    logits[:1, :2] = -torch.inf
    parts = (logits, logits.flip(0) if first else logits - 2)
    results = []
    for module in (reference, triton):
        n = len(logits)
        state = [torch.full((n,), -torch.inf), torch.zeros(n), torch.full((n,), 0.5)]
        for part in parts:
            module.update_logsumexp_(*state, part.clone(), labels, first)
        results.append(state)
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    if len(logits) > 1:
        max_N, sum_N, _ = results[0]
        exact = torch.cat(parts, 1).double().logsumexp(1)
        torch.testing.assert_close((max_N + sum_N.log()).double(), exact, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(1.01 * results[1][1], sum_N, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [0, 500])
@pytest.mark.parametrize("size", TILES, ids=str)
def test_triton_gradient_of_a_tile_is_the_references(
    size: tuple[int, int], first: int, dtype: torch.dtype
) -> None:
    logits, labels = tile_of(*size, first)
    logsumexp = logits.exp().sum(1).add(1).log()
    scale = torch.where(labels >= 0, torch.linspace(0.5, 2, len(labels)), 0)
    logits[3::7] = torch.nan  # these rows have no label
    tile = (labels, first, logsumexp, scale)
    expected, actual = (
        module.softmax_gradient(logits.clone(), *tile, z_loss=0.01, dtype=dtype)
        for module in (reference, triton)
    )
    assert actual.dtype == expected.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-6)
    assert not expected[3::7].any()
    inside = (labels >= first) & (labels < first + logits.shape[1])
    assert ((expected < 0).sum(1) == inside).all()
    if expected.numel():
        assert not torch.allclose(1.01 * actual, expected, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_whole_operation_on_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 the reference runs."""
    x, weight, labels = inputs(13, 63, 8, dtype)

    def run() -> list[Tensor]:
        loss = linear_cross_entropy(x, weight, labels, tile=(8, 25), **OPTIONS)
        return with_gradients(loss, x, weight)

    expected, calls, original = run(), [], triton.softmax_gradient
    monkeypatch.setattr(
        triton, "softmax_gradient", lambda *args, **kw: calls.append(args) or original(*args, **kw)
    )
    monkeypatch.setattr(backend, "use_triton", lambda *tensors: True)
    tolerance = 1e-12 if dtype == torch.float64 else max(3e-6, torch.finfo(dtype).eps)
    assert largest_error(run(), expected) < tolerance
    assert len(calls) == (0 if dtype == torch.float64 else 6)
