"""Profiles some steps of a run: a trace of each rank, and a picture of where the time went.

    RUN/profile/steps-10-13/rank-0.json.gz        a Chrome trace, for https://ui.perfetto.dev
    RUN/profile/steps-10-13/rank-0.memory.pickle  a snapshot of allocations (`profile.memory`), for
                                                  https://docs.pytorch.org/memory_viz
    RUN/profile/steps-10-13/times.png             the picture, and its numbers in times.json

A trace begins with the first of the steps and ends with the last, so it has what happens between
them, too: validations and checkpoints. Picture and numbers have the steps alone.
"""

from __future__ import annotations

import gzip
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lather.config.config import Config
from lather.config.step_ranges import step_ranges
from lather.device import gpu_module, is_gpu
from lather.files import optional_file, reason, replaced, write_json
from lather.lines import fit
from lather.parallel.agreement import gather
from lather.parallel.mesh import Mesh
from lather.profiled import profiled
from lather.torch_private import dump_memory_snapshot, record_memory_history
from lather.train.step_times import OTHER, StepTimes, read_events, step_times

FOLDER = "profile"
"""Name of the folder in a run directory."""


class StepProfile:
    """The profile of a run on one rank. All ranks call the same methods for the same steps."""

    def __init__(self, config: Config, mesh: Mesh, note: Callable[[str], None], step: int) -> None:
        """`step`: number of completed steps."""
        self.mesh, self.note, self.folder = mesh, note, Path(config.run_dir) / FOLDER
        self.ranges = step_ranges(config.profile.steps)
        self.records_memory = config.profile.memory and is_gpu(mesh.device)
        self._profiler: profile | None = None
        self._done: list[int] = []
        """Steps of the profile that has begun."""
        if self.ranges and max(steps[-1] for steps in self.ranges) <= step:
            note(f"no profile: profile.steps is {config.profile.steps}, and {step} steps are done")

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Enclose a step, and profile it if it is one of `profile.steps`."""
        around = next((steps for steps in self.ranges if number in steps), None)
        if around is None:
            yield
            return
        if self._profiler is None:
            self._start()
        try:
            with profiled(f"step.{number}"):
                yield
                if is_gpu(self.mesh.device):
                    gpu_module(self.mesh.device).synchronize(self.mesh.device)
        except BaseException:
            self._stop()
            raise
        self._done.append(number)
        if number == around[-1]:
            self.finish()

    def finish(self) -> None:
        """Write the profile, unless that is done already or none has begun."""
        if self._profiler is None:
            return
        profiler, done, self._done = self._profiler, self._done, []
        folder = self.folder / f"steps-{done[0]}-{done[-1]}"
        trace = folder / f"rank-{self.mesh.rank}.json.gz"
        times, why = None, ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.records_memory:
                dump_memory_snapshot(folder / f"rank-{self.mesh.rank}.memory.pickle")
            self._stop()
            times = _write_trace(profiler, trace)
        except (OSError, ValueError) as error:  # a ValueError if the trace is cut off
            self._stop()
            why = reason(error, folder) if isinstance(error, OSError) else str(error)
        of_ranks = gather((times, why), self.mesh.control_group)
        self._report(folder, of_ranks)

    def _start(self) -> None:
        if self.records_memory:
            record_memory_history(enabled=True)
        device = [ProfilerActivity.CUDA] if is_gpu(self.mesh.device) else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *device], record_shapes=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would write its addresses into the bar
        with warnings.catch_warnings():  # before 2.13 torch says that it keeps one cycle's events
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profiler.start()
        if self.mesh.size > 1:  # the profiler takes its time to start, differently on each rank
            dist.barrier(group=self.mesh.control_group)

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            if self.records_memory:
                record_memory_history(enabled=False)
        self._profiler = None

    def _report(self, folder: Path, of_ranks: list[tuple[StepTimes | None, str]]) -> None:
        """Draw the picture, and say where it is and what it shows; on rank 0, which has the times
        of all ranks."""
        if not of_ranks:
            return
        why = next((text for _, text in of_ranks if text), "")
        ranks = [times for times, _ in of_ranks if times is not None]
        if why:
            self.note(f"{folder} cannot be written ({why}): the run goes on without it")
            return
        from lather.train.profile_picture import colors_of_phases, draw_step_times, shares

        run, steps = folder.parent.parent, folder.name.removeprefix("steps-").replace("-", " to ")
        picture = folder / "times.png"
        with optional_file(picture, self.note):
            write_json(folder / "times.json", {"ranks": [asdict(times) for times in ranks]})
            draw_step_times(ranks, picture, f"{run.resolve().name}, steps {steps}")
        names = [*(name for name in colors_of_phases() if name != OTHER), OTHER]
        of_phases = shares([times.by_phase for times in ranks], names)
        largest = sorted(of_phases.items(), key=lambda item: -item[1])
        texts = ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)
        self.note(fit(f"profile of steps {steps}: {texts}"))
        self.note(fit(f"profile: {picture}, and rank-*.json.gz beside it for ui.perfetto.dev"))


def _write_trace(profiler: profile, path: Path) -> StepTimes:
    """Write the trace, compressed; return what it says of the steps."""
    with replaced(path) as aside:
        plain = aside.with_suffix(".json")
        partial = Path(f"{plain}.tmp")  # Kineto writes it and renames it at the end
        try:
            profiler.export_chrome_trace(str(plain))
            if not plain.exists():  # Kineto says nothing
                raise OSError("there is no space, or the folder is not writable")
            times = step_times(read_events(plain))
            with plain.open("rb") as file, gzip.GzipFile(aside, "wb", compresslevel=5) as packed:
                shutil.copyfileobj(file, packed)
        finally:
            plain.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
    return times
