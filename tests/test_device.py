"""Which devices count as GPUs; and that the package asks in one place."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.deterministic

from lather.device import deterministic, is_gpu, launching_on

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
