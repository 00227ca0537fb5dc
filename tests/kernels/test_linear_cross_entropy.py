"""The loss without logits against `F.cross_entropy` with them in fp64; its tiles in Triton against
the reference; its memory, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.live_bytes import PeakBytes
from kernels.implementations import WideProducts
from lather.kernels import backend
from lather.kernels import linear_cross_entropy as op
from lather.kernels.linear_cross_entropy import linear_cross_entropy, reference
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


def plain(
    x: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0, normalizer: float = 1.0
) -> Tensor:
    """Compute the formula in fp64, with logits."""
    logits = F.linear(x.double(), weight.double())
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return (total + z_loss * (logits.logsumexp(-1) * (labels != -100)).square().sum()) / normalizer


def with_gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, of)]


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error, relative to the largest element of each tensor."""
    assert [x.shape for x in actual] == [x.shape for x in expected]
    pairs = [
        (a.detach().double(), b.detach().double())
        for a, b in zip(actual, expected, strict=True)
        if b.numel()
    ]
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        if b.any()
        else float(a.abs().max())
        for a, b in pairs
    )


@pytest.mark.parametrize("tile", [None, (8, 63), (1, 1000), (100, 7)], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_is_cross_entropy_of_the_logits(
    size: tuple[int, int, int], tile: tuple[int, int] | None
) -> None:
    x, weight, labels = inputs(*size)
    loss = linear_cross_entropy(x, weight, labels, z_loss=1e-3, normalizer=7.0, tile=tile)
    actual = with_gradients(loss, x, weight)
    expected = with_gradients(plain(x, weight, labels, 1e-3, 7.0), x, weight)
    assert largest_error(actual, expected) < 1e-12
    if expected[0]:
        assert largest_error([1.01 * a for a in actual], expected) > 1e-3


def test_gradcheck_of_shaped_inputs() -> None:
    x, weight, labels = inputs(6, 11, 3)
    shaped = x.detach().view(2, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: linear_cross_entropy(
            a, b, labels.view(2, 3), z_loss=0.1, normalizer=3.0, tile=(4, 4)
        ),
        (shaped, weight),
    )


def test_one_token_without_a_token_dim_and_transposed_memory() -> None:
    x, weight, labels = inputs(4, 11, 3)
    assert linear_cross_entropy(x[0], weight, labels[0]).item() == pytest.approx(
        plain(x[:1], weight, labels[:1]).item(), rel=1e-13
    )
    x, weight = (a.detach().T.contiguous().T.requires_grad_() for a in (x, weight))
    actual = with_gradients(linear_cross_entropy(x, weight, labels, tile=(3, 4)), x, weight)
    assert largest_error(actual, with_gradients(plain(x, weight, labels), x, weight)) < 1e-12


def test_tokens_that_share_memory_have_their_own_gradients() -> None:
    x, weight, labels = inputs(1, 11, 3)
    row = x.detach().expand(5, 3).requires_grad_()
    labels = torch.tensor([0, 3, 10, -100, 3])
    actual = with_gradients(linear_cross_entropy(row, weight, labels, tile=(2, 4)), row, weight)
    assert largest_error(actual, with_gradients(plain(row, weight, labels), row, weight)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs_lose_nothing_but_the_rounding_of_the_gradients(dtype: torch.dtype) -> None:
    x, weight, labels = inputs(63, 500, 16, dtype)
    loss = linear_cross_entropy(x, weight, labels, z_loss=1e-3, normalizer=50.0, tile=(16, 100))
    actual, expected = (
        with_gradients(loss, x, weight),
        with_gradients(plain(x, weight, labels, 1e-3, 50.0), x, weight),
    )
    assert [a.dtype for a in actual] == [torch.float32, dtype, dtype]
    assert largest_error(actual[:1], expected[:1]) < 1e-6
    assert largest_error(actual[1:], expected[1:]) < max(torch.finfo(dtype).eps, 3e-6)
    assert largest_error([1.01 * a for a in actual[:1]], expected[:1]) > 1e-3


def test_logits_rounded_to_bf16_would_be_noticed() -> None:
    x, weight, labels = inputs(63, 500, 16, torch.bfloat16)
    rounded = F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")
    assert largest_error([rounded], [plain(x, weight, labels)]) > 1e-5


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_takes_its_dtype_and_gives_gradients_of_the_inputs_own(
    x_dtype: torch.dtype,
) -> None:
    x, weight, labels = inputs(63, 500, 16, torch.float32)
    x = x.detach().to(x_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels, tile=(16, 100))
        assert torch.is_autocast_enabled("cpu")
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


@pytest.mark.parametrize("frozen", [(True, False), (False, True), (True, True)], ids=str)
def test_a_frozen_operand_costs_no_work(
    frozen: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, labels = inputs(16, 30, 4)
    expected = with_gradients(plain(x, weight, labels), x, weight)[1:]
    products: list[str] = []
    add = op._ProductPlan.add_product_
    monkeypatch.setattr(
        op._ProductPlan, "add_product_", lambda *args: products.append("") or add(*args)
    )
    for a, is_frozen in zip((x, weight), frozen, strict=True):
        a.requires_grad_(not is_frozen)
    loss = linear_cross_entropy(x, weight, labels, tile=(8, 10))
    assert loss.requires_grad == (not all(frozen))
    if loss.requires_grad:
        loss.backward()
    assert len(products) == 2 * 3 * frozen.count(False)
    for a, is_frozen, gradient in zip((x, weight), frozen, expected, strict=True):
        assert (a.grad is None) == is_frozen
        if a.grad is not None:
            assert largest_error([a.grad], [gradient]) < 1e-12


def test_backward_keeps_the_inputs_and_one_number_per_token_alone() -> None:
    x, weight, labels = inputs(16, 30, 4)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda a: kept.append(a) or a, lambda a: a):
        linear_cross_entropy(x, weight, labels)
    assert [a.untyped_storage().data_ptr() for a in kept[:2]] == [
        x.untyped_storage().data_ptr(),
        weight.untyped_storage().data_ptr(),
    ]
    assert [(a.shape, a.dtype) for a in kept[2:]] == [((16,), torch.int64), ((16,), torch.float64)]
    kept.clear()
    with (
        torch.no_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda a: kept.append(a) or a, lambda a: a),
    ):
        linear_cross_entropy(x, weight, labels)
    assert kept == []


def test_a_retained_graph_gives_the_same_bits_again_and_no_second_derivative() -> None:
    x, weight, labels = inputs(16, 30, 4)
    loss = linear_cross_entropy(x, weight, labels)
    first, second = (torch.autograd.grad(loss, (x, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


def test_all_labels_ignored_gives_zeros() -> None:
    x, weight, _ = inputs(16, 30, 4)
    results = with_gradients(
        linear_cross_entropy(x, weight, torch.full((16,), -100), z_loss=0.1), x, weight
    )
    assert not any(a.any() for a in results)


def test_an_ignore_index_that_is_a_token_too() -> None:
    x, weight, labels = inputs(16, 30, 4)
    padded = labels.where(labels >= 0, 0)
    expected = plain(x, weight, padded.where(padded > 0, -100))
    assert linear_cross_entropy(x, weight, padded, ignore_index=0).item() == pytest.approx(
        expected.item(), rel=1e-13
    )


def test_large_logits_overflow_nothing() -> None:
    x, weight, labels = inputs(16, 30, 4, torch.float32)
    x = (x.detach() * 1e4).requires_grad_()
    actual = with_gradients(linear_cross_entropy(x, weight, labels, tile=(8, 7)), x, weight)
    assert largest_error(actual, with_gradients(plain(x, weight, labels), x, weight)) < 1e-5


def test_normalizer_may_be_a_tensor_of_another_dtype_that_is_not_differentiated() -> None:
    x, weight, labels = inputs(16, 30, 4)
    count = torch.tensor(13, dtype=torch.int64)
    actual = with_gradients(linear_cross_entropy(x, weight, labels, normalizer=count), x, weight)
    assert (
        largest_error(actual, with_gradients(plain(x, weight, labels, normalizer=13.0), x, weight))
        < 1e-12
    )
    scale = torch.tensor([13.0], requires_grad=True)
    linear_cross_entropy(x, weight, labels, normalizer=scale).backward()
    assert scale.grad is None


def test_upstream_gradients_scale_both() -> None:
    x, weight, labels = inputs(16, 30, 4)
    actual = with_gradients(linear_cross_entropy(x, weight, labels) * -3, x, weight)
    assert largest_error(actual, with_gradients(plain(x, weight, labels) * -3, x, weight)) < 1e-12


@pytest.mark.parametrize("label", [30, -1, -101, 2**40])
def test_a_label_out_of_range_raises(label: int) -> None:
    x, weight, labels = inputs(16, 30, 4)
    labels[5] = label
    with pytest.raises(
        ValueError,
        match=rf"label {label} is out of range: labels are in \[0, 30\).*ignore_index \(-100\)",
    ):
        linear_cross_entropy(x, weight, labels)


@pytest.mark.parametrize("normalizer", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_normalizer_raises(normalizer: float) -> None:
    with pytest.raises(ValueError, match=r"normalizer=.*> 0"):
        linear_cross_entropy(*inputs(3, 5, 2), normalizer=normalizer)


def test_inputs_that_do_not_fit_raise() -> None:
    x, weight, labels = inputs(3, 5, 2)
    with pytest.raises(TypeError, match=r"weight has dtype torch\.float32"):
        linear_cross_entropy(x, weight.float(), labels)
    with pytest.raises(ValueError, match="weight is on meta"):
        linear_cross_entropy(x, weight.to("meta"), labels)
    with pytest.raises(ValueError, match="labels are on meta"):
        linear_cross_entropy(x, weight, labels.to("meta"))
    with pytest.raises(ValueError, match="tile="):
        linear_cross_entropy(x, weight, labels, tile=(0, 5))
    with pytest.raises(ValueError, match="normalizer has shape"):
        linear_cross_entropy(x, weight, labels, normalizer=torch.ones(2))
    with pytest.raises(ValueError, match=r"weight has shape \(5, 1\)"):
        op._check_weight(x, weight[:, :1])
    with pytest.raises(ValueError, match=r"labels have shape \(2,\)"):
        op.check_inputs(x, labels[:2], 1.0, "x")
    with pytest.raises(TypeError, match="labels have dtype"):
        op.check_inputs(x, labels.double(), 1.0, "x")
    with pytest.raises(TypeError, match="x has dtype"):
        op.check_inputs(labels[:, None], labels, 1.0, "x")


# --- memory ---------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.count += not func.is_view and name not in ("empty", "empty_like", "promote_types")
        return func(*args, **(kwargs or {}))


class SumsOnMeta(TorchDispatchMode):
    """Returns the sum to which a product is added with `out_dtype`: torch 2.11 has no shapes of it
    on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    with SumsOnMeta():
        some, more = (extra_bytes(t, num * tile[1], d, dtype, tile) for num in (2, 4))
    assert some == more
    assert t * tile[1] < some if device == "cuda" else some <= 0.05 * t * v * dtype.itemsize
    # elementwise work of the reference has two tiles at once
    assert some <= 2 * (4 + dtype.itemsize) * tile[0] * tile[1] + 4 * t * d


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
        op, "fastest", lambda operation, *_, **__: getattr(Kernels, operation.__name__)
    )
    t, v, d = 8192, 102400, 2048
    rows, columns = op.gpu_tile(t)
    num_tiles = (t // rows) * (v // columns)
    with SumsOnMeta(), Launches() as launches:
        extra_bytes(t, v, d, torch.bfloat16, (rows, columns))
    assert 6 * num_tiles <= launches.count <= 600


def test_the_products_are_four(monkeypatch: pytest.MonkeyPatch) -> None:
    t, v, d = 64, 100, 32
    done = 0

    def counting(original: Any, operands: slice) -> Any:
        def wrapped(*args: Tensor) -> Any:
            nonlocal done
            a, b = args[operands]
            done += a.shape[0] * a.shape[1] * b.shape[1]
            return original(*args)

        return wrapped

    monkeypatch.setattr(op._ProductPlan, "product", counting(op._ProductPlan.product, slice(1, 3)))
    monkeypatch.setattr(
        op._ProductPlan, "add_product_", counting(op._ProductPlan.add_product_, slice(2, 4))
    )
    linear_cross_entropy(*inputs(t, v, d), tile=(16, 30)).backward()
    assert done == 4 * t * v * d


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
    results = []
    for module in (reference, triton):
        state = [
            torch.full((len(logits),), -torch.inf),
            torch.zeros(len(logits)),
            torch.full((len(logits),), 0.5),
        ]
        for part in (logits, logits.flip(0) if first else logits - 2):
            module.update_logsumexp_(*state, part.clone(), labels, first)
        results.append(state)
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    if len(logits) > 1:
        wide = torch.cat([logits, logits.flip(0) if first else logits - 2], 1).double()
        torch.testing.assert_close(
            (results[0][0] + results[0][1].log()).double(), wide.logsumexp(1), rtol=1e-6, atol=1e-6
        )
        assert not torch.allclose(1.01 * results[1][1], results[0][1], rtol=1e-3)


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
    expected, actual = (
        module.softmax_gradient(
            logits.clone(), labels, first, logsumexp, scale, z_loss=0.01, dtype=dtype
        )
        for module in (reference, triton)
    )
    assert actual.dtype == expected.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-6)
    assert not expected[3::7].any()
    inside = (labels >= first) & (labels < first + logits.shape[1])
    assert ((expected < 0).sum(1) == inside).all()
    if expected.numel():
        assert not torch.allclose(1.01 * actual, expected, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_whole_operation_on_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, labels = inputs(13, 63, 8, dtype)

    def run() -> list[Tensor]:
        return with_gradients(
            linear_cross_entropy(x, weight, labels, z_loss=1e-3, normalizer=7.0, tile=(8, 25)),
            x,
            weight,
        )

    expected = run()
    calls: list[Any] = []
    original = triton.softmax_gradient
    monkeypatch.setattr(
        triton,
        "softmax_gradient",
        lambda *args, **options: calls.append(args) or original(*args, **options),
    )
    monkeypatch.setattr(backend, "use_triton", lambda *tensors: True)
    assert largest_error(run(), expected) < max(3e-6, torch.finfo(dtype).eps)
    assert len(calls) == 6
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    # in fp64 the reference runs
    assert (
        largest_error(run(), with_gradients(plain(x, weight, labels, 1e-3, 7.0), x, weight)) < 1e-12
    )
    assert len(calls) == 6
