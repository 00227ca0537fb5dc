"""Measures time and memory of optimizer steps alike for every library.

Time is the mean over whole intervals, and the median over interleaved rounds. Temporary memory on
CUDA comes from the allocator's statistics. The CPU's allocator keeps none: there the profiler
reports each allocation and each release, those inside an operation included, and the maximum of the
running sum counts (scratch space that MKL allocates by itself is not seen). State is every storage
that can be reached from the optimizer and is not a parameter's or a gradient's, counted once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.contestants import Contestant
from lather.device import is_gpu


def run_steps(contestant: Contestant, num_steps: int) -> None:
    for _ in range(num_steps):
        contestant.set_gradients()
        contestant.step()


def time_steps(contestant: Contestant, num_steps: int, device: torch.device) -> float:
    """Time `num_steps` steps, without the hand-over of gradients; returns the mean milliseconds of
    a step."""
    if is_gpu(device):
        return _time_steps_cuda(contestant, num_steps)
    seconds = 0.0
    for _ in range(num_steps):
        contestant.set_gradients()
        start = time.perf_counter()
        contestant.step()
        seconds += time.perf_counter() - start
    return 1e3 * seconds / num_steps


def _time_steps_cuda(contestant: Contestant, num_steps: int) -> float:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(num_steps)
    ]
    torch.cuda.synchronize()
    for start, end in events:
        contestant.set_gradients()
        start.record()
        contestant.step()
        end.record()
    torch.cuda.synchronize()
    return float(sum(start.elapsed_time(end) for start, end in events)) / num_steps


def time_rounds(
    contestants: Sequence[Contestant], num_steps: int, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Time all contestants in each round, in an order that turns; returns milliseconds per step,
    the mean of `num_steps`, by round.

    The contestants must have done their first step and one more interval.
    """
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for index in range(rounds):
        turn = index % len(contestants)
        for contestant in (*contestants[turn:], *contestants[:turn]):
            times[contestant.name].append(time_steps(contestant, num_steps, device))
    return times


def percentiles(values: Sequence[float]) -> dict[str, float]:
    median, p20, p80 = np.percentile(values, (50, 20, 80))
    return {"median": float(median), "p20": float(p20), "p80": float(p80)}


def peak_temporary_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Run `run`; returns the most bytes allocated at one time during it, beyond those at its
    start."""
    if is_gpu(device):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with (
        _quiet_stderr(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        run()
    # reads events as they were recorded: turning them into Python objects takes seconds
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(0, *np.cumsum(changes).tolist()) if changes else 0


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Hide the two lines that the profiler's C++ part writes at each use, which no option turns
    off."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def state_bytes(contestant: Contestant) -> int:
    """The bytes that the optimizer keeps between steps: all storages that can be reached from it,
    each counted once."""
    gradients = (g for step in contestant.gradients for g in step)
    not_state = {t.untyped_storage().data_ptr() for t in (*contestant.params, *gradients)}
    sizes = {}
    for _, tensor in reachable_tensors(vars(contestant.optimizer)):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_state:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def reachable_tensors(root: object) -> Iterator[tuple[str, Tensor]]:
    """Yield path and tensor for each tensor in nested containers (keys included) and attributes,
    each object once."""
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [("", root)]
    while stack:
        path, x = stack.pop()
        if id(x) in seen or isinstance(
            x, type | ModuleType | FunctionType | BuiltinFunctionType | MethodType | str
        ):
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            yield path, x
        elif isinstance(x, Mapping):
            stack.extend((path, key) for key in x)
            stack.extend(
                (f"{path}.{key}" if isinstance(key, str) else path, value)
                for key, value in x.items()
            )
        elif isinstance(x, list | tuple | set | frozenset):
            stack.extend((path, value) for value in x)
        else:
            names = [name for cls in type(x).__mro__ for name in getattr(cls, "__slots__", ())]
            slots = {
                name: getattr(x, name)
                for name in names
                if isinstance(name, str) and hasattr(x, name)
            }
            stack.extend(
                (f"{path}.{name}", value)
                for name, value in {**getattr(x, "__dict__", {}), **slots}.items()
            )
