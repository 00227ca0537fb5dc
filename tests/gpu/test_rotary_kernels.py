"""The rotation of a part of each head, and heads that share a rotary key, on a CUDA device: the
numbers of the reference on the CPU, the same bits in every run, and the bandwidth reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.clock import milliseconds
from lather.kernels.rotary import join_shared_key, reference, rotate_part

try:
    from lather.kernels.rotary import triton
except ModuleNotFoundError:
    triton = None  # type: ignore[assignment]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HALVES = pytest.mark.parametrize("halves", [False, True], ids=["pairs", "halves"])
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 3e-3}
# B, S, H, N, R, U
SIZES = [
    (2, 63, 3, 20, 6, 9),
    (1, 500, 16, 128, 64, 128),
    (2, 17, 128, 128, 64, 128),
    (1, 1, 1, 1, 2, 1),
    (2, 0, 3, 4, 2, 4),
]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def tables(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    wide = torch.promote_types(dtype, torch.float32)
    angles = 6 * torch.rand(shape, generator=generator, dtype=wide)
    return angles.cos(), angles.sin()


def with_gradients(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: list[Tensor],
    constants: tuple[Tensor, ...],
    grads: list[Tensor],
    device: str,
) -> list[Tensor]:
    """Return the results on a device, and the gradients of the inputs."""
    leaves = [x.to(device).requires_grad_() for x in inputs]
    results = function(*leaves, *(x.to(device) for x in constants))
    gradients = torch.autograd.grad(results, leaves, [x.to(device) for x in grads])
    return [x.detach() for x in (*results, *gradients)]


def assert_same(on_cuda: list[Tensor], on_cpu: list[Tensor], dtype: torch.dtype) -> None:
    """Check that results are close, and would not be if the expected ones were 1 % larger."""
    for actual, expected in zip(on_cuda, on_cpu, strict=True):
        assert actual.is_cuda
        assert actual.shape == expected.shape
        assert actual.dtype == dtype
        wide, limit = expected.double(), TOLERANCE[dtype] * expected.double().norm()
        assert torch.dist(actual.double().cpu(), wide) <= limit
        assert not wide.any() or torch.dist(1.01 * wide, wide) > limit


@HALVES
@pytest.mark.parametrize("packed", [False, True], ids=["one row", "packed"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_heads(dtype: torch.dtype, sizes: tuple[int, ...], packed: bool, halves: bool) -> None:
    b, s, h, n, r, u = sizes
    angles = tables(b if packed else 1, s, r // 2, dtype=dtype)
    x, grad, kv, grad_k, grad_v, k = drawn(
        *((b, s, h, width) for width in (n + r, n + r, n + u, n + r, u)), (b, s, r), dtype=dtype
    )
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad_k, grad_v)]

    def joined(kv: Tensor, k: Tensor, *angles: Tensor) -> tuple[Tensor, Tensor]:
        return join_shared_key(kv, k, *angles, halves=halves, size=n)

    for last in (False, True):

        def part(x: Tensor, *angles: Tensor, last: bool = last) -> tuple[Tensor]:
            return (rotate_part(x, *angles, halves=halves, last=last),)

        results = [with_gradients(part, [x], angles, [grad], each) for each in ("cuda", "cpu")]
        assert_same(*results, dtype)
    for grads in ([grad_k, grad_v], by_head):
        results = [
            with_gradients(joined, [kv, k], angles, grads, each) for each in ("cuda", "cuda", "cpu")
        ]
        assert_same(*results[1:], dtype)
        assert all(first.equal(second) for first, second in zip(*results[:2], strict=True))


def test_what_is_not_finite_stays_in_its_place() -> None:
    x, kv, k = (
        each.cuda() for each in drawn((1, 9, 4, 12), (1, 9, 4, 16), (1, 9, 4), dtype=torch.bfloat16)
    )
    angles = [table.cuda() for table in tables(1, 9, 2, dtype=torch.bfloat16)]
    x[0, 5, 1, 10], k[0, 5, 2] = torch.nan, torch.inf
    y = rotate_part(x, *angles, halves=False, last=True)
    keys, values = join_shared_key(kv, k, *angles, halves=False, size=8)
    assert y.isfinite().logical_not().nonzero().tolist() == [[0, 5, 1, 10], [0, 5, 1, 11]]
    assert keys.isfinite().logical_not().sum(-1).flatten().tolist() == [0] * 20 + [2] * 4 + [0] * 12
    assert values.isfinite().all()


def test_bandwidth_is_reported(record_property: Callable[[str, object], None]) -> None:
    """The sizes are DeepSeek-V2-Lite's heads at 65,536 tokens in bf16: GB/s of the bytes that have
    to be read and written, of the kernels and of torch's concatenations, and of a device copy of as
    many."""
    torch.use_deterministic_algorithms(False)  # otherwise the poisoning would be timed, too
    device, b, s, h = torch.device("cuda"), 16, 4096, 16

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, kv, k, grad_v = (
        randn(b, s, h, 192),
        randn(b, s, h, 256),
        randn(b, s, 64),
        randn(b, s, h, 128),
    )
    angles = [table.cuda() for table in tables(1, s, 32, dtype=torch.bfloat16)]

    def turned(source: ModuleType) -> Tensor:
        return source.turn(x, *angles, halves=False, last=True)

    def joined(source: ModuleType) -> Tensor:
        return source.join_keys(kv[..., :128], k, *angles, halves=False)

    def gradient(source: ModuleType) -> tuple[Tensor, Tensor]:
        return source.keys_gradient(x, grad_v, *angles, halves=False)

    for function, columns in ((turned, 384), (joined, 320), (gradient, 576)):
        num_bytes = 2 * b * s * h * columns
        source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        kernel, composed, copy = (
            num_bytes / milliseconds(run, device, 20)["median"] / 1e6
            for run in (
                partial(function, triton),
                partial(function, reference),
                partial(target.copy_, source),
            )
        )
        line = (
            f"{function.__name__}: {kernel:.0f} GB/s; torch's operations {composed:.0f} GB/s; "
            f"device copy {copy:.0f} GB/s"
        )
        record_property(function.__name__, line)
        print(line)
