"""The facts that a rank collects about its machine: versions, GPUs, cores, memory, and the disk of
the run directory."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from lather.allocator import allocator_settings, has_nvidia_gpu
from lather.cores import num_cores, other_programs
from lather.device import is_gpu
from lather.doctor.rates import measure_rates
from lather.files import nearest_folder
from lather.kernels.backend import use_triton
from lather.kernels.rms_norm import reference, rms_norm
from lather.memory_limits import host_memory
from lather.parallel.launch.world import World
from lather.time_model.measured import MeasuredRates
from lather.train.run_dir import provenance

PROBE_BYTES = 64 * 2**20
"""Bytes written to the disk of the run directory, and read from it."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU that a rank can use."""

    name: str
    capability: tuple[int, int]
    """CUDA's compute capability."""
    memory: int
    """Bytes."""
    free: int
    """Bytes that nobody has allocated."""


@dataclass(frozen=True)
class DiskFacts:
    """The disk of the run directory."""

    folder: str
    """The run directory, or the nearest folder above it that exists."""
    free: int
    """Bytes."""
    write: float = 0.0
    """Bytes per second, until they are on the disk; 0: not measured."""
    read: float = 0.0
    """Bytes per second."""
    error: str = ""
    """Why nothing could be written."""


@dataclass(frozen=True)
class RankFacts:
    """A rank and its machine."""

    rank: int
    host: str
    versions: Mapping[str, str]
    """Versions of Lather, Python, CUDA and NCCL, and of the packages that are installed, by
    name."""
    gpus: tuple[GpuFacts, ...]
    has_unseen_gpu: bool
    """The machine has an NVIDIA GPU, and torch finds none."""
    kernel_error: str
    """Why a Triton kernel failed on the GPU; "absent": Triton is not installed; empty: it runs, or
    there is no GPU."""
    cores: int
    """Cores that this process may use."""
    threads: int
    """Threads of torch in this rank."""
    ranks_here: int
    """Ranks on this machine."""
    other_programs: int
    """Threads of other programs that want these cores."""
    memory: int
    """Bytes of the host, or of the container; 0: not known."""
    memory_free: int
    """Bytes."""
    disk: DiskFacts | None
    """The first rank of each machine examines it."""
    sees_run_dir: bool = True
    """Whether a file that rank 0 writes into the run directory is there."""
    allocator: str = ""
    """Settings of torch's allocator of GPU memory; empty: its defaults."""
    rates: MeasuredRates | None = None
    """Rates of the device; None: not measured."""


def find_facts(world: World, device: torch.device, run_dir: Path) -> RankFacts:
    """Return this rank's facts; most of the time goes into the rates, and into writing and reading
    `PROBE_BYTES`."""
    memory, free = host_memory()
    return RankFacts(
        rank=world.rank,
        host=socket.gethostname(),
        versions=versions(),
        gpus=_gpus(world, device),
        has_unseen_gpu=not torch.cuda.is_available() and has_nvidia_gpu(),
        kernel_error=kernel_error(device),
        cores=num_cores(),
        threads=torch.get_num_threads(),
        ranks_here=world.local_size,
        other_programs=other_programs(world.local_size),
        memory=memory,
        memory_free=free,
        disk=probe_disk(run_dir, world.rank) if world.local_rank == 0 else None,
        allocator=allocator_settings(os.environ),
        rates=measure_rates(device),
    )


def requirements() -> list[Requirement]:
    """Return the packages that Lather uses, always or with an extra, without developers' tools;
    none if Lather's metadata are not installed."""
    try:
        lines = metadata.requires("lather") or []
    except metadata.PackageNotFoundError:
        return []
    return [Requirement(line) for line in lines if not re.search(r"extra == .dev.", line)]


def versions() -> dict[str, str]:
    """Return the version of everything that a run's numbers may depend on."""
    lather = provenance()
    commit = lather["commit"] or ""
    versions_of = {
        "lather": f"{lather['lather']} {commit[:12]}{commit[40:]}".rstrip(),
        "python": platform.python_version(),
    }
    for name in dict.fromkeys(requirement.name for requirement in requirements()):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions_of[name] = metadata.version(name)
    versions_of["torch"] = torch.__version__  # with the build, such as +cu128
    if torch.cuda.is_available():
        versions_of["cuda"], versions_of["nccl"] = (
            str(torch.version.cuda),
            ".".join(map(str, torch.cuda.nccl.version())),
        )
    return versions_of


def kernel_error(device: torch.device) -> str:
    """Run a kernel of Lather on a GPU, and return why that failed."""
    if not is_gpu(device):
        return ""
    x = torch.randn(63, 500, device=device)
    if not use_triton(x):
        return "absent"
    try:
        expected = reference.forward(x, x[0], 1e-6)[0]
        difference = float((rms_norm(x, x[0], 1e-6) - expected).abs().max() / expected.abs().max())
    except Exception as error:  # a compiler may fail in any way
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return "" if difference < 1e-5 else f"RMSNorm is off by {difference:.2g}"


def probe_disk(run_dir: Path, rank: int = 0, num_bytes: int = PROBE_BYTES) -> DiskFacts:
    """Write a file beside the run's, wait until it is on the disk, read it, and delete it; the run
    directory is not made."""
    folder = nearest_folder(run_dir)
    free = shutil.disk_usage(folder).free
    if free < 2 * num_bytes:
        return DiskFacts(str(folder), free)
    file, block = probe_file(folder, f"disk-{rank}"), os.urandom(2**20)
    try:
        start = time.perf_counter()
        with file.open("wb") as out:
            for _ in range(num_bytes // len(block)):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
            written = time.perf_counter()
            if hasattr(os, "posix_fadvise"):
                # what is in memory would be read from there
                os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        opened = time.perf_counter()
        with file.open("rb", buffering=0) as source:
            while source.read(len(block)):
                pass
        read = time.perf_counter()
    except OSError as error:
        return DiskFacts(str(folder), free, error=error.strerror or str(error))
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    return DiskFacts(str(folder), free, num_bytes / (written - start), num_bytes / (read - opened))


def probe_file(folder: Path, name: str) -> Path:
    """Return the path of a file for measuring, with which no run's file can be confused."""
    return folder / f".lather-doctor-{name}"


def _gpus(world: World, device: torch.device) -> tuple[GpuFacts, ...]:
    """Return the rank's GPU, or all that a single process sees."""
    if not is_gpu(device):
        return ()
    gpus = []
    for index in (
        range(torch.cuda.device_count()) if world.size == 1 else [world.device(device).index]
    ):
        properties, (free, memory) = (
            torch.cuda.get_device_properties(index),
            torch.cuda.mem_get_info(index),
        )
        gpus.append(GpuFacts(properties.name, (properties.major, properties.minor), memory, free))
    return tuple(gpus)
