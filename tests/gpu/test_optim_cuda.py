"""The optimizers on a CUDA device: the CPU's numbers, whatever the streams, and no waiting for the
device for each parameter."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lather.optim import KLSOAP, SOAP, MatrixOptimizer, StackedSOAP
from lather.optim.linalg import split_products
from lather.optim.linalg.eigenbasis import iterate
from lather.optim.linalg.split_products import (
    SPLIT_ERROR,
    SplitMatrix,
    is_split,
    operand,
    split_product,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(64, 128)] * 6 + [(4, 48, 32), (64,), (70, 33), (70, 33)]


def shapes_for(cls: type[MatrixOptimizer]) -> list[tuple[int, ...]]:
    """The shapes for an optimizer; stacks have to be of matrices."""
    return [shape for shape in SHAPES if len(shape) > 1 or cls is not StackedSOAP]


def trained(
    cls: type[MatrixOptimizer], device: str, steps: int = 8, **options: Any
) -> tuple[list[torch.Tensor], MatrixOptimizer]:
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        for shape in shapes_for(cls)
    ]
    optimizer = cls(
        params,
        lr=1e-2,
        adam_warmup_steps=3,
        precondition_frequency=2,
        second_moment="rotate",
        **options,
    )
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return [p.detach().cpu() for p in params], optimizer


@pytest.mark.parametrize("cls", [SOAP, KLSOAP, StackedSOAP], ids=["SOAP", "KLSOAP", "StackedSOAP"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"refresh_method": "qr"},
        {"refresh_method": "cholesky_qr"},
        {"first_bases": "iteration"},
        {"num_streams": 3},
    ],
    ids=str,
)
def test_cuda_agrees_with_the_cpu(cls: type[MatrixOptimizer], options: dict[str, Any]) -> None:
    # "auto" means something else on another kind of device
    options = {
        "first_bases": "eigh",
        "fp32_matmul_prec": "highest",
        **options,
    }
    on_cuda, _ = trained(cls, "cuda", **options)
    on_cpu, _ = trained(cls, "cpu", **options)
    for p, expected in zip(on_cuda, on_cpu, strict=True):
        torch.testing.assert_close(p, expected, rtol=0, atol=2e-4)


def test_the_device_is_waited_for_a_fixed_number_of_times_per_step() -> None:
    def waits(num: int) -> int:
        params = [torch.nn.Parameter(torch.randn(48, 64, device="cuda")) for _ in range(num)]
        optimizer = SOAP(params, precondition_frequency=1)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            optimizer.step()
        return sum(
            event.count
            for event in profiler.key_averages()
            if event.key in ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
        )

    assert waits(4) == waits(64)


def test_temporary_memory_keeps_to_the_bound() -> None:
    params = [torch.nn.Parameter(torch.randn(256, 512, device="cuda")) for _ in range(32)]
    optimizer = SOAP(params, precondition_frequency=1, bucket_bytes=2**25)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 2**25


@pytest.mark.parametrize("cls", [SOAP, KLSOAP, StackedSOAP], ids=["SOAP", "KLSOAP", "StackedSOAP"])
def test_offloaded_state_gives_the_same_bits_and_leaves_the_device(
    cls: type[MatrixOptimizer],
) -> None:
    """In chunks of one matrix, which are equal without offload."""
    expected, plain = trained(cls, "cuda", bucket_bytes=1)
    found, optimizer = trained(cls, "cuda", bucket_bytes=1, offload=True)
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    states = (one.state_dict()["state"].values() for one in (plain, optimizer))
    for theirs, ours in zip(*states, strict=True):
        for name, x in ours.items():
            assert x.device.type == "cpu", name
            assert name == "step" or x.is_pinned(), name
            assert torch.equal(x, theirs[name].cpu()), name


def test_visits_keep_to_the_bound() -> None:
    params = [torch.nn.Parameter(torch.randn(256, 512, device="cuda")) for _ in range(64)]
    optimizer = SOAP(params, precondition_frequency=1, bucket_bytes=2**26, offload=True)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2**26
    assert torch.cuda.memory_allocated() == before


def trained_with_streams(
    cls: type[MatrixOptimizer], *, async_refresh: bool, busy: bool
) -> tuple[list[torch.Tensor], MatrixOptimizer]:
    """Train, and return parameters and state. If `busy`, the caller's stream works, and takes and
    frees memory, between the steps."""
    generator = torch.Generator().manual_seed(0)
    # a QR of these takes far longer than the host needs for a step
    shapes = [
        *shapes_for(cls),
        (768, 1024),
        (768, 1024),
    ]
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to("cuda")) for shape in shapes
    ]
    optimizer = cls(
        params, lr=1e-2, precondition_frequency=2, refresh_method="qr", async_refresh=async_refresh
    )
    for _ in range(8):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to("cuda")
        optimizer.step()
        if busy:
            x = torch.randn(1024, 1024, device="cuda")
            for _ in range(8):
                x = x @ x / 32
            del x
            torch.full((64, 2**16), torch.nan, device="cuda")
    return [p.detach().cpu() for p in params], optimizer


@pytest.mark.parametrize("busy", [False, True])
def test_refreshes_beside_the_forward_are_there_for_the_next_step(busy: bool) -> None:
    expected, plain = trained_with_streams(SOAP, async_refresh=False, busy=False)
    found, optimizer = trained_with_streams(SOAP, async_refresh=True, busy=busy)
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    for theirs, ours in zip(
        plain.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(value, ours[key]) for key, value in theirs.items())


@pytest.mark.parametrize("cls", [KLSOAP, StackedSOAP], ids=["KLSOAP", "StackedSOAP"])
def test_refreshes_beside_the_forward_repeat_to_the_bit(cls: type[MatrixOptimizer]) -> None:
    one, _ = trained_with_streams(cls, async_refresh=True, busy=False)
    other, _ = trained_with_streams(cls, async_refresh=True, busy=True)
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def test_the_host_does_not_wait_for_a_refresh_beside_the_forward() -> None:
    params = [torch.nn.Parameter(torch.randn(48, 64, device="cuda")) for _ in range(4)]
    optimizer = SOAP(
        params,
        precondition_frequency=1,
        refresh_method="qr",
        nonfinite="ignore",
        async_refresh=True,
    )
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    optimizer.state_dict()  # afterwards nothing is under way
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    optimizer.state_dict()


@pytest.mark.parametrize("power", [1, 2, 4])
@pytest.mark.parametrize("n", [512, 1024])
def test_split_refreshes_are_orthonormal_and_as_diagonal_as_in_true_fp32(
    n: int, power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(4, n, n, generator=generator, device="cuda", dtype=torch.float64)
    noise = torch.randn(4, n, n, generator=generator, device="cuda", dtype=torch.float64)
    u = torch.linalg.qr(x).Q
    w = torch.arange(1, n + 1, device="cuda").double() ** -power
    k, q = ((u * w) @ u.mT).float(), torch.linalg.qr(u + 0.05 / n**0.5 * noise).Q.float()
    assert is_split(k)
    left = []
    for split in (True, False):
        if not split:
            monkeypatch.setattr(split_products, "LEAST_SIZE", 2 * n)
        found, _, failed = iterate(k, q, 1, "root_qr")
        assert not failed.any()
        basis = found.double()
        off = basis.mT @ basis - torch.eye(n, device="cuda")
        assert float(off.abs().max()) <= 1e-5
        rotated = basis.mT @ k.double() @ basis
        rest = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
        left.append(float(rest.norm() / rotated.norm()))
    assert left[0] <= 1.02 * left[1] + 1e-4


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_a_matrix_have_the_bits_of_the_reference(transposed: bool) -> None:
    x = torch.randn(3, 700, 333, generator=torch.Generator().manual_seed(0))
    x[1, 3, 5], x[2, 0, 0] = torch.inf, 1e-37
    x = (x.mT if transposed else x)[:, 17:]
    parts, on_cuda = operand(x, split=True), operand(x.cuda(), split=True)
    assert isinstance(parts, SplitMatrix)
    assert isinstance(on_cuda, SplitMatrix)
    for a, b in ((parts.hi, on_cuda.hi), (parts.mid, on_cuda.mid)):
        assert torch.equal(a.nan_to_num(7.0), b.cpu().nan_to_num(7.0))


@pytest.mark.parametrize("n", [512, 1024])
def test_the_error_of_a_split_product_is_as_stated(n: int) -> None:
    generator = torch.Generator("cuda").manual_seed(n)
    a, b = (torch.randn(4, n, n, generator=generator, device="cuda") for _ in range(2))
    expected = a.double() @ b.double()
    found = torch.empty(4, 2 * n, n, device="cuda")[:, n:]  # rows of larger matrices
    split_product(operand(a, split=True), operand(b.mT, split=True).mT, out=found)
    error = (found.double() - expected).norm() / expected.norm()
    assert 0.5 * SPLIT_ERROR < float(error) < 1.2 * SPLIT_ERROR
