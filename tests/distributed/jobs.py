"""Starts a job of several ranks in processes of its own, for tests of how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forked import fresh_python
from reaper import reaped

SECONDS = 10
"""Seconds in which a job has to end."""


@dataclass
class Job:
    """Processes of one job, each the leader of a process group."""

    folder: Path
    processes: list[subprocess.Popen[str]]
    num_ranks: int

    @classmethod
    def start(
        cls,
        script: str,
        folder: Path,
        task: str,
        num_ranks: int,
        environments: list[dict[str, str]] | None = None,
        *,
        python: Callable[..., subprocess.Popen[str]] = fresh_python,
    ) -> Job:
        """Run `script FOLDER TASK NUM_RANKS`, once or in each of the environments. Rank r writes
        its pid to `FOLDER/rank<r>`."""
        folder.mkdir()
        command = [script, folder, task, num_ranks]
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        pipe = subprocess.PIPE
        return cls(
            folder,
            [
                reaped(
                    python(
                        command,
                        env={**environment, **own},
                        stdout=pipe,
                        stderr=pipe,
                        start_new_session=True,
                    )
                )
                for own in environments or [{}]
            ],
            num_ranks,
        )

    def pids(self) -> list[int]:
        """Wait until all ranks are at work; returns their process ids."""
        files = [self.folder / f"rank{rank}" for rank in range(self.num_ranks)]
        deadline = time.monotonic() + 120
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, "the ranks did not start"
            assert any(process.poll() is None for process in self.processes), [
                process.communicate() for process in self.processes
            ]
            time.sleep(0.02)
        return [int(file.read_text()) for file in files]

    def end(self, event: Callable[[Job, list[int]], object]) -> tuple[list[int], str, str]:
        """Cause the event, which has to end the job in time; returns exit statuses, output and
        errors."""
        pids = self.pids()
        event(self, pids)
        start = time.monotonic()
        ends = [process.communicate(timeout=SECONDS) for process in self.processes]
        while any(is_alive(pid) for pid in pids):
            assert time.monotonic() - start < SECONDS, "a rank outlived the job"
            time.sleep(0.02)
        out, err = ("".join(texts) for texts in zip(*ends, strict=True))
        return [process.returncode for process in self.processes], out, err

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
