"""Which of how many ranks this process is: said by torchrun's or SLURM's environment variables, or the only one.

The variables are those of https://docs.pytorch.org/docs/stable/elastic/run.html and https://slurm.schedmd.com/srun.html.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lather.errors import ConfigError

FIRST_SLURM_PORT, NUM_SLURM_PORTS = 20000, 20000


@dataclass(frozen=True)
class World:
    """A process among the ranks of a job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the ranks of this machine."""
    local_size: int = 1
    """Ranks on this machine."""
    address: tuple[str, int] | None = None
    """Where rank 0's machine keeps the store by which the ranks meet; None: a single process."""
    sees_own_device_alone: bool = False
    """Where there is one CUDA device on the machine of several ranks, it is this rank's (srun with --gpus-per-task)."""
    stop: Callable[[], signal.Signals | None] | None = None
    """The signal by which the launcher was asked to stop; None: signals come to this process itself."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> World | None:
        """The world that torchrun or srun describes; None if neither has started this process, or it is the only one.

        Raises ConfigError if they leave out what is needed.
        """
        if {"RANK", "WORLD_SIZE"} <= environment.keys():
            world = cls._of_torchrun(environment)
        elif {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():  # a batch script without srun has only the first
            world = cls._of_slurm(environment)
        else:
            return None
        return world if world.size > 1 else None

    @classmethod
    def _of_torchrun(cls, environment: Mapping[str, str]) -> World:
        number = _Numbers(environment)
        rank, size = number["RANK"], number["WORLD_SIZE"]
        if size == 1:
            return cls()
        address = number.text("MASTER_ADDR"), number["MASTER_PORT"]
        return cls(rank, size, number["LOCAL_RANK"], number.get("LOCAL_WORLD_SIZE", size), address)

    @classmethod
    def _of_slurm(cls, environment: Mapping[str, str]) -> World:
        number = _Numbers(environment)
        size = number["SLURM_STEP_NUM_TASKS"]
        if size == 1:
            return cls()
        job, step = number.get("SLURM_JOB_ID", 0), number.get("SLURM_STEP_ID", 0)
        port = number.get("MASTER_PORT", FIRST_SLURM_PORT + (job * 97 + step) % NUM_SLURM_PORTS)
        tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as "4(x2)"
        local_size = int(tasks[0]) if tasks else size
        address = _first_host(environment), port
        return cls(number["SLURM_PROCID"], size, number["SLURM_LOCALID"], local_size, address, sees_own_device_alone=True)

    def device(self, kind: torch.device) -> torch.device:
        """This rank's own device among those of a kind. Raises ConfigError if there are more ranks than devices."""
        if kind.type == "cpu" or self.size == 1:
            return kind
        num_devices = torch.cuda.device_count()
        if num_devices == 1 and self.sees_own_device_alone:
            return torch.device("cuda", 0)
        if self.local_rank >= num_devices:
            raise ConfigError(
                f"rank {self.local_rank} of {self.local_size} on this machine has no CUDA device, there are {num_devices}: "
                "start as many ranks as there are devices, or give --train.device cpu"
            )
        return torch.device("cuda", self.local_rank)


class _Numbers:
    """Environment variables as integers, with errors that name them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str) -> str:
        if not self._environment.get(name):
            raise ConfigError(f"the environment has RANK or SLURM_PROCID but no {name}: start through torchrun or srun, or unset them")
        return self._environment[name]

    def __getitem__(self, name: str) -> int:
        text = self.text(name)
        if not text.isdecimal():
            raise ConfigError(f"the environment variable {name} = {text!r} is not valid: it must be a whole number")
        return int(text)

    def get(self, name: str, default: int) -> int:
        return self[name] if name in self._environment else default


def _first_host(environment: Mapping[str, str]) -> str:
    """The machine of SLURM's task 0: the first of the node list, such as "gpu07" of "gpu[07-12,15],cpu1"."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if match := re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes):
        return "".join(part or "" for part in match.groups())
    if environment.get("SLURM_LAUNCH_NODE_IPADDR"):
        return environment["SLURM_LAUNCH_NODE_IPADDR"]
    raise ConfigError("SLURM's environment has no SLURM_JOB_NODELIST, so the address of rank 0 is not known: set MASTER_ADDR")
