"""Starts ranks on this machine, or joins ranks that torchrun or SLURM has started, and ends all of
them if one fails.

Local ranks are processes of `multiprocessing`, and find each other through a store in their parent.
A rank that is blocked in a collective runs no signal handler, so every rank has a connection to a
hub (`lifeline`). When a rank fails, the parent kills the others at once and shows the error of that
rank. When the parent dies, the connections break and the ranks exit. Ranks of another launcher have
a hub, too: torchrun ends only the ranks of its own machine, after 30 s if they are blocked, because
they take SIGTERM for a request; and srun ends none unless it is told to.

A signal that makes a request (`lather.parallel.launch.requests`), sent to the parent, to one rank
or to all processes (as Ctrl-C in a terminal does), becomes a request that each rank reads from
`World.requests`. If a signal that ends a run is repeated, the job ends at once.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in `__all__`
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lather.cores import num_cores
from lather.device import gpu_module, is_gpu
from lather.errors import ConfigError, UserError
from lather.output import settle_output
from lather.parallel.launch.lifeline import SETTLE_SECONDS, TICK_SECONDS, Failure, Hub, Lifeline
from lather.parallel.launch.requests import HELD, Requests, obeyed, stop_signals
from lather.parallel.launch.world import World

LOCAL = "127.0.0.1"
HUB_KEY = "lather/hub"

Worker = Callable[..., int]
"""Called as worker(*args, world) on every rank. Returns the exit status, which is the same on all
ranks; may raise on any rank."""


PATIENCE = 0.9
"""Share of the timeout of collective operations after which a standstill is reported: NCCL's
watchdog ends the process after the whole timeout, before a rank could say anything."""


@dataclass(frozen=True)
class GroupOptions:
    """Options of the default process group."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Kind of device; each rank uses its own."""
    timeout: float = 600.0
    """Timeout of a collective operation, in seconds."""
    patience: float | None = None
    """Seconds that a rank may stay in one call of a training step, before the places of all ranks
    are reported and the job ends; None: on a GPU `PATIENCE` of the timeout, on a CPU for ever, as
    gloo's operations raise an error themselves."""

    @property
    def standstill(self) -> float | None:
        """Seconds of a standstill that is reported; None: none is."""
        if self.patience is None and is_gpu(self.device):
            return PATIENCE * self.timeout
        return self.patience


def take_nproc(arguments: list[str], world: World | None = None) -> tuple[list[str], int | None]:
    """Return the arguments without `--nproc N`, and N; "gpu" means the number of CUDA devices.
    Raises ConfigError unless N is a positive number, and under another launcher (`world`)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", nargs="?", const="")
    known, rest = parser.parse_known_args(arguments)
    if known.nproc is None:
        return rest, None
    number = str(torch.cuda.device_count()) if known.nproc == "gpu" else known.nproc
    if known.nproc == "gpu" and number == "0":
        raise ConfigError(
            "--nproc gpu starts a rank for each CUDA device, and there is none: give a number of "
            "ranks, such as --nproc 2"
        )
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(
            f"--nproc {known.nproc!r} is not valid: it must be a number of ranks, at least 1, or "
            "gpu: one for each CUDA device"
        )
    if world is not None:
        raise ConfigError(
            f"--nproc {number} within the {world.size} tasks of torchrun or srun: leave out "
            "--nproc, or that launcher"
        )
    return rest, int(number)


def run_ranks(
    worker: Worker,
    args: tuple[Any, ...],
    world: World | None,
    nproc: int | None,
    options: GroupOptions,
) -> int:
    """Run `worker` in this process if torchrun or srun has started it as a rank (`world`), else in
    `nproc` ranks on this machine."""
    return (
        launch(worker, args, nproc or 1, options)
        if world is None
        else join(worker, args, world, options)
    )


def launch(
    worker: Worker, args: tuple[Any, ...], nproc: int, options: GroupOptions = GroupOptions()
) -> int:
    """Run `worker` in `nproc` ranks on this machine and return the result of rank 0. Call it from
    the main thread.

    `worker` is a top-level function, and `args` can be pickled. For one rank it is called in this
    process, without a process group.

    Returns 1, after showing the traceback or the signal, if a rank raised or died.

    Raises:
        UserError: a rank raised it, there are too few devices, or `check_connections` raised; the
            last two before anything is started.
        OSError: a rank found the disk full, or a file that it may not use.
    """
    if nproc == 1:
        _divide_cores(1)
        return worker(*args, World())
    check_connections(World(nproc - 1, nproc, nproc - 1, nproc).device(options.device), os.environ)
    store = TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    hub = Hub(
        LOCAL,
        nproc,
        lambda _: _kill(processes),
        watch=partial(_failed, processes),
        died=partial(_end_of, processes),
    )
    try:
        with _passing_signals_on(hub, processes):
            for rank in range(nproc):
                world = World(rank, nproc, rank, nproc, (LOCAL, store.port))
                process = multiprocessing.get_context("spawn").Process(
                    target=_local_rank, args=(worker, args, world, options, hub.port)
                )
                process.start()
                processes.append(process)
            while hub.cause is None and any(process.exitcode is None for process in processes):
                time.sleep(TICK_SECONDS)
            hub.wait(10 * SETTLE_SECONDS)
    finally:
        _kill(processes)
        # wait until they are gone, and with them their locks and the memory of their devices
        for killed in processes:
            killed.join(10 * SETTLE_SECONDS)
        hub.close()
    if hub.cause is None and not _failed(processes) and hub.result is not None:
        return hub.result
    rank = next((rank for rank, process in enumerate(processes) if process.exitcode), 0)
    return _show(
        hub.cause or Failure(rank, "died", _exit_text(processes[rank].exitcode), time.time())
    )


def join(
    worker: Worker, args: tuple[Any, ...], world: World, options: GroupOptions = GroupOptions()
) -> int:
    """Run `worker` in this process, one of the ranks that another launcher has started, and return
    its result.

    If any rank fails, all ranks exit, with status 1, or 2 after a UserError; the first rank of each
    machine shows the error. Raises ConfigError as `check_connections` does.
    """
    check_connections(options.device, os.environ)
    host, _ = world.address
    store = _store(world, options)
    hub = None
    if world.rank == 0:
        hub = Hub(host if host in (LOCAL, "localhost") else "", world.size, lambda _: None).start()
        store.set(HUB_KEY, str(hub.port))
    address, leave = (host, int(store.get(HUB_KEY))), partial(_leave, world)
    lifeline = Lifeline(address, world.rank, leave, patience=options.standstill)
    status = _work(worker, args, world, options, lifeline, store)
    if hub is not None:
        hub.wait(10 * SETTLE_SECONDS)
        hub.close()
    return status


def _local_rank(
    worker: Worker, args: tuple[Any, ...], world: World, options: GroupOptions, hub_port: int
) -> None:
    """Run a rank that `launch` has started. It shows no errors; its parent does."""
    requests = Requests()
    address = (LOCAL, hub_port)
    lifeline = Lifeline(
        address, world.rank, lambda _: os._exit(1), requests, patience=options.standstill
    )
    for number in obeyed():
        signal.signal(number, lambda number, frame: requests.add(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, obeyed())
    if "lo" in [name for _, name in socket.if_nameindex()]:
        # this machine's name may resolve to nothing, or to a network that is down
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host, port = world.address
    os.environ |= {  # as under torchrun, for libraries that look
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.local_rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    store = TCPStore(host, port, timeout=timedelta(seconds=options.timeout))
    _work(worker, args, replace(world, requests=requests), options, lifeline, store)


def _work(
    worker: Worker,
    args: tuple[Any, ...],
    world: World,
    options: GroupOptions,
    lifeline: Lifeline,
    store: Any,
) -> int:
    try:
        _enter_group(world, options, store)
        status = worker(*args, world)
        dist.all_reduce(torch.zeros(()))  # no rank leaves before all have finished
        dist.destroy_process_group()
    except BaseException as error:
        settle_output()
        lifeline.fail(error)
    lifeline.done(status)
    return status


def _store(world: World, options: GroupOptions) -> Any:
    """Return the key-value store of all ranks; torch's launcher hosts it, or else rank 0."""
    host, port = world.address
    url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    store, _, _ = next(
        rendezvous(url, world.rank, world.size, timeout=timedelta(seconds=options.timeout))
    )
    # torchrun keeps its store, with addresses of ranks that are gone
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt {attempt}", store)


def _enter_group(world: World, options: GroupOptions, store: Any) -> None:
    """Initialize the default process group: gloo for tensors on the CPU, and on a GPU the backend
    of that device in addition."""
    device = world.device(options.device)
    _divide_cores(world.local_size)
    # a broken communicator ends the process
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    backends, bound = "gloo", None
    if is_gpu(device):
        gpu_module(device).set_device(device)
        gpu_module(device).init()  # DeviceMesh would choose a device by itself otherwise
        backends = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        # all ranks then create communicators here, not two of them at their first send
        bound = device
    dist.init_process_group(
        backends,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=options.timeout),
        device_id=bound,
    )


def _divide_cores(local_size: int) -> None:
    """Set the number of threads of an operation to this rank's part of the cores, unless
    OMP_NUM_THREADS is set."""
    threads = max(1, num_cores() // local_size)
    if "OMP_NUM_THREADS" not in os.environ and (
        local_size > 1 or threads < torch.get_num_threads()
    ):
        torch.set_num_threads(threads)


def check_connections(device: torch.device, environment: Mapping[str, str]) -> None:
    """Raise ConfigError for `CUDA_DEVICE_MAX_CONNECTIONS=1`, with which ranks on GPUs can deadlock.

    All streams of a GPU then share one hardware queue. An NCCL kernel occupies it until the other
    ranks have launched the same operation, and with several communicators (of the pipeline, the
    experts and the shards) two ranks may have launched two operations in opposite order.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if is_gpu(device) and environment.get(name) == "1":
        raise ConfigError(
            f"the environment has {name}=1: with one queue per GPU, NCCL operations of several "
            "process groups can wait for each other forever, and none of them overlaps with "
            f"compute: unset {name}, or set it to 8 (CUDA's default) or more"
        )


def _leave(world: World, failure: Failure | None) -> None:
    """End this process, which another launcher has started, together with all others."""
    failure = failure or Failure(0, "died", "cannot be reached any more", 0.0)
    if world.local_rank == 0 or (world.rank == 1 and failure.kind == "died"):
        print(failure.describe(), file=sys.stderr, flush=True)
    os._exit(2 if failure.kind == "user" else 1)


def _show(failure: Failure) -> int:
    """Show the error of the rank that ended the job, as if it had happened in this process."""
    if failure.kind == "user":
        raise UserError(failure.text) from None
    if failure.kind == "file":
        raise OSError(failure.number, failure.text, failure.file or None) from None
    if sys.stdout.isatty():
        print("\x1b[?25h", end="")  # show the cursor, which rank 0's progress bar has hidden
    print(failure.describe(), file=sys.stderr)
    return 1


def _failed(processes: Sequence[BaseProcess]) -> dict[int, str]:
    """Return how each process that has failed so far ended, by its id."""
    return {
        process.pid: _exit_text(process.exitcode)
        for process in processes
        if process.exitcode and process.pid
    }


def _end_of(processes: Sequence[BaseProcess], pid: int) -> str:
    """Return how a process ended whose sockets were just closed."""
    process = next((process for process in processes if process.pid == pid), None)
    if process is None:
        return _exit_text(None)
    process.join(SETTLE_SECONDS)
    return _exit_text(process.exitcode)


def _kill(processes: Sequence[BaseProcess]) -> None:
    """Kill the processes that still run."""
    for process in processes:
        process.kill()


def _exit_text(status: int | None) -> str:
    if status is None or status == 0:
        return "ended before its work was done"
    if status > 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (
        ", as the kernel also does when memory runs out" if name == "SIGKILL" else ""
    )


@contextlib.contextmanager
def _passing_signals_on(hub: Hub, processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Pass the signals that make requests on to the ranks; kill the ranks if one that ends a run is
    repeated.

    The signals are blocked in this thread, and therefore in the ranks from their start until they
    have handlers; the hub's thread receives them.
    """
    # the resource tracker ignores the others by itself
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*HELD, signal.SIGHUP))
    resource_tracker.ensure_running()  # starting it later would unblock them
    signal.pthread_sigmask(signal.SIG_BLOCK, obeyed())

    def end() -> None:
        _kill(processes)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    with stop_signals(hub.request, end):
        hub.start(unblocked=obeyed())
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
