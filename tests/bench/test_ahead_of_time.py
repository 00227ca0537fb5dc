"""Triton's kernels compile for the GPUs that they are meant for, within their limits, and the
committed table has the same counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ahead_of_time import SHARED_KIB, complaints

triton = pytest.importorskip("triton")

COMMITTED = Path(__file__).resolve().parents[2] / "benchmarks/results/kernels-ahead.jsonl"
Row = dict[str, Any]

COMPILE = """
import re
import sys

from benchmarks import ahead_of_time

folder, *runs = sys.argv[1:]
for run in runs:
    models, dtypes, *architectures = run.split()
    options = ["--architectures", *architectures] if architectures else []
    options += ["--models", models, "--dtypes", dtypes, "--out", f"{folder}/{run}.jsonl"]
    assert ahead_of_time.main(options) == 0

launches = ahead_of_time.caught(["DeepSeek-V2-Lite"], ["bf16"], [90])
merge = next(one for one in launches if one.kernel.__name__ == "_merge_kernel")
code = merge.kernel.run(*merge.arguments, grid=(1,), warmup=True, **merge.options)
print("merge:", *re.findall("st[.]global|bar[.]sync", code.asm["ptx"]))
assert not ahead_of_time.unreached(one.kernel for one in launches)
without = [one.kernel for one in launches if "swiglu" not in one.kernel.__module__]
print("without a case:", *sorted(ahead_of_time.unreached(without)))
"""
RUNS = ("DeepSeek-V2-Lite bf16 90",)
"""Model, dtype and architecture that are compiled here; the grid compiles all models. Whoever
changes a kernel compiles it for 80, too, because the committed rows then have to be made again."""


def python(*arguments: str, timeout: float = 220) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own and with Triton's own settings, because this process has
    Triton's interpreter on."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment,
    )


def by_code(rows: list[Row]) -> dict[str, Row]:
    """Group the counts of rows by the compiled code; which cases led to it depends on the choice of
    models."""
    keys = ("kernel", "architecture", "types", "constants", "warps")
    return {
        json.dumps([row[key] for key in keys], sort_keys=True): {
            k: v for k, v in row.items() if k != "cases"
        }
        for row in rows
    }


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def committed() -> list[Row]:
    """Read the rows by the installed version of Triton."""
    rows = read(COMMITTED)
    versions = sorted({row["triton"] for row in rows})
    if triton.__version__ not in versions:
        pytest.skip(f"the rows are by Triton {', '.join(versions)}, this is {triton.__version__}")
    return [row for row in rows if row["triton"] == triton.__version__]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], str]:
    """Compile `RUNS`; the command ends with an error if a kernel exceeds a limit or has no case.
    Returns the rows and what was printed."""
    folder = tmp_path_factory.mktemp("ahead")
    result = python("-c", COMPILE, str(folder), *RUNS)
    assert result.returncode == 0, result.stdout + result.stderr
    return [row for run in RUNS for row in read(folder / f"{run}.jsonl")], result.stdout


@pytest.fixture(scope="module")
def rows(compiled: tuple[list[Row], str]) -> list[Row]:
    return compiled[0]


def test_every_kernel_compiles_within_limits(rows: list[Row]) -> None:
    assert {row["architecture"] for row in rows} == {90}
    assert not [complaints(row) for row in rows if complaints(row)]
    assert min(row["registers"] for row in rows) > 0


def test_rows_in_bf16_are_read_16_bytes_at_a_time_and_nothing_divides_in_64_bits(
    rows: list[Row],
) -> None:
    """Each thread reads so many: the address and the length of a row allow it in these models. Rows
    of packed triangles begin anywhere, and so do those of sums of outer products whose length is no
    multiple of 16."""
    narrow = [
        (row["kernel"], row["cases"])
        for row in rows
        if "*bf16" in row["types"]
        and "128" not in row["loads"]
        and not row["kernel"].startswith("triangle.")
        and not row["types"].endswith("size_o i32, size_i i32")
    ]
    assert not narrow
    assert not [row["kernel"] for row in rows if row["divisions"]]


def test_the_committed_rows_are_what_is_compiled(rows: list[Row]) -> None:
    """After a change to a kernel: `python -m benchmarks.ahead_of_time --out
    benchmarks/results/kernels-ahead.jsonl`."""
    kept = by_code(committed())
    assert by_code(rows).items() <= kept.items()


def test_the_committed_rows_of_each_version_are_of_the_same_code_and_within_limits() -> None:
    by_version: dict[str, list[Row]] = {}
    for row in read(COMMITTED):
        by_version.setdefault(row["triton"], []).append(row)
    assert by_version.keys() == {"3.6.0", "3.7.1"}  # those that torch 2.11 and 2.13 need
    assert by_code(by_version["3.6.0"]).keys() == by_code(by_version["3.7.1"]).keys()
    for rows in by_version.values():
        assert not [complaints(row) for row in rows if complaints(row)]


def test_a_kernel_without_a_case_is_noticed(compiled: tuple[list[Row], str]) -> None:
    """A function that another kernel calls needs no case of its own, unless nobody calls it."""
    missed = ("_backward_kernel", "_clamp", "_forward_kernel", "_load_halves", "_store_halves")
    assert compiled[1].splitlines()[-1].split() == [
        "without",
        "a",
        "case:",
        *(f"swiglu.{name}" for name in missed),
    ]


def test_merged_log_sum_exps_are_stored_when_all_warps_have_loaded_theirs(
    compiled: tuple[list[Row], str],
) -> None:
    """A warp stores those of all rows of a tile, of which others load some for their outputs."""
    (line,) = (line for line in compiled[1].splitlines() if line.startswith("merge:"))
    assert line.split()[-2:] == ["bar.sync", "st.global"]


@pytest.mark.parametrize("architecture", sorted(SHARED_KIB))
def test_what_exceeds_a_limit_is_complained_about(architecture: int) -> None:
    row = {
        "kernel": "a.kernel",
        "architecture": architecture,
        "spilled_bytes": 0,
        "shared_bytes": 1024 * SHARED_KIB[architecture],
    }
    assert not complaints(row)
    assert "spills 4 bytes" in complaints(row | {"spilled_bytes": 4})[0]
    assert "shared memory" in complaints(row | {"shared_bytes": row["shared_bytes"] + 1})[0]
    assert "does not compile" in complaints(row | {"error": "ValueError: no"})[0]


@pytest.mark.grid
@pytest.mark.timeout(900)
def test_all_models(tmp_path: Path) -> None:
    result = python(
        "-m", "benchmarks.ahead_of_time", "--out", str(tmp_path / "rows.jsonl"), timeout=880
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert by_code(read(tmp_path / "rows.jsonl")) == by_code(committed())
