"""The memory that a process may still take: the least of what the machine, its container and its
own limits leave."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lather import memory_limits
from lather.memory_limits import free_memory, host_memory

CPU, MIB = torch.device("cpu"), 2**20


def test_a_limit_of_the_process_counts_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is a pretended one: a true one could not be raised again for other tests."""
    unlimited, used = free_memory(CPU), memory_limits._used("VmData")
    assert used > MIB
    limits = {resource.RLIMIT_DATA: used + 64 * MIB}
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (limits.get(kind, resource.RLIM_INFINITY),) * 2
    )
    assert abs(free_memory(CPU) - 64 * MIB) < 8 * MIB
    assert unlimited > 100 * MIB
    limits[resource.RLIMIT_DATA] = used // 2
    assert free_memory(CPU) == 1, "nothing is left, which is not 0, not known"


def test_the_limits_of_control_groups_count_without_idle_pages_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limits, "CGROUPS", tmp_path)
    own = Path("/proc/self/cgroup").read_text().strip().rpartition("0::")[2].strip("/")
    inner = tmp_path / own
    inner.mkdir(parents=True, exist_ok=True)
    outside = host_memory()
    for name, text in {
        "memory.max": f"{256 * MIB}\n",
        "memory.current": f"{100 * MIB}\n",
        "memory.stat": f"anon {60 * MIB}\ninactive_file {30 * MIB}\nactive_file 0\n",
    }.items():
        (inner / name).write_text(text)
    assert host_memory() == (256 * MIB, 186 * MIB)
    (inner / "memory.current").write_text(f"{300 * MIB}\n")
    assert host_memory() == (256 * MIB, 1), "nothing is left, which is not 0, not known"
    assert free_memory(CPU) == 1
    (inner / "memory.max").write_text("max\n")
    assert host_memory()[0] == outside[0] > 256 * MIB


# --- both versions of control groups, nested ------------------------------------------------------

MakeGroup = Callable[..., None]
UNLIMITED = 2**63 - 4096
"""Limit of a group of the first version that has none."""


@pytest.fixture
def make_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeGroup:
    """Make a group in folders that are laid out as /sys/fs/cgroup is."""
    monkeypatch.setattr(memory_limits, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory_limits, "MEMBERSHIP", tmp_path / "membership")

    def make(
        path: str, limit: int | str, used: int = 0, idle: int = 0, *, version: int = 2
    ) -> None:
        folder = tmp_path / "cgroup" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        if version == 2:
            names, stat = ("memory.max", "memory.current"), f"inactive_file {idle}"
        else:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            stat = f"inactive_file 1\ntotal_inactive_file {idle}"
        for name, text in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
            (folder / name).write_text(f"{text}\n")

    return make


FIRST = "11:cpu,cpuacct:/other\n9:memory:/box/job\n1:name=systemd:/init.scope\n"
HYBRID = f"{FIRST}0::/init.scope\n"
SECOND = "0::/box/job\n"


@pytest.mark.parametrize("member", [FIRST, HYBRID])
def test_the_first_version_counts_pages_of_inner_groups(
    tmp_path: Path, make_group: MakeGroup, member: str
) -> None:
    (tmp_path / "membership").write_text(member)
    make_group("memory/box/job", 256 * MIB, 100 * MIB, 30 * MIB, version=1)
    make_group("memory/box", UNLIMITED, 900 * MIB, version=1)
    make_group("memory", UNLIMITED, 900 * MIB, version=1)
    assert host_memory() == (256 * MIB, 186 * MIB)
    assert free_memory(CPU) == 186 * MIB


def test_an_unlimited_group_of_the_first_version_leaves_the_host(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    (tmp_path / "membership").write_text(FIRST)
    outside = host_memory()
    make_group("memory/box/job", UNLIMITED, 100 * MIB, version=1)
    assert host_memory()[0] == outside[0]
    assert abs(host_memory()[1] - outside[1]) < outside[1] / 2


@pytest.mark.parametrize(("member", "version", "root"), [(FIRST, 1, "memory"), (SECOND, 2, "")])
def test_the_tightest_group_around_counts(
    tmp_path: Path, make_group: MakeGroup, member: str, version: int, root: str
) -> None:
    """The inner group has a larger limit than the one around it, or more left, or none at all."""
    (tmp_path / "membership").write_text(member)
    make_group(f"{root}/box", 256 * MIB, 200 * MIB, version=version)
    inner = UNLIMITED if version == 1 else "max"
    for limit in (512 * MIB, inner):
        make_group(f"{root}/box/job", limit, 50 * MIB, version=version)
        assert host_memory() == (256 * MIB, 56 * MIB)
    make_group(f"{root}/box/job", 64 * MIB, 50 * MIB, version=version)
    assert host_memory() == (64 * MIB, 14 * MIB)


@pytest.mark.parametrize(("member", "version", "root"), [(FIRST, 1, "memory"), (SECOND, 2, "")])
def test_a_container_sees_its_group_as_the_root(
    tmp_path: Path, make_group: MakeGroup, member: str, version: int, root: str
) -> None:
    """The path in the membership is that of the host, which is not mounted inside."""
    (tmp_path / "membership").write_text(member)
    make_group(root, 128 * MIB, 28 * MIB, version=version)
    assert host_memory() == (128 * MIB, 100 * MIB)
