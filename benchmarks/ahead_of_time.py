"""Compiles every Triton kernel ahead of time, without a GPU, and lists registers, spills, shared
memory, and widths of loads and stores.

    python -m benchmarks.ahead_of_time [--models NAME ...] [--dtypes bf16 fp32] [--architectures 80
    90 100] [--out ROWS.jsonl]

prints the table, and fails if a kernel does not compile, exceeds a limit, or is launched by no
case. The repository keeps the rows of all kernels at all sizes by several versions of Triton; after
a change to a kernel write them anew with `--out benchmarks/results/kernels-ahead.jsonl`, in an
environment with each version, and look at the difference. `--out` replaces the rows of the
installed version, and leaves those of others.

The wrappers of `lather.kernels` are called with the arguments of `benchmarks.kernel_cases`: **a new
kernel needs a line there and nothing here**. Each launch is intercepted and specialized as Triton
does it (by type, divisibility by 16, constants). Triton's own pipeline compiles it for a driver
that knows nothing but its architecture; the counts are read from the assembler's log and the PTX.
Launches that come to the same code are one row. The counts depend on the sources and Triton's
version alone.

A row's `loads` and `stores` count the instructions on global memory by bits per thread, copies to
shared memory among the loads; `divisions` counts 64-bit integer divisions, each of which takes a
GPU some hundred instructions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

import lather
from benchmarks.kernel_cases import CASES, DTYPES, MODELS
from benchmarks.report import Row, RowFile

SHARED_KIB = {80: 163, 90: 227, 100: 227}
"""The most shared memory that a block can ask for, in KiB by architecture (CUDA C++ programming
guide, technical specifications)."""

LEAST_ARCHITECTURE_OF_FP8 = 89
"""The first architecture that converts e4m3; kernels with such an operand are not compiled for
others."""

SPILLED_BYTES: dict[str, int] = {}
"""Bytes that a kernel may spill, by kernel, where spilling was measured to be faster than not
spilling. No kernel spills now."""


@dataclass
class Launch:
    """A kernel with its arguments, to be compiled once, and the cases that lead to it."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    architecture: int
    cases: list[str] = field(default_factory=list)


class Driver:
    """Stands for a GPU in `triton.runtime.driver.set_active`, and knows nothing but its
    architecture."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)


def caught(
    models: Iterable[str], dtypes: Iterable[str], architectures: Iterable[int]
) -> list[Launch]:
    """Return the launches of the wrappers on GPUs of these architectures."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    architecture, case = 0, ""

    def catch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        dtypes = [getattr(argument, "dtype", None) for argument in arguments]
        if architecture < LEAST_ARCHITECTURE_OF_FP8 and torch.float8_e4m3fn in dtypes:
            return
        launches.append(Launch(kernel, arguments, options, architecture, [case]))

    run = JITFunction.run
    JITFunction.run = catch
    try:
        for architecture, model, name in product(architectures, models, dtypes):
            driver.set_active(Driver(architecture))
            sizes = MODELS[model](DTYPES[name])
            for wrapper, *arguments in (call for calls in CASES for call in calls(sizes)):
                case = f"{sizes.model} {name} {wrapper.__name__}"
                options = arguments.pop() if isinstance(arguments[-1], dict) else {}
                wrapper(*arguments, **options)
    finally:
        JITFunction.run = run
    return launches


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """Return the compilations that the launches need, distinct by the key of Triton's cache."""
    from triton.runtime import driver

    compilations: dict[tuple[Any, ...], Launch] = {}
    for launch in launches:
        driver.set_active(Driver(launch.architecture))
        binder = launch.kernel.device_caches[launch.architecture][-1]
        _, specialization, options = binder(*launch.arguments, **launch.options)
        key = (launch.architecture, launch.kernel, str(specialization), str(options))
        compilation = compilations.setdefault(key, replace(launch, cases=[]))
        compilation.cases += [case for case in launch.cases if case not in compilation.cases]
    return list(compilations.values())


def compiled(launches: Sequence[Launch], processes: int) -> list[Row]:
    """Compile the launches in so many processes; yields a row for each, in a fixed order."""
    context, receivers = multiprocessing.get_context("fork"), []
    for first in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        context.Process(
            target=_compile_all, args=(launches[first::processes], sender), daemon=True
        ).start()
        sender.close()
        receivers.append(receiver)
    rows = [row for receiver in receivers for row in cast(list[Row], receiver.recv())]
    return sorted(
        rows,
        key=lambda row: (
            row["kernel"],
            row["types"],
            json.dumps(row["constants"]),
            row["architecture"],
        ),
    )


def _compile_all(launches: Sequence[Launch], sender: Connection) -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        sender.send([row_of(launch) for launch in launches])


def row_of(launch: Launch) -> Row:
    """Compile a launch and return its row, or a row with the error."""
    import triton
    from triton.runtime import driver

    row: Row = {
        "kernel": name_of(launch.kernel),
        "architecture": launch.architecture,
        "types": "",
        "constants": {},
    }
    common: Row = {"cases": launch.cases, "triton": triton.__version__}
    driver.set_active(Driver(launch.architecture))
    log = io.StringIO()
    try:
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            code = launch.kernel.run(*launch.arguments, grid=(1,), warmup=True, **launch.options)
    except Exception as error:
        return row | common | {"error": f"{type(error).__name__}: {error}"}
    names, source = list(launch.kernel.arg_names), code.src
    row["types"] = ", ".join(
        _argument(i, name, source)
        for i, name in enumerate(names)
        if source.signature[name] != "constexpr"
    )
    row["constants"] = {names[i]: _plain(value) for (i,), value in source.constants.items()}
    used = counted(log.getvalue(), code.asm["ptx"])
    return (
        row
        | {
            "warps": code.metadata.num_warps,
            "shared_bytes": code.metadata.shared,
            **used,
        }
        | common
    )


def _argument(place: int, name: str, source: Any) -> str:
    """Describe an argument by name and type, with a mark if its value is known to be divisible by
    16."""
    return f"{name} {source.signature[name]}" + (
        " /16" if ["tt.divisibility", 16] in source.attrs.get((place,), []) else ""
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | str | None) else str(value)


def name_of(kernel: Any) -> str:
    """Name a kernel by its folder and function, for example `swiglu._forward_kernel`."""
    module = kernel.__module__.removeprefix("lather.").removeprefix("kernels.")
    return f"{module.removesuffix('.triton')}.{kernel.__name__}"


def counted(log: str, ptx: str) -> Row:
    """Read the assembler's numbers of a kernel, and count the accesses to global memory in its
    PTX."""
    used = re.search(r"Used (\d+) registers", log)
    spilled = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    if used is None or spilled is None:
        raise RuntimeError(f"the assembler's log has neither registers nor spills: {log!r}")
    widths = {kind: Counter(_widths(ptx, kind)) for kind in ("ld", "st")}
    return {
        "registers": int(used[1]),
        "stack_bytes": int(spilled[1]),
        "spilled_bytes": int(spilled[2]) + int(spilled[3]),
        "loads": {str(bits): count for bits, count in sorted(widths["ld"].items())},
        "stores": {str(bits): count for bits, count in sorted(widths["st"].items())},
        "divisions": len(re.findall(r"\b(?:div|rem)\.[su]64", ptx)),
    }


def _widths(ptx: str, kind: str) -> Iterator[int]:
    if kind == "ld":
        copies = r"\bcp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+)"
        yield from (8 * int(size, 16) for size in re.findall(copies, ptx))
    for vector, bits in re.findall(
        rf"\b{kind}\.(?:\w+\.)*global(?:[.:]\w+)*?(?:\.v(\d))?\.[bfus](\d+)", ptx
    ):
        yield int(vector or 1) * int(bits)


def complaints(row: Row) -> list[str]:
    """Describe the limits that the row's kernel exceeds."""
    if "error" in row:
        return [f"does not compile: {row['error']}"]
    exceeded, allowed = [], SPILLED_BYTES.get(row["kernel"], 0)
    if row["spilled_bytes"] > allowed:
        exceeded.append(
            f"spills {row['spilled_bytes']} bytes, {allowed} are allowed: smaller blocks or more "
            "warps"
        )
    limit = 1024 * SHARED_KIB[row["architecture"]]
    if row["shared_bytes"] > limit:
        exceeded.append(
            f"needs {row['shared_bytes']} bytes of shared memory, a block has {limit}: smaller "
            "blocks or fewer stages"
        )
    return exceeded


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a file in place of those by the same version of Triton; rows by other versions
    stay."""
    replaced = {row["triton"] for row in rows}
    earlier = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    others = [row for row in earlier if row["triton"] not in replaced]
    file = RowFile(path)
    file.write(sorted([*others, *rows], key=lambda row: str(row["triton"])))
    file.finish()


def unreached(launched: Iterable[Any]) -> set[str]:
    """Name the `triton.jit` functions of Lather that no launched kernel is or calls."""
    from triton.runtime.jit import JITFunction

    package = Path(lather.__file__).parent
    sources = [
        path
        for path in package.rglob("*.py")
        if re.search(r"^@triton\.jit", path.read_text(), re.MULTILINE)
    ]
    modules = [
        importlib.import_module(
            ".".join(("lather", *path.relative_to(package).with_suffix("").parts))
        )
        for path in sources
    ]
    functions = {
        id(function): function
        for module in modules
        for function in vars(module).values()
        if isinstance(function, JITFunction)
    }
    reached, front = set(), list(launched)
    while front:
        function = front.pop()
        if id(function) not in reached:
            reached.add(id(function))
            named = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
            front += [function for function in named if isinstance(function, JITFunction)]
    return {name_of(function) for place, function in functions.items() if place not in reached}


def table(rows: Iterable[Row]) -> Iterator[str]:
    yield (
        f"{'kernel':40} {'sm':>3} {'regs':>4} {'spill':>5} {'shared':>6} "
        f"{'warps':>5} {'div':>3}  {'loads':24} {'stores':24} cases"
    )
    for row in rows:
        if "error" in row:
            yield f"{row['kernel']:40} {row['architecture']:3} {row['error'].splitlines()[0]}"
            continue
        widths = (
            " ".join(f"{count}x{bits}" for bits, count in row[kind].items())
            for kind in ("loads", "stores")
        )
        numbers = (
            f"{row['registers']:4} {row['spilled_bytes']:5} {row['shared_bytes']:6} "
            f"{row['warps']:5} {row['divisions']:3}  " + " ".join(f"{width:24}" for width in widths)
        )
        yield f"{row['kernel']:40} {row['architecture']:3} {numbers} {row['cases'][0]}" + (
            f" +{n}" if (n := len(row["cases"]) - 1) else ""
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ahead_of_time", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--architectures", nargs="+", type=int, choices=SHARED_KIB, default=list(SHARED_KIB)
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, help="file of rows, of which those by this version of Triton change"
    )
    options = parser.parse_args(arguments)
    # Triton has not been imported yet, and reads this when it is
    os.environ.pop("TRITON_INTERPRET", None)
    launches = caught(options.models, options.dtypes, options.architectures)
    rows = compiled(distinct(launches), options.processes)
    print("\n".join(table(rows)))
    wrong = [
        f"{row['kernel']} on sm_{row['architecture']} ({row['cases'][0]}) {text}"
        for row in rows
        for text in complaints(row)
    ]
    wrong += [
        f"{name} is launched by no case: add one to benchmarks/kernel_cases.py"
        for name in sorted(unreached(launch.kernel for launch in launches))
    ]
    if options.out is not None:
        write(options.out, rows)
    print(
        "\n".join(
            [f"{len(rows)} compilations of {len({row['kernel'] for row in rows})} kernels", *wrong]
        )
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
