"""Which devices count as GPUs; and that the package asks in one place."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.deterministic

from lather.device import (
    Read,
    deterministic,
    is_gpu,
    is_true,
    launching_on,
    masked,
    positions,
    read,
)
from scripts import printed_by

SOURCE = Path(__file__).parents[1] / "src" / "lather"
ASKS = re.compile(r"\.is_cuda\b|\.type\s*[!=]=\s*\"cuda\"")


def test_everything_with_memory_but_the_cpu_is_a_gpu() -> None:
    assert [
        is_gpu(torch.device(kind)) for kind in ("cpu", "meta", "cuda", "cuda:1", "privateuseone")
    ] == [False, False, True, True, True]
    assert not is_gpu(torch.zeros(1))
    assert not is_gpu(torch.zeros(1, device="meta"))


def test_tensors_elsewhere_are_launched_on_without_a_current_gpu() -> None:
    with launching_on(torch.zeros(1)):
        pass


READS = """
import torch
from lather.device import Read, is_true, masked, positions, read
from lather.standin.mode import StandInMode

with StandInMode() as mode:
    flags, numbers = (torch.ones(4, dtype=dtype, device=mode.device) for dtype in (bool, int))
    assert read(numbers, Read.SAME).tolist() == [1, -1]
    assert not is_true(flags.any(), Read.CHOICE) and is_true(flags.all(), Read.FINITE)
    assert [len(x) for x in positions(flags, Read.EXPERT_ROWS)] == [4]
    assert len(masked(numbers, flags, Read.PAIRS)) == 4
    for beside in (
        lambda: numbers.sum().item(),
        lambda: bool(flags.any()),
        lambda: numbers.cpu(),
        lambda: numbers.to("cpu", non_blocking=True),
        lambda: numbers.tolist(),
        lambda: flags.nonzero(),
        lambda: numbers[flags],
    ):
        try:
            print("passed over", beside())
        except RuntimeError as error:
            assert "with lather.device.read" in str(error), error
"""


FRESH_WEIGHTS = """
import torch
from lather.standin.mode import StandInMode

with StandInMode() as mode:
    stack_EFD = torch.empty(2**20, 2**15, 2**10, device="meta")
    fresh_EFD = torch.empty_like(stack_EFD, device="cpu").normal_(0, 0.02)
    assert fresh_EFD.shape == stack_EFD.shape
    torch.empty(2, 2**15, 2**10, device=mode.device).copy_(fresh_EFD[4:6])
"""


def test_fresh_weights_of_a_stand_in_may_be_larger_than_the_host() -> None:
    """The weights of a stack of 128 TiB take no memory."""
    printed_by(FRESH_WEIGHTS, timeout=200)


def test_values_are_read_in_one_place() -> None:
    """The stand-in answers by the meaning of a read; a read beside `lather.device` raises, in every
    test that runs steps on it."""
    assert not printed_by(READS)


def test_reads_on_a_cpu_give_the_values() -> None:
    x, flags = torch.tensor([3, 4, 5]), torch.tensor([True, False, True])
    assert read(x, Read.ENDS).tolist() == [3, 4, 5]
    assert is_true(flags.any(), Read.CHOICE)
    assert not is_true(flags.all(), Read.CHOICE)
    assert positions(flags, Read.EXPERT_ROWS)[0].tolist() == [0, 2]
    assert masked(x, flags, Read.PAIRS).tolist() == [3, 5]


def test_nobody_asks_a_tensor_whether_it_is_on_cuda() -> None:
    assert ASKS.search('x.is_cuda and y.device.type == "cuda"')
    found = {
        f"{path.relative_to(SOURCE)}: {match[0]}"
        for path in SOURCE.rglob("*.py")
        for match in ASKS.finditer(path.read_text())
    }
    assert not found, f"ask lather.device.is_gpu instead: {sorted(found)}"


def settings() -> tuple[object, ...]:
    options: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        options.fill_uninitialized_memory,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("own", [None, ":16:8"], ids=["unset", "the caller's"])
def test_deterministic_algorithms_are_chosen_inside_and_the_callers_after(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if own:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own)
    before = settings()
    with deterministic(enabled=False):
        assert settings() == before

    def fail_inside() -> None:
        with deterministic():
            assert settings() == (True, False, False, own or ":4096:8")
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert settings() == before
