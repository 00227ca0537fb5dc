"""Stands in for SLURM's `srun`, `sbatch` and `scontrol show hostnames`, on one machine that is all
nodes:

    python slurm.py srun --ntasks 4 COMMAND ...

A batch script runs at once, and its output is printed. Only what the pages use is here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def srun(arguments: list[str]) -> int:
    """Start the tasks of a step, wait for all, and return the largest status."""
    options, command = split(arguments)
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    tasks = int(options.get("ntasks", nodes * int(options.get("ntasks-per-node", "1"))))
    on_each = tasks // nodes
    step = {
        "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", str(os.getpid())),
        "SLURM_NTASKS": tasks,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_TASKS_PER_NODE": f"{on_each}(x{nodes})",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
    }
    processes = []
    for task in range(tasks):
        own = {
            "SLURM_PROCID": task,
            "SLURM_LOCALID": task % on_each,
            "SLURM_NODEID": task // on_each,
        }
        environment = {
            **os.environ,
            **{name: str(value) for name, value in {**step, **own}.items()},
        }
        processes.append(subprocess.Popen(command, env=environment))
    return max(process.wait() for process in processes)


def sbatch(arguments: list[str]) -> int:
    """Run a batch script with the variables that its `#SBATCH` lines ask for."""
    _, (script,) = split(arguments)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", Path(script).read_text(), re.MULTILINE))
    nodes, on_each = int(asked["nodes"]), int(asked["ntasks-per-node"])
    job = {
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": nodes * on_each,
        "SLURM_CPUS_PER_TASK": asked["cpus-per-task"],
        "SLURM_JOB_NODELIST": "localhost",
    }
    return subprocess.run(
        ["bash", script],
        env={**os.environ, **{name: str(value) for name, value in job.items()}},
        check=False,
    ).returncode


def split(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options, given as `--name=value` or, before a number, as `--name value`; and the
    command after them."""
    options = {}
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0)[2:].partition("=")
        options[name] = value or (arguments.pop(0) if arguments[0].isdigit() else "")
    return options, arguments


def scontrol(arguments: list[str]) -> int:
    assert arguments[:2] == ["show", "hostnames"], arguments
    print(arguments[2])
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "sbatch": sbatch, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
