"""The memory that a process may still take: the least of what the machine, its container and its
own limits leave."""

import resource
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
