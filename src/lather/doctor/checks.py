"""The checks of `lather doctor`: functions from the ranks' facts to findings with a verdict and a
remedy.

Limits of speed find what is misconfigured (a slow network disk, NCCL over TCP, far too many
threads). They are chosen, not measured: a machine in order should be far from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from lather.doctor.facts import PROBE_BYTES, DiskFacts, RankFacts, requirements
from lather.doctor.links import LinkFacts
from lather.durations import duration
from lather.time_model.measured import slowest

Verdict = Literal["ok", "warning", "wrong"]

GB, GIB = 10**9, 2**30
SHOWN = ("lather", "python", "torch", "cuda", "nccl", "triton", "transformers")
"""Packages that have a line of their own also when nothing is wrong with them."""
MIN_CAPABILITY = (8, 0)
"""Compute capability from which GPUs multiply bf16, and for which the kernels are compiled in
CI."""
MIN_GPU_FREE, MIN_HOST_FREE = 0.9, 0.1
"""Shares of memory that should be free before a run."""
MIN_DISK_FREE = 10 * GIB
MIN_DISK_SPEED = 50e6
"""Bytes per second."""
MIN_BANDWIDTH = {"gloo": 0.05 * GB, "nccl": 1.0 * GB}
"""Bytes per second with the largest message."""
MAX_LATENCY = 0.02
"""Seconds."""


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    topic: str
    name: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""


Check = Callable[[Sequence[RankFacts]], Iterator[Finding]]


def check_versions(
    facts: Sequence[RankFacts], needed: Sequence[Requirement] | None = None
) -> Iterator[Finding]:
    """Every package that is needed is installed, new enough, and the same on all ranks."""
    needed = requirements() if needed is None else needed
    first, missing, unlisted = facts[0].versions, [], []
    for name in dict.fromkeys([*first, *(requirement.name for requirement in needed)]):
        wanted = [requirement for requirement in needed if requirement.name == name]
        different = [rank for rank in facts if rank.versions.get(name) != first.get(name)]
        version = first.get(name, "none")
        if different:
            text = f"{version} on rank 0, {different[0].versions.get(name, 'none')} on rank "
            remedy = f"install the same {name} everywhere"
            yield Finding("versions", name, f"{text}{different[0].rank}", "wrong", remedy)
        elif name not in first and all(requirement.marker for requirement in wanted):
            missing.append(name)
        elif name not in first:
            yield Finding("versions", name, "not installed", "wrong", f"pip install '{wanted[0]}'")
        elif old := [
            need for need in wanted if Version(version).base_version not in need.specifier
        ]:
            text = f"{version}, which is not {old[0].specifier}"
            remedy = f"pip install '{name}{old[0].specifier}'"
            yield Finding("versions", name, text, "warning" if old[0].marker else "wrong", remedy)
        elif name in SHOWN:
            yield Finding("versions", name, version)
        else:
            unlisted.append(f"{name} {version}")
    for name, packages in {"others": unlisted, "not installed": missing}.items():
        if packages:
            yield Finding("versions", name, ", ".join(packages))


def check_devices(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """GPUs that torch sees, can use, and that nobody else uses; kernels run on them."""
    gpus = [(rank, gpu) for rank in facts for gpu in rank.gpus]
    if any(rank.has_unseen_gpu for rank in facts):
        host = next(rank.host for rank in facts if rank.has_unseen_gpu)
        remedy = (
            "install a CUDA build of torch that fits the driver (nvidia-smi "
            "shows its CUDA version; pytorch.org/get-started)"
        )
        yield Finding("devices", "GPU", f"{host} has one, and torch sees none", "wrong", remedy)
    elif not gpus:
        yield Finding("devices", "GPU", "none in use: training on the CPU")
    for gpu in dict.fromkeys(gpu.name for _, gpu in gpus):
        same = [(rank, other) for rank, other in gpus if other.name == gpu]
        owner, least = min(same, key=lambda pair: pair[1].free)
        capability = ".".join(map(str, least.capability))
        text = (
            f"{len(same)} x {gpu}, capability {capability}, "
            f"{least.memory / GIB:.1f} GiB, at least {least.free / GIB:.1f} free"
        )
        verdict, remedy = _warning_if(
            least.free / least.memory < MIN_GPU_FREE,
            f"end other programs on the GPU of rank {owner.rank}",
        )
        if least.capability < MIN_CAPABILITY:
            verdict, remedy = (
                "warning",
                'it does not multiply bf16 quickly: train with train.precision = "fp32"',
            )
        yield Finding("devices", "GPU", text, verdict, remedy)
    for settings in dict.fromkeys(rank.allocator for rank, _ in gpus):
        yield Finding("devices", "allocator", settings or "torch's default settings")
    if failed := [rank for rank in facts if rank.kernel_error]:
        text, remedy = (
            f"rank {failed[0].rank}: {failed[0].kernel_error}",
            "Triton needs a C compiler (gcc) and a driver",
        )
        if failed[0].kernel_error == "absent":
            text = "Triton is not installed: slower operations of torch are used"
            remedy = "pip install triton, as torch's CUDA builds for Linux do"
        yield Finding("devices", "Triton kernel", text, "wrong", remedy)
    elif gpus:
        yield Finding("devices", "Triton kernel", "runs, and has the numbers of torch's operations")


def check_threads(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """Ranks of a machine have no more threads than it has cores, and no other programs beside
    them."""
    busiest = max(facts, key=lambda rank: rank.threads * rank.ranks_here / rank.cores)
    text = (
        f"{busiest.cores} cores; {_count(busiest.ranks_here, 'rank')}, each with "
        f"{_count(busiest.threads, 'thread')}{_on(busiest, facts)}"
    )
    remedy = (
        f"set OMP_NUM_THREADS={max(1, busiest.cores // busiest.ranks_here)}, or start fewer ranks"
    )
    yield Finding(
        "devices",
        "CPU",
        text,
        *_warning_if(busiest.threads * busiest.ranks_here > busiest.cores, remedy),
    )
    busy = max(facts, key=lambda rank: rank.other_programs)
    if busy.other_programs:
        text = f"{_count(busy.other_programs, 'other program')} running{_on(busy, facts)}"
        remedy = "end them: steps on the CPU are several times slower beside them"
        yield Finding(
            "devices",
            "load",
            text,
            *_warning_if(busy.other_programs + busy.threads > busy.cores, remedy),
        )


def check_memory(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """Hosts have memory left."""
    known = [rank for rank in facts if rank.memory]
    if known:
        rank = min(known, key=lambda rank: rank.memory_free)
        text = f"{rank.memory_free / GIB:.1f} of {rank.memory / GIB:.1f} GiB free{_on(rank, facts)}"
        yield Finding(
            "memory",
            "host",
            text,
            *_warning_if(rank.memory_free / rank.memory < MIN_HOST_FREE, "end other programs"),
        )


def check_disk(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """The run directory can be written, quickly, has room, and is one for all machines."""
    disks = [(rank, rank.disk) for rank in facts if rank.disk]
    for rank, disk in disks:
        if disk.error:
            yield Finding(
                "disk",
                disk.folder,
                f"cannot be written{_on(rank, facts)}: {disk.error}",
                "wrong",
                "give another --run-dir",
            )
            return
    owner, least = min(disks, key=lambda pair: pair[1].free)
    place = _on(owner, facts)
    yield Finding(
        "disk", "free", f"{least.free / GIB:.1f} GiB in {least.folder}{place}", *_room(least)
    )
    if measured := [(rank, disk) for rank, disk in disks if disk.write]:
        owner, slowest = min(measured, key=lambda pair: pair[1].write)
        text = (
            f"write {slowest.write / 1e6:,.0f} MB/s with fsync, read "
            f"{slowest.read / 1e6:,.0f} MB/s{_on(owner, facts)}"
        )
        remedy = (
            "use a faster disk, or checkpoint.asynchronous = true: training "
            "stands still while checkpoints are written"
        )
        yield Finding(
            "disk",
            "speed",
            text,
            *_warning_if(min(slowest.write, slowest.read) < MIN_DISK_SPEED, remedy),
        )
    if blind := [rank for rank in facts if not rank.sees_run_dir]:
        remedy = (
            "all ranks must see the run directory at one path: put "
            "it on a disk that the machines share"
        )
        yield Finding(
            "disk",
            "one for all ranks",
            f"rank {blind[0].rank} on {blind[0].host} does not see rank 0's",
            "wrong",
            remedy,
        )
    elif len(facts) > 1:
        yield Finding("disk", "one for all ranks", "every rank sees a file that rank 0 has written")


def check_rates(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """The rates of the slowest rank, from which `lather plan` can predict times."""
    if measured := [rank.rates for rank in facts if rank.rates]:
        rates = slowest(measured)
        products = {"fp32": rates.fp32, "TF32": rates.tf32, "bf16": rates.bf16}
        if rates.is_cpu:
            del products["TF32"]
        flops = ", ".join(f"{name} {_flops(flops)}" for name, flops in products.items())
        yield Finding("rates", rates.name, f"a copy {rates.copy / GB:,.1f} GB/s; products {flops}")


CHECKS: tuple[Check, ...] = (
    check_versions,
    check_devices,
    check_threads,
    check_rates,
    check_memory,
    check_disk,
)


def check_links(links: Sequence[LinkFacts]) -> Iterator[Finding]:
    """Messages arrive with the right numbers, and quickly."""
    for backend, operation in dict.fromkeys((link.backend, link.operation) for link in links):
        same = sorted(
            (link for link in links if (link.backend, link.operation) == (backend, operation)),
            key=lambda link: link.num_bytes,
        )
        latency, *others = same
        speeds = [f"{link.bandwidth / GB:.2f} GB/s with {_size(link.num_bytes)}" for link in others]
        text = ", ".join([f"latency {duration(latency.seconds)}", *speeds])
        wait = "ranks wait for cores: set OMP_NUM_THREADS, start fewer ranks, or end other programs"
        verdict, remedy = _warning_if(latency.seconds > MAX_LATENCY, wait)
        if others and others[-1].bandwidth < MIN_BANDWIDTH[backend]:
            verdict, remedy = "warning", f"name the fast network in {backend.upper()}_SOCKET_IFNAME"
            remedy += "; NCCL_DEBUG=INFO shows what it uses" * (backend == "nccl")
        if not all(link.is_right for link in same):
            text, verdict = f"wrong numbers arrived; {text}", "wrong"
            remedy = (
                "a driver, a cable or a GPU is defective: try with "
                "NCCL_P2P_DISABLE=1, then run nccl-tests"
            )
        yield Finding(f"links, {backend}", operation, text, verdict, remedy)


def _room(disk: DiskFacts) -> tuple[Verdict, str]:
    if disk.free < 2 * PROBE_BYTES:
        return "wrong", "the disk is full: make room, or give another --run-dir"
    return _warning_if(
        disk.free < MIN_DISK_FREE,
        "checkpoints may fill it: make room, or lower checkpoint.keep_last",
    )


def _warning_if(is_bad: bool, remedy: str) -> tuple[Verdict, str]:
    return ("warning", remedy) if is_bad else ("ok", "")


def _on(rank: RankFacts, facts: Sequence[RankFacts]) -> str:
    """Name the machine, if there are several."""
    return f" on {rank.host}" if len({other.host for other in facts}) > 1 else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _flops(flops: float) -> str:
    unit, size = ("TFLOP/s", 1e12) if flops >= 1e12 else ("GFLOP/s", 1e9)
    return f"{flops / size:,.3g} {unit}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes} B" if num_bytes < 2**20 else f"{num_bytes // 2**20} MiB"
