"""The settings of torch's allocator of GPU memory that `lather` makes before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lather import allocator
from lather.allocator import allocator_settings, allocator_variables, has_nvidia_gpu

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_segments_are_expandable_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "has_nvidia_gpu", lambda: True)
    assert allocator_variables({"PATH": "/bin"}) == EXPANDABLE
    assert allocator_settings(EXPANDABLE) == "expandable_segments:True"
    monkeypatch.setattr(allocator, "has_nvidia_gpu", lambda: False)
    assert allocator_variables({"PATH": "/bin"}) == {}


@pytest.mark.parametrize("name", allocator.VARIABLES)
@pytest.mark.parametrize("value", ["", "max_split_size_mb:128", "expandable_segments:False"])
def test_the_users_own_settings_are_kept(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "has_nvidia_gpu", lambda: True)
    assert allocator_variables({name: value}) == {}


def test_torch_reads_the_first_variable_that_is_set() -> None:
    both = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", **EXPANDABLE}
    assert allocator_settings(both) == "max_split_size_mb:128"
    assert allocator_settings({}) == ""


@pytest.mark.parametrize(
    ("names", "is_there"), [([], False), (["nvidiactl"], False), (["nvidia0"], True)]
)
def test_a_gpu_is_a_device_file(
    names: list[str], is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(allocator, "Path", lambda _: tmp_path)
    assert has_nvidia_gpu() == is_there


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from lather.cli import main; main(['completion', 'bash'])", EXPANDABLE),
        ("import lather.optim", {}),
    ],
)
def test_the_command_decides_before_torch_is_imported_and_a_library_does_not(
    code: str, expected: dict[str, str]
) -> None:
    """Ranks are started by commands, or inherit their environment."""
    code = (
        "import importlib, os, sys; from lather import allocator\n"
        "allocator.has_nvidia_gpu = lambda: 'torch' not in sys.modules\n"
        "real = importlib.import_module\n"
        "def spy(name, *package):\n"
        "    print('torch' in sys.modules)\n"
        "    return real(name, *package)\n"
        "importlib.import_module = spy\n"
        f"{code}\n"
        "print({name: value for name, value in os.environ.items() if 'ALLOC_CONF' in name})"
    )
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    command = [sys.executable, "-c", code]
    shown = subprocess.check_output(command, env=environment, text=True, timeout=60).splitlines()
    assert shown[-1] == str(expected)
    assert not expected or shown[0] == "False"
