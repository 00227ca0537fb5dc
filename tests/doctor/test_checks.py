"""The checks of `lather doctor` find what is wrong in made-up facts and name the remedy; the disk
is probed on real folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from lather.commands.doctor import show
from lather.doctor.checks import (
    CHECKS,
    Finding,
    check_devices,
    check_disk,
    check_links,
    check_rates,
    check_versions,
)
from lather.doctor.facts import DiskFacts, GpuFacts, RankFacts, probe_disk
from lather.doctor.links import LinkFacts
from lather.time_model.measured import MeasuredRates

GIB = 2**30
VERSIONS = {"lather": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cu128", "numpy": "2.4.6"}
NEEDED = [
    Requirement(line) for line in ("torch>=2.11", "numpy>=1.26", "transformers>=5.0; extra == 'hf'")
]
DISK = DiskFacts("/runs", 100 * GIB, 400e6, 900e6)
GPU = GpuFacts("H100", (9, 0), 80 * GIB, 79 * GIB)
FIRST = RankFacts(0, "a", VERSIONS, (GPU,), False, "", 16, 8, 2, 0, 64 * GIB, 60 * GIB, DISK)
SECOND = replace(FIRST, rank=1, disk=None)
ELSEWHERE = replace(FIRST, rank=1, host="b")


def not_ok(*facts: RankFacts) -> list[Finding]:
    return [
        one
        for check in CHECKS
        for one in (check(facts, NEEDED) if check is check_versions else check(facts))
        if one.verdict != "ok"
    ]


def test_nothing_is_wrong_with_a_machine_in_order() -> None:
    assert not_ok(FIRST, SECOND) == []
    assert not_ok(replace(FIRST, gpus=())) == []
    assert not_ok(replace(FIRST, other_programs=8)) == []  # beside 8 threads on 16 cores


@pytest.mark.parametrize(
    ("settings", "shown"),
    [("expandable_segments:True", "expandable_segments:True"), ("", "torch's default settings")],
)
def test_the_allocators_settings_are_shown_beside_gpus(settings: str, shown: str) -> None:
    facts = [replace(one, allocator=settings) for one in (FIRST, SECOND)]
    assert [one.found for one in check_devices(facts) if one.name == "allocator"] == [shown]
    alone = [replace(FIRST, gpus=())]
    assert not [one for one in check_devices(alone) if one.name == "allocator"]


def test_the_slowest_ranks_rates_are_shown() -> None:
    gpu = MeasuredRates("NVIDIA H100", 0, copy=3e12, fp32=50e12, tf32=350e12, bf16=700e12)
    core = MeasuredRates("EPYC", 2, copy=17e9, fp32=90e9, tf32=90e9, bf16=1.4e9)
    facts = [replace(FIRST, rates=gpu), replace(SECOND, rates=replace(gpu, copy=2.5e12))]
    [finding] = check_rates(facts)
    assert (finding.topic, finding.name) == ("rates", "NVIDIA H100")
    products = "products fp32 50 TFLOP/s, TF32 350 TFLOP/s, bf16 700 TFLOP/s"
    assert finding.found == f"a copy 2,500.0 GB/s; {products}"
    [finding] = check_rates([replace(FIRST, rates=core)])
    assert finding.name == "EPYC (2 threads)"
    assert finding.found == "a copy 17.0 GB/s; products fp32 90 GFLOP/s, bf16 1.4 GFLOP/s"


def disk(**changes: object) -> RankFacts:
    return replace(FIRST, disk=replace(DISK, **changes))


@pytest.mark.parametrize(
    ("facts", "verdict", "name", "remedy"),
    [
        (
            [replace(FIRST, versions={**VERSIONS, "torch": "2.10.1+cpu"})],
            "wrong",
            "torch",
            "pip install 'torch>=2.11'",
        ),
        (
            [replace(FIRST, versions={"torch": "2.11.0"})],
            "wrong",
            "numpy",
            "pip install 'numpy>=1.26'",
        ),
        (
            [replace(FIRST, versions={**VERSIONS, "transformers": "4.57.0"})],
            "warning",
            "transformers",
            "pip install 'transformers>=5.0'",
        ),
        (
            [FIRST, replace(ELSEWHERE, versions={**VERSIONS, "torch": "2.12.0"})],
            "wrong",
            "torch",
            "the same torch everywhere",
        ),
        ([replace(FIRST, kernel_error="absent")], "wrong", "Triton kernel", "pip install triton"),
        (
            [FIRST, replace(SECOND, kernel_error="RuntimeError: no C compiler")],
            "wrong",
            "Triton kernel",
            "gcc",
        ),
        ([replace(FIRST, gpus=(), has_unseen_gpu=True)], "wrong", "GPU", "CUDA build of torch"),
        ([replace(FIRST, gpus=(replace(GPU, capability=(7, 5)),))], "warning", "GPU", "fp32"),
        (
            [FIRST, replace(SECOND, gpus=(replace(GPU, free=40 * GIB),))],
            "warning",
            "GPU",
            "GPU of rank 1",
        ),
        ([replace(FIRST, threads=16)], "warning", "CPU", "OMP_NUM_THREADS=8"),
        ([FIRST, replace(ELSEWHERE, other_programs=9)], "warning", "load", "end them"),
        ([FIRST, replace(ELSEWHERE, memory_free=GIB)], "warning", "host", "end other programs"),
        ([disk(error="Read-only file system")], "wrong", "/runs", "another --run-dir"),
        ([disk(free=0, write=0.0, read=0.0)], "wrong", "free", "full"),
        ([disk(free=GIB)], "warning", "free", "keep_last"),
        ([disk(write=5e6)], "warning", "speed", "asynchronous"),
        (
            [FIRST, replace(ELSEWHERE, sees_run_dir=False)],
            "wrong",
            "one for all ranks",
            "machines share",
        ),
    ],
)
def test_what_is_wrong_is_found_with_its_remedy(
    facts: list[RankFacts], verdict: str, name: str, remedy: str
) -> None:
    (one,) = not_ok(*facts)
    assert (one.verdict, one.name) == (verdict, name)
    assert remedy in one.remedy


def test_the_worst_of_several_machines_is_named() -> None:
    assert "on b" in next(
        one.found
        for one in check_disk([FIRST, replace(ELSEWHERE, disk=replace(DISK, free=50 * GIB))])
    )


LINK = LinkFacts("all-reduce", "nccl", 8, 3e-5, 8.0, True)
LARGE = LinkFacts("all-reduce", "nccl", 2**28, 0.001, 2.0**28, True)


@pytest.mark.parametrize(
    ("links", "verdict", "remedy"),
    [
        ([LARGE, LINK], "ok", ""),
        ([replace(LINK, seconds=0.1), LARGE], "warning", "OMP_NUM_THREADS"),
        ([LINK, replace(LARGE, seconds=1.0)], "warning", "NCCL_SOCKET_IFNAME"),
        ([LINK, replace(LARGE, is_right=False)], "wrong", "NCCL_P2P_DISABLE"),
    ],
)
def test_slow_and_wrong_links_are_found(links: list[LinkFacts], verdict: str, remedy: str) -> None:
    (one,) = check_links(links)
    assert one.verdict == verdict
    assert remedy in one.remedy


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = probe_disk(tmp_path / "runs" / "new", num_bytes=2**21)
    assert (found.folder, found.error) == (str(tmp_path), "")
    assert 0 < found.write < 1e12
    assert 0 < found.read < 1e12
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_not_written(tmp_path: Path) -> None:
    found = probe_disk(tmp_path, num_bytes=2**60)
    assert (found.write, found.error) == (0.0, "")


def test_a_run_directory_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = probe_disk(tmp_path / "file" / "run", num_bytes=2**20)
    assert found.error == "Not a directory"


@pytest.mark.parametrize("width", [80, 200])
def test_every_finding_is_a_line_with_its_remedy_below(width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(
        [
            Finding("disk", "[free]", "0 GiB", "wrong", "make room"),
            Finding("disk", "speed", "fast"),
        ],
        2,
        console,
    )
    lines = [line.strip() for line in console.export_text().splitlines()]
    at = next(index for index, line in enumerate(lines) if "[free]" in line)
    assert lines[at].split() == ["wrong", "[free]", "0", "GiB"]
    assert lines[at + 1] == "\N{RIGHTWARDS ARROW} make room"
    assert "1 thing is wrong; warnings: 0" in lines
