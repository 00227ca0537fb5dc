"""`lather bench optimizer | memory | pipeline | distributed | calls | convergence | data [options]`."""

from __future__ import annotations

from lather.commands.parsing import parse_arguments
from lather.errors import UserError

USAGE = """\
usage: lather bench BENCHMARK [OPTIONS]

  optimizer   time and memory of SOAP against heavyball and pytorch_optimizer
  memory      what MoE layers keep for backward, what the loss needs, and the time of both
  pipeline    what a pipeline rank keeps, step time and bubble, against torch's own DualPipeV runtime
  distributed what a rank of a sharded optimizer sends, keeps and computes, against one process
  calls       Python calls of one optimizer step, counted
  data        how fast data sets are made and read, and in how much memory
  convergence which rule learns how fast: runs a study of many trainings (benchmarks/studies)

  lather bench BENCHMARK --help shows the options"""


def bench_command(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name = arguments[0] if arguments else None
    if name == "optimizer":
        from lather.bench import optimizer  # brings matplotlib

        return optimizer.run(parse_arguments(optimizer.OptimizerBenchmark, "lather bench optimizer", arguments[1:]))
    if name == "memory":
        from lather.bench import memory

        return memory.run(parse_arguments(memory.MemoryBenchmark, "lather bench memory", arguments[1:]))
    if name == "pipeline":
        from lather.bench import pipeline

        return pipeline.run(parse_arguments(pipeline.PipelineBenchmark, "lather bench pipeline", arguments[1:]))
    if name == "distributed":
        from lather.bench import distributed

        return distributed.run(parse_arguments(distributed.DistributedBenchmark, "lather bench distributed", arguments[1:]))
    if name == "calls":
        from lather.bench import calls

        return calls.run(parse_arguments(calls.CallsBenchmark, "lather bench calls", arguments[1:]))
    if name == "data":
        from lather.bench import data

        return data.run(parse_arguments(data.DataBenchmark, "lather bench data", arguments[1:]))
    if name == "convergence":
        from lather.bench.convergence import command

        return command.run(parse_arguments(command.ConvergenceBenchmark, "lather bench convergence", arguments[1:]))
    given = f"unknown benchmark {name!r}" if arguments else "no benchmark given"
    raise UserError(f"{given}: use lather bench optimizer, memory, pipeline, distributed, calls, convergence or data")
