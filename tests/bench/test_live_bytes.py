"""`PeakBytes` on sequences whose bytes are known, and against the CPU allocator's bytes in the
profiler's record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.live_bytes import PeakBytes
from lather.kernels.linear_cross_entropy import linear_cross_entropy


def new(num_bytes: int, device: str = "cpu") -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def temporaries() -> None:
    new(100)
    new(70)


def kept_together() -> None:
    kept = [new(100), new(70)]
    del kept
    new(150)


def views() -> None:
    x = new(100)
    views = [x.view(10, 10), x[:50], x.view(10, 10).T, x.detach()]
    del x
    new(7)
    del views
    new(90)


def in_place() -> None:
    x = new(100)
    x.zero_().add_(1)[3:].mul_(2)
    torch.add(x, x, out=x)


def shrunk_and_grown() -> None:
    x = new(100)
    x.untyped_storage().resize_(0)
    y = new(80)
    x.untyped_storage().resize_(40)
    y.add_(1)


def resized_by_an_operation() -> None:
    x = new(100)
    x.resize_(250).resize_(0)
    torch.add(new(300), 1, out=x)
    x.set_()
    new(60)


def several_outputs() -> None:
    torch.ones(4).sort()


def made_from_python() -> None:
    torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (temporaries, 100),
        (kept_together, 170),
        (views, 107),
        (in_place, 100),
        (shrunk_and_grown, 120),
        (resized_by_an_operation, 600),
        (several_outputs, 16 + 16 + 32),
        (made_from_python, 8),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_known_sequences(work: Callable[[], None], expected: int) -> None:
    with PeakBytes() as peak:
        work()
    assert peak.bytes == expected
    assert peak.now == 0


def test_growth_after_the_last_operation_counts() -> None:
    with PeakBytes() as peak:
        x = new(10)
        x.untyped_storage().resize_(130)
    assert peak.bytes == peak.now == 130


def test_counts_in_each_other_see_the_same_resizes_whichever_was_made_first() -> None:
    own = torch.UntypedStorage.resize_
    outer, inner = PeakBytes(), PeakBytes()
    with outer:
        x = new(100)
        with inner:
            y = new(10)
            x.untyped_storage().resize_(40)
            y.untyped_storage().resize_(30)
        assert (outer.now, inner.now) == (70, 30)
    assert torch.UntypedStorage.resize_ is own


def test_tensors_from_before_do_not_count_even_when_they_come_back_as_views() -> None:
    before = new(1000)
    with PeakBytes() as peak:
        again = before.view(10, 100)[2:].zero_()
        new(30)
        assert peak.now == 0
        copy = again.clone()
    assert peak.bytes == copy.nbytes == 800


def test_backward_counts_too_on_the_meta_device() -> None:
    x = torch.empty(1000, device="meta", requires_grad=True)
    with PeakBytes() as peak:
        y = x.exp()  # 4000 bytes, saved
        y.sum().backward()  # its gradient is a view of 4 bytes; x's takes 4000 more
    assert x.grad is not None
    assert 8000 <= peak.bytes <= 8016


def test_the_meta_device_can_be_left_out() -> None:
    def work() -> None:
        kept = [new(100), new(9000, "meta")]
        new(50)
        kept[1].add(1)

    with PeakBytes(count_meta=False) as peak:
        work()
    with PeakBytes() as both:
        work()
    assert (peak.bytes, both.bytes) == (150, 18100)


def allocated(work: Callable[[], object], folder: Path) -> int:
    """Return the peak of the CPU allocator's bytes during `work`, from the profiler's record of
    every allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"
    )
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_large_is_hidden_inside_operations_of_the_loss(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 32, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(2000, 32, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 2000, (96,), generator=generator)

    def work() -> object:
        return torch.autograd.grad(
            linear_cross_entropy(x, weight, labels, tile=(32, 100)), (x, weight)
        )

    work()
    with PeakBytes() as peak:
        work()
    assert peak.bytes == pytest.approx(allocated(work, tmp_path), rel=0.1)
