"""The cores that a process may use, other programs that want them, and how OpenMP's threads
wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lather.cores
from lather.cores import BUSY_SPINS, QUIET_SPINS, num_cores, other_programs, waiting_variables


def put_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let the files of the system have this text, and those that are not named be absent."""

    def read_text(path: Path, *_: object) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)


@pytest.fixture
def twelve_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(12)}, raising=False)
    put_files(monkeypatch, {})
    return monkeypatch


def test_cores_that_a_process_is_bound_to_count(twelve_cores: pytest.MonkeyPatch) -> None:
    twelve_cores.setattr(os, "sched_getaffinity", lambda process: {1, 4, 7} - {process})
    assert num_cores() == 3
    twelve_cores.delattr(os, "sched_getaffinity")  # as on macOS
    assert num_cores() == 12


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000"}, 12),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "9900000 100000"}, 12),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000\n"}, 12),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
    ids=str,
)
def test_a_container_has_its_share_of_the_cores(
    files: dict[str, str], expected: int, twelve_cores: pytest.MonkeyPatch
) -> None:
    """The last two are of the first version of cgroups."""
    put_files(twelve_cores, {f"/sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert num_cores() == expected


def load(running: int) -> dict[str, str]:
    return {"/proc/loadavg": f"0.86 1.71 2.18 {running}/99 5229\n"}


def test_the_smallest_count_is_taken(twelve_cores: pytest.MonkeyPatch) -> None:
    counts: Iterator[int] = iter([9, 4, 7, 3, 5])

    def read_text(path: Path) -> str:
        if path.name != "loadavg":
            raise FileNotFoundError(path)
        return load(next(counts))["/proc/loadavg"]

    twelve_cores.setattr(Path, "read_text", read_text)
    twelve_cores.setattr(lather.cores, "SAMPLE_SECONDS", 0.0)
    assert other_programs() == 2


@pytest.mark.parametrize("files", [{}, {"/proc/loadavg": ""}, load(1), load(0)])
def test_nobody_else_runs_where_the_system_does_not_say_so(
    files: dict[str, str], twelve_cores: pytest.MonkeyPatch
) -> None:
    put_files(twelve_cores, files)
    assert other_programs() == 0


@pytest.mark.parametrize(("running", "others"), [(5, 0), (9, 0), (10, 1), (12, 3)])
def test_programs_on_cores_that_this_process_may_not_use_do_not_count(
    running: int,
    others: int,
    twelve_cores: pytest.MonkeyPatch,
) -> None:
    """A container sees the threads of the whole machine; eight of the others fit on its other
    cores."""
    put_files(twelve_cores, {**load(running), "/sys/fs/cgroup/cpu.max": "400000 100000"})
    assert num_cores() == 4
    assert other_programs() == others
    expected = BUSY_SPINS if others else QUIET_SPINS
    assert waiting_variables({}) == {"GOMP_SPINCOUNT": str(expected)}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"])
def test_the_users_own_setting_is_kept(name: str, twelve_cores: pytest.MonkeyPatch) -> None:
    put_files(twelve_cores, load(9))
    assert waiting_variables({name: "1"}) == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, f"'{QUIET_SPINS}'|'{BUSY_SPINS}'"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_a_command_decides_before_torch_is_imported(given: dict[str, str], expected: str) -> None:
    """GNU's OpenMP reads its variables once, when torch is imported."""
    code = (
        "import importlib, os, sys; real = importlib.import_module\n"
        "def spy(name, *package):\n"
        "    print('torch' in sys.modules, repr(os.environ.get('GOMP_SPINCOUNT')))\n"
        "    return real(name, *package)\n"
        "importlib.import_module = spy\n"
        "from lather.cli import main; main(['completion', 'bash'])"
    )
    environment = {name: value for name, value in os.environ.items() if "OMP" not in name} | given
    command = [sys.executable, "-c", code]
    shown = subprocess.check_output(command, env=environment, text=True, timeout=60)
    assert shown.splitlines()[0] in [f"False {one}" for one in expected.split("|")]
