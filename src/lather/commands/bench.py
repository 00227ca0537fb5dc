"""`lather bench optimizer | memory | pipeline | distributed | gaps | calls | launches | convergence | data [options]`."""

from __future__ import annotations

from importlib import import_module

from lather.commands.parsing import parse_arguments
from lather.errors import UserError

USAGE = """\
usage: lather bench BENCHMARK [OPTIONS]

  optimizer   time and memory of SOAP against heavyball and pytorch_optimizer
  memory      what MoE layers keep for backward, what the loss needs, and the time of both
  pipeline    what a pipeline rank keeps, step time and bubble, against torch's own DualPipeV runtime
  gaps        refreshes of the optimizer while ranks of a pipeline wait for each other
  distributed what a rank of a sharded optimizer sends, keeps and computes, against one process
  calls       Python calls of one optimizer step, counted
  launches    kernel launches, bytes and host waits on a GPU, counted without one
  data        how fast data sets are made and read, and in how much memory
  convergence which rule learns how fast: runs a study of many trainings (benchmarks/studies)

  lather bench BENCHMARK --help shows the options"""


BENCHMARKS = {
    "optimizer": ("lather.bench.optimizer", "OptimizerBenchmark"),
    "memory": ("lather.bench.memory", "MemoryBenchmark"),
    "pipeline": ("lather.bench.pipeline", "PipelineBenchmark"),
    "gaps": ("lather.bench.gaps", "GapsBenchmark"),
    "distributed": ("lather.bench.distributed", "DistributedBenchmark"),
    "calls": ("lather.bench.calls", "CallsBenchmark"),
    "launches": ("lather.bench.launches.command", "LaunchesBenchmark"),
    "data": ("lather.bench.data", "DataBenchmark"),
    "convergence": ("lather.bench.convergence.command", "ConvergenceBenchmark"),
}
"""Name -> the module, imported only for its own benchmark, and the class of its options."""


def bench_command(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not arguments or arguments[0] not in BENCHMARKS:
        given = f"unknown benchmark {arguments[0]!r}" if arguments else "no benchmark given"
        *names, last = BENCHMARKS
        raise UserError(f"{given}: use lather bench {', '.join(names)} or {last}")
    module_name, class_name = BENCHMARKS[arguments[0]]
    module = import_module(module_name)
    status: int = module.run(parse_arguments(getattr(module, class_name), f"lather bench {arguments[0]}", arguments[1:]))
    return status
