"""Which devices count as GPUs, and that the package asks nowhere else."""

import re
from pathlib import Path

import torch

from lather.device import is_gpu, launching_on

SOURCE = Path(__file__).parents[1] / "src" / "lather"
ASKS = re.compile(r"\.is_cuda\b|\.type\s*[!=]=\s*\"cuda\"")


def test_everything_with_memory_but_the_cpu_is_a_gpu() -> None:
    assert [is_gpu(torch.device(kind)) for kind in ("cpu", "meta", "cuda", "cuda:1", "privateuseone")] == [False, False, True, True, True]
    assert not is_gpu(torch.zeros(1))
    assert not is_gpu(torch.zeros(1, device="meta"))


def test_tensors_elsewhere_are_launched_on_without_a_current_gpu() -> None:
    with launching_on(torch.zeros(1)):
        pass


def test_nobody_asks_a_tensor_whether_it_is_on_cuda() -> None:
    assert ASKS.search('x.is_cuda and y.device.type == "cuda"')
    found = {f"{path.relative_to(SOURCE)}: {match[0]}" for path in SOURCE.rglob("*.py") for match in ASKS.finditer(path.read_text())}
    assert not found, f"ask lather.device.is_gpu instead: {sorted(found)}"
