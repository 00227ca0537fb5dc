"""The memory of the host, and the memory that this process may still take: what a machine, its
container and the limits of the process leave."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lather.device import gpu_module, is_gpu
from lather.files import read_text

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Names the control groups of this process, a line for each hierarchy."""
LIMITS = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}
"""Limits of a process, and the line of /proc/self/status that counts what they limit."""


@dataclass(frozen=True)
class CgroupNames:
    """The names of files in the folder of a control group."""

    limit: str
    use: str
    idle: str
    """Name in `statistics` of the pages of files that were not used lately, in the group and in
    those inside it."""
    statistics: str = "memory.stat"


SECOND_VERSION = CgroupNames("memory.max", "memory.current", "inactive_file")
FIRST_VERSION = CgroupNames("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""A group without a limit has a limit there that is larger than any memory."""


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
    """Yield limit and use of the control groups of this process and of those around them. Pages of
    files that were not used lately are given back, and do not count."""
    with contextlib.suppress(OSError):
        for line in read_text(MEMBERSHIP).splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0":
                yield from _limits_around(CGROUPS, path, SECOND_VERSION)
            elif "memory" in controllers.split(","):
                yield from _limits_around(CGROUPS / "memory", path, FIRST_VERSION)


def _limits_around(root: Path, path: str, names: CgroupNames) -> Iterator[tuple[int, int]]:
    """Yield limit and use of the control group `path` below the folder of all groups, and of those
    around it. A container may see its own group as that folder, without the group's path."""
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or "max"
            limit = int(read_text(folder / names.limit))
            lines = read_text(folder / names.statistics).splitlines()
            idle = int(dict(line.split() for line in lines)[names.idle])
            yield limit, int(read_text(folder / names.use)) - idle
        if folder == root:
            return
