"""Runs commands in processes forked from one that has imported their modules already, which takes
four seconds of every real start.

The server is the one that ranks are forked from (`ranks`). The processes that a command itself
starts are forked, too: ranks of a launch from the command, workers of a plan from the server.
Everything else is as in a process of its own: arguments, environment, streams, signals, exit
status. Real processes (`fresh_python`) test how processes start, and that no rank outlives its
parent.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkServerContext
from types import SimpleNamespace
from typing import Any

IMPORTED_BEFORE = [
    "fsspec",
    "pytest",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "lather.commands.sweep",
    "lather.commands.train",
    "lather.memory.plan",
    "lather.train.plot",
    "matplotlib.backends.backend_agg",
]


@functools.cache
def server() -> ForkServerContext:
    """Return the one server of this process. Its first user decides what it imports, so this is
    where it gets its modules, for all users."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_BEFORE)
    ForkServerContext.set_forkserver_preload = lambda self, names: None  # type: ignore[method-assign, assignment, misc]
    return context


def collect_garbage_rarely() -> None:
    """Leave what exists now out of this process's collections of garbage, and collect less often:
    Python would search half a million objects of imported modules again and again, which takes a
    twentieth of the time of tests."""
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)


def stay_on_one_core(number: int) -> None:
    """Keep this process and all that it will start on the core with this number, counted round;
    Lather still sees all cores in it.

    Ranks mostly wait for each other, and on one core they wake each other sooner. The other cores
    are free for other tests."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    os.sched_getaffinity = lambda process: {*cores}


def without_fsync() -> None:
    """Leave data to the operating system in this process: waiting for the disk takes a tenth of the
    time of runs, and no test cuts the power."""
    os.fsync = lambda file: os.fstat(file) and None  # a file that is not open is still an error


def start_ranks_in(context: BaseContext) -> None:
    """Start the ranks of this process's launches, and the runs of its sweeps, in a context of
    multiprocessing, in place of new interpreters."""
    from lather.parallel.launch import start
    from lather.sweep import work

    for module in (start, work):
        module.multiprocessing = SimpleNamespace(get_context=lambda _: context)  # type: ignore[assignment, attr-defined]


class ForkedPython(subprocess.Popen[str]):
    """Runs `python ARGUMENTS`, which begin with a script, `-m MODULE` or `-c CODE`; other options
    are those of Popen, without a standard input."""

    def __init__(
        self, arguments: Sequence[object], *, start_new_session: bool = False, **options: Any
    ) -> None:
        self._in_new_session = start_new_session
        super().__init__([str(argument) for argument in arguments], text=True, **options)

    def _execute_child(
        self,
        args: list[str],
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        *rest: Any,
    ) -> None:
        """Start the process from the server, in place of a fork and exec of this process."""
        cwd, env = rest[:2]
        pipes = rest[5:11]
        streams = {
            number: Connection(os.dup(fd))
            for number, fd in ((1, pipes[3]), (2, pipes[5]))
            if fd >= 0
        }
        environment = dict(os.environ if env is None else env)
        self._process = server().Process(
            target=_run, args=(args, cwd or os.getcwd(), environment, streams, self._in_new_session)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        self._process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


def fresh_python(arguments: Sequence[object], **options: Any) -> subprocess.Popen[str]:
    """Run `python ARGUMENTS` in a process that is started as users start it."""
    return subprocess.Popen([sys.executable, *map(str, arguments)], text=True, **options)


def _run(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    streams: dict[int, Connection],
    in_new_session: bool,
) -> None:
    """Make the new process as if it had just been started, and run the script or module in it."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if in_new_session:
        os.setsid()
    for number, stream in streams.items():
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    collect_garbage_rarely()
    _fork_instead_of_starting()
    without_fsync()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def _fork_instead_of_starting() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    start_ranks_in(multiprocessing.get_context("fork"))
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # the server is that of this process
    ForkServerContext.set_forkserver_preload = lambda self, names: None  # type: ignore[method-assign, assignment, misc]
