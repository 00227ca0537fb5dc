"""Runs a function in several processes that are each other's ranks, for tests; no rank outlives the
call or the calling process.

Annotations are not checked in ranks, because that would take most of their time; the same functions
are checked in one process. Ranks are forked from a server that has imported their modules, which
would take each rank seconds, and that has done nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forked import collect_garbage_rarely, server, without_fsync
from lather.processes import end_with_parent


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
) -> list[Any]:
    """Run `function(rank, world_size, *args)` in `world_size` processes with a gloo group and one
    thread each; returns the results by rank.

    `function` is a top-level function of a test module. The first exception of a rank is raised
    here with that rank's traceback. Raises TimeoutError after `timeout` seconds.
    """
    context = server()
    file, name = function.__code__.co_filename, function.__qualname__
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = []
        for rank, (_, sender) in enumerate(pipes):
            target = (
                rank,
                world_size,
                file,
                name,
                pickle.dumps(args),
                f"file://{folder}/store",
                sender,
                dict(os.environ),
            )
            processes.append(context.Process(target=_run, args=target, daemon=True))
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            return _collect([receiver for receiver, _ in pipes], time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(set(range(len(receivers))) - set(results))} did not finish in time"
            )
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = receivers.index(receiver)
            try:
                kind, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if kind == "error":
                raise RuntimeError(f"rank {rank} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _run(
    rank: int,
    world_size: int,
    file: str,
    name: str,
    args: bytes,
    store: str,
    sender: Connection,
    environ: dict[str, str],
) -> None:
    collect_garbage_rarely()
    os.environ.clear()
    os.environ.update(environ)
    end_with_parent()
    without_fsync()
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        dist.barrier()  # a rank that ends a group early breaks off those that still connect to it
        result = _load(file, name)(rank, world_size, *pickle.loads(args))
        dist.barrier()
        sender.send_bytes(pickle.dumps(("result", result)))
    except BaseException:
        # lets the rank that failed first be heard first
        time.sleep(0.2 if "Connection closed" in traceback.format_exc() else 0)
        sender.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        sys.exit(1)


def _load(file: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(file).stem] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function
