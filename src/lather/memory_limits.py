"""The memory of the host, and the memory that this process may still take: what a machine, its
container and the limits of the process leave."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from lather.device import gpu_module, is_gpu
from lather.files import read_text

CGROUPS = Path("/sys/fs/cgroup")
LIMITS = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}
"""Limits of a process, and the line of /proc/self/status that counts what they limit."""


def host_memory() -> tuple[int, int]:
    """Return the bytes of the host and how many are free, at least 1, within the container's limit;
    0 where the system does not tell."""
    try:
        lines = dict(line.split(":") for line in read_text(Path("/proc/meminfo")).splitlines())
        memory, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except FileNotFoundError:
        return 0, 0
    for limit, used in _container_limits():
        memory, free = min(memory, limit), min(free, limit - used)
    return memory, max(1, free)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still allocate on a device; 0: not known."""
    if is_gpu(device):
        return max(1, int(gpu_module(device).mem_get_info(device)[0]))
    _, free = host_memory()
    for name, line in LIMITS.items():
        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY and (used := _used(line)):
            left = max(1, limit - used)
            free = min(free or left, left)
    return free


def _used(line: str) -> int:
    with contextlib.suppress(OSError):
        counted = re.search(rf"{line}:\s+(\d+) kB", read_text(Path("/proc/self/status")))
        return int(counted[1]) * 1024 if counted else 0
    return 0


def _container_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of the control group of this process and of those around it. Pages of
    files that were not used lately are given back, and do not count."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        own = read_text(Path("/proc/self/cgroup")).strip().rpartition("0::")[2].strip("/")
        for folder in (CGROUPS / own, *(CGROUPS / own).parents):
            if (folder / "memory.max").exists():
                limit = read_text(folder / "memory.max").strip()
                if limit != "max":
                    lines = read_text(folder / "memory.stat").splitlines()
                    idle = int(dict(line.split() for line in lines)["inactive_file"])
                    yield int(limit), int(read_text(folder / "memory.current")) - idle
            if folder == CGROUPS:
                return
