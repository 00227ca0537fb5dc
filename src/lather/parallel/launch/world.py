"""The rank of this process and the number of ranks, read from the environment variables of torchrun
or SLURM.

The variables are those of https://docs.pytorch.org/docs/stable/elastic/run.html and
https://slurm.schedmd.com/srun.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lather.errors import ConfigError
from lather.parallel.launch.requests import Requests

FIRST_SLURM_PORT, NUM_SLURM_PORTS = 20000, 20000


@dataclass(frozen=True)
class World:
    """The rank of a process in a job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among those on this machine."""
    local_size: int = 1
    """Number of ranks on this machine."""
    address: tuple[str, int] = ("", 0)
    """Host and port of the store on rank 0's machine, through which several ranks find each
    other."""
    sees_one_device: bool = False
    """Whether a single visible CUDA device belongs to this rank alone, as srun's --gpus-per-task
    arranges."""
    requests: Requests | None = None
    """Requests that the launcher passes on; None: signals reach this process directly."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> World | None:
        """Return the world that torchrun or srun describes; None if neither has started this
        process, or if it is the only one.

        Raises ConfigError if a required variable is missing, or not a number that a job of this
        size has.
        """
        number = _Numbers(environment)
        if {"RANK", "WORLD_SIZE"} <= environment.keys():
            return cls._of_torchrun(number)
        # a batch script without srun has only the first of these
        if {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
            return cls._of_slurm(number)
        return None

    @classmethod
    def _of_torchrun(cls, number: _Numbers) -> World | None:
        size = number.within("WORLD_SIZE", least=1)
        reason = f"WORLD_SIZE is {size}"
        rank = number.index("RANK", size, reason)
        if size == 1:
            return None
        address = number.text("MASTER_ADDR"), number.port()
        local_size = size
        if "LOCAL_WORLD_SIZE" in number.environment:
            local_size = number.within("LOCAL_WORLD_SIZE", least=1, most=(size, reason))
            reason = f"LOCAL_WORLD_SIZE is {local_size}"
        local_rank = number.index("LOCAL_RANK", local_size, reason)
        return cls(rank, size, local_rank, local_size, address)

    @classmethod
    def _of_slurm(cls, number: _Numbers) -> World | None:
        size = number.within("SLURM_STEP_NUM_TASKS", least=1)
        reason = f"SLURM_STEP_NUM_TASKS is {size}"
        rank = number.index("SLURM_PROCID", size, reason)
        if size == 1:
            return None
        job, step = number.get("SLURM_JOB_ID", 0), number.get("SLURM_STEP_ID", 0)
        port = FIRST_SLURM_PORT + (job * 97 + step) % NUM_SLURM_PORTS
        if "MASTER_PORT" in number.environment:
            port = number.port()
        local_size, tasks = size, number.environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        # such as "4(x2),3": machines 0 and 1 have four tasks each, machine 2 has three
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        counts = [int(count) for count, machines in groups for _ in range(int(machines or 1))]
        if (machine := number.get("SLURM_NODEID", 0)) < len(counts):
            local_size = counts[machine]
            reason = f"SLURM_STEP_TASKS_PER_NODE is {tasks} and this is machine {machine}"
        return cls(
            rank,
            size,
            number.index("SLURM_LOCALID", local_size, reason),
            local_size,
            (_first_host(number.environment), port),
            sees_one_device=True,
        )

    def device(self, kind: torch.device) -> torch.device:
        """Return this rank's own device of a kind. Raises ConfigError if there are more ranks than
        devices."""
        if kind.type == "cpu" or self.size == 1:
            return kind
        num_devices = torch.cuda.device_count()
        if num_devices == 1 and self.sees_one_device:
            return torch.device("cuda", 0)
        if self.local_rank >= num_devices:
            raise ConfigError(
                f"rank {self.local_rank} of {self.local_size} on this machine has no CUDA device, "
                f"there are {num_devices}: "
                "start at most one rank per device, or give --train.device cpu"
            )
        return torch.device("cuda", self.local_rank)


@dataclass(frozen=True)
class _Numbers:
    """Environment variables as integers; errors name the variable."""

    environment: Mapping[str, str]

    def text(self, name: str) -> str:
        if not self.environment.get(name):
            raise ConfigError(
                f"the environment has RANK or SLURM_PROCID but no {name}: start with torchrun or "
                "srun, or unset them"
            )
        return self.environment[name]

    def within(self, name: str, least: int, most: tuple[int, str] | None = None) -> int:
        """Return a number. Raises ConfigError if it is below `least`, or above the first of `most`,
        with the second as the reason."""
        text, constraint = self.text(name), "a whole number"
        shown = repr(text)
        if re.fullmatch(r"-?[0-9]+", text):
            number = int(text)
            if number >= least and (most is None or number <= most[0]):
                return number
            shown, constraint = text, f"at least {least}"
            if most is not None:
                limits = f"from {least} to {most[0]}" if most[0] > least else str(least)
                constraint = f"{limits}, because {most[1]}"
        raise ConfigError(
            f"the environment variable {name} = {shown} is not valid: it must be {constraint}"
        )

    def index(self, name: str, size: int, reason: str) -> int:
        """Return the number of one of `size` ranks. Raises ConfigError, with the reason, if it is
        none."""
        return self.within(name, least=0, most=(size - 1, reason))

    def port(self) -> int:
        return self.within("MASTER_PORT", least=1, most=(65535, "it is a port"))

    def get(self, name: str, default: int) -> int:
        return self.within(name, least=0) if name in self.environment else default


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the machine of SLURM's task 0: the first in the node list ("gpu07" in
    "gpu[07-12,15],cpu1")."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if match := re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes):
        return "".join(part or "" for part in match.groups())
    raise ConfigError(
        "SLURM's environment has no SLURM_JOB_NODELIST, so the address of rank 0 is not known: set "
        "MASTER_ADDR"
    )
