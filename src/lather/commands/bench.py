"""`lather bench optimizer | memory | pipeline | distributed | calls | launches | convergence
[options]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import lather
from lather.commands.parsing import parse_arguments
from lather.errors import UserError
from lather.lines import fit

BENCHMARKS = {
    "optimizer": "time and memory of SOAP against heavyball and pytorch_optimizer",
    "memory": "bytes that MoE layers keep for backward and that the loss needs, and their time",
    "pipeline": "bytes of a pipeline rank, step time and bubble, against torch's DualPipeV runtime",
    "distributed": "bytes and flops of a rank of a sharded optimizer, against one process",
    "calls": "Python calls of one optimizer step",
    "launches": "kernel launches, bytes and host waits of a GPU, counted without a GPU",
    "convergence": "learning speed of rules: runs a study of many trainings (benchmarks/studies)",
}
"""The subject of each benchmark. `benchmarks.NAME` has its options, the class `NameBenchmark`, and
`run`."""
FOLDERS = ("launches", "convergence")
"""Benchmarks that are a folder, whose options and `run` are in its module `command`."""

LINES = "\n".join(f"  {name:<12} {about}" for name, about in BENCHMARKS.items())
USAGE = f"""\
usage: lather bench BENCHMARK [OPTIONS]

{LINES}

  lather bench BENCHMARK --help shows the options"""


def bench_command(arguments: list[str]) -> int:
    """Run a benchmark, which is in a checkout beside the package."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(fit(USAGE))
        return 0
    if not arguments or arguments[0] not in BENCHMARKS:
        problem = f"unknown benchmark {arguments[0]!r}" if arguments else "no benchmark given"
        *names, last = BENCHMARKS
        raise UserError(f"{problem}: use lather bench {', '.join(names)} or {last}")
    name, *rest = arguments
    options, run = find_benchmark(name)
    return run(parse_arguments(options, f"lather bench {name}", rest))


def find_benchmark(name: str) -> tuple[type, Callable[[Any], int]]:
    """Return the class of a benchmark's options, and the function that runs it. Its module, and no
    other benchmark's, is imported from the checkout that holds the package, or from the current
    folder if that is a checkout. Raises UserError without a checkout."""
    for root in (Path(lather.__file__).parents[2], Path.cwd()):
        if (root / "benchmarks" / "__init__.py").is_file() and (root / "pyproject.toml").is_file():
            if str(root) not in sys.path:
                sys.path.append(str(root))
            module = import_module(f"benchmarks.{name}" + ".command" * (name in FOLDERS))
            return getattr(module, f"{name.capitalize()}Benchmark"), module.run
    raise UserError(
        "benchmarks are not installed with the package: run `lather bench` in the folder of a "
        "checkout of Lather's repository"
    )
