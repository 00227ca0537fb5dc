"""Loss kernels and the optimizer's kernel on a CUDA device: the same numbers, memory as the
allocator sees it, no waiting, bandwidth.

Kernels are imported in the tests, not above: where there is no device they would be decorated
before the interpreter is asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.kernels.adam_in_basis import adam_in_basis
from lather.kernels.backend import wide_product
from lather.kernels.cross_entropy import cross_entropy_
from lather.kernels.linear_cross_entropy import (
    GPU_TILE_ELEMENTS,
    gpu_tile,
    linear_cross_entropy,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Raise an error, inside the block, if something waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def inputs(t: int, v: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(t, d, generator=generator, device="cuda").to(dtype).requires_grad_()
    weight = (
        torch.randn(v, d, generator=generator, device="cuda").mul(0.3).to(dtype).requires_grad_()
    )
    labels = torch.randint(0, v, (t,), generator=generator, device="cuda")
    labels[2::5] = -100
    return x, weight, labels


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return plain_of(F.linear(x.double(), weight.double()), labels)


def plain_of(logits: Tensor, labels: Tensor) -> Tensor:
    z = logits.logsumexp(-1) * (labels != -100)
    return (F.cross_entropy(logits, labels, reduction="sum") + 1e-3 * z.square().sum()) / 50


def largest_error(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    pairs = zip(actual, expected, strict=True)
    errors = (
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
        for a, b in pairs
        if b.numel()
    )
    return max(errors, default=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(63, 500, 16), (1, 3, 8), (5000, 1500, 64), (0, 5, 4)], ids=str)
def test_linear_cross_entropy(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, labels = inputs(*size, dtype)
    loss = linear_cross_entropy(x, weight, labels, z_loss=1e-3, normalizer=50.0)
    expected = plain(x, weight, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    actual = torch.autograd.grad(loss, (x, weight))
    assert largest_error(actual, torch.autograd.grad(expected, (x, weight))) < max(
        2 * torch.finfo(dtype).eps, 1e-5
    )


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_cross_entropy_under_autocast(x_dtype: torch.dtype) -> None:
    x, weight, labels = inputs(300, 1500, 64, torch.float32)
    x = x.detach().to(x_dtype).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels, z_loss=1e-3, normalizer=50.0)
    actual = torch.autograd.grad(loss, (x, weight))
    rounded = [a.detach().bfloat16().requires_grad_() for a in (x, weight)]
    expected = plain(*rounded, labels)
    assert [a.dtype for a in actual] == [x_dtype, torch.float32]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert largest_error(actual, torch.autograd.grad(expected, rounded)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_wide_products_are_added_to_a_sum_and_not_rounded(
    dtype: torch.dtype, is_transposed: bool
) -> None:
    """The sum is a part of the rows of a larger one, whose other rows stay."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(300, 300, generator=generator, device="cuda").to(dtype) for _ in range(2))
    a = a.T if is_transposed else a
    sums = torch.randn(500, 300, generator=generator, device="cuda")
    before, exact = sums.clone(), a.double() @ b.double()
    assert largest_error((wide_product(a, b),), (exact,)) < 1e-5
    total = sums[100:400]
    assert wide_product(a, b, total) is total
    assert largest_error((total,), (before[100:400].double() + exact,)) < 1e-5
    assert torch.equal(sums[:100], before[:100])
    assert torch.equal(sums[400:], before[400:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(63, 500), (1, 3), (300, 10001), (0, 5)], ids=str)
def test_cross_entropy_in_place(size: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(size, generator=generator, device="cuda").mul(3).to(dtype).requires_grad_()
    labels = torch.randint(0, size[1], size[:1], generator=generator, device="cuda")
    labels[2::5] = -100
    loss = cross_entropy_(x * 1, labels, z_loss=1e-3, normalizer=50.0)
    expected = plain_of(x.double(), labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (actual,) = torch.autograd.grad(loss, x)
    assert largest_error((actual,), torch.autograd.grad(expected, x)) < max(
        torch.finfo(dtype).eps, 1e-5
    )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 21, 33), (500, 63), (1,), (0, 4)], ids=str)
def test_adam_in_basis(shape: tuple[int, ...], moments: torch.dtype, nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    on_cpu = [torch.randn(shape, generator=generator) for _ in range(3)]
    on_cpu = [on_cpu[0], on_cpu[1].to(moments), on_cpu[2].square().to(moments)]
    on_cuda = [x.cuda() for x in on_cpu]
    u, expected = (
        adam_in_basis(*some, 3, betas=(0.9, 0.95), eps=1e-8, nesterov=nesterov)
        for some in (on_cuda, on_cpu)
    )
    assert largest_error((u.cpu(),), (expected,)) < 2e-6
    assert largest_error(tuple(x.cpu() for x in on_cuda[1:]), tuple(on_cpu[1:])) < max(
        2e-6, torch.finfo(moments).eps
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("no_waiting")
def test_losses_do_not_wait_for_the_device(in_place: bool) -> None:
    x, weight, labels = inputs(64, 500, 16, torch.bfloat16)
    count = (labels != -100).sum()
    if in_place:
        loss = cross_entropy_(F.linear(x, weight), labels, normalizer=count)
    else:
        loss = linear_cross_entropy(x, weight, labels, normalizer=count)
    loss.backward()


WRONG_LABEL = """
import torch
from lather.kernels.{module} import {name}
x = torch.ones(4, 8, device="cuda")
weight = [torch.ones(8, 8, device="cuda")] if "{name}" == "linear_cross_entropy" else []
{name}(x, *weight, torch.tensor([0, 1, 8, 2], device="cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [("cross_entropy", "cross_entropy_"), ("linear_cross_entropy", "linear_cross_entropy")],
)
def test_a_label_out_of_range_fails_an_assertion_on_the_device(module: str, name: str) -> None:
    script = WRONG_LABEL.format(module=module, name=name)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode != 0
    assert "Assertion" in result.stderr  # a product that follows raises an error of cuBLAS's own


def peak_of(work: Callable[[], object]) -> int:
    """Return the most bytes that the allocator gave out during `work`, beyond those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_linear_cross_entropy_is_that_of_a_tile(dtype: torch.dtype) -> None:
    num_tokens, width, vocabulary = 8192, 1024, 65536
    x, weight, labels = inputs(num_tokens, vocabulary, width, dtype)
    linear_cross_entropy(
        x[:8], weight[:600], labels[:8] % 600
    ).backward()  # cuBLAS allocates its workspace
    x.grad = weight.grad = None
    tile = 4 * GPU_TILE_ELEMENTS
    losses: list[Tensor] = []
    assert peak_of(lambda: losses.append(linear_cross_entropy(x, weight, labels))) <= 1.1 * tile
    gradients = x.nbytes + weight.nbytes
    # bf16: the gradient of the tile, and fp32 sums of dx and of the dW of a run of columns
    wider = (
        0
        if dtype == torch.float32
        else tile // 2 + 4 * width * (num_tokens + gpu_tile(num_tokens)[1])
    )
    assert peak_of(losses[0].backward) - gradients <= 1.1 * (tile + wider)


def test_memory_of_cross_entropy_in_place() -> None:
    x, _, labels = inputs(1024, 50000, 1, torch.bfloat16)
    logits = x.expand(1024, 50000) * 1
    num_bytes = logits.nbytes
    assert peak_of(lambda: cross_entropy_(logits, labels)) < 0.01 * num_bytes


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of `work` on the device."""
    times = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[3:])[repeats // 2]


def test_bandwidth_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    from lather.kernels.cross_entropy import triton as cross_entropy
    from lather.kernels.linear_cross_entropy import triton as linear

    source = torch.zeros(2**28, device="cuda")
    target = torch.empty_like(source)
    g, m, v = (torch.rand(2**27, device="cuda") for _ in range(3))
    logits = torch.randn(4096, 102400, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 102400, (4096,), device="cuda")
    tile = torch.randn(4096, 512, device="cuda")
    rows = [torch.zeros(4096, device="cuda") for _ in range(3)]
    scale = torch.ones((), device="cuda")
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "device copy": (2 * source.nbytes, lambda: target.copy_(source)),
        "adam_in_basis": (
            6 * g.nbytes,
            lambda: adam_in_basis(g, m, v, 3, betas=(0.9, 0.95), eps=1e-8),
        ),
        "cross_entropy_ (loss)": (
            logits.nbytes,
            lambda: cross_entropy.token_losses(logits, labels, z_loss=0.0),
        ),
        "cross_entropy_ (loss and gradient)": (
            3 * logits.nbytes,
            lambda: cross_entropy.token_losses(logits, labels, scale, z_loss=0.0),
        ),
        "linear_cross_entropy (logsumexp of a tile)": (
            tile.nbytes,
            lambda: linear.update_logsumexp_(*rows, tile, labels, 0),
        ),
        "linear_cross_entropy (gradient of a tile)": (
            tile.nbytes * 3 // 2,
            lambda: linear.softmax_gradient(
                tile, labels, 0, rows[0], rows[1], z_loss=0.0, dtype=torch.bfloat16
            ),
        ),
    }
    rates = {
        name: num_bytes / milliseconds(work) / 1e6 for name, (num_bytes, work) in cases.items()
    }
    with capsys.disabled():
        print()
        for name, rate in rates.items():
            print(f"{name:45} {rate:8.0f} GB/s  {rate / rates['device copy']:.2f} of a device copy")
    assert all(rate > 0 for rate in rates.values())
