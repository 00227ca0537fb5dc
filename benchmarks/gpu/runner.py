"""Runs parts, each in a process with a time limit, and remembers which are done.

`state.json` has an entry for each part. A part is done again if it has not been done, if the code
has changed (`fingerprint`), or with `fresh`. A part that fails or is too slow stops nothing: its
whole process group is ended, and the next part starts. If the runner is ended, so is its part,
which would otherwise hold the device while the next call measures.

Where time is short, the parts that this code has not tried come first, and a part is left for the
next call if its limit is more than what is left of the time. So the same call, made again and
again, runs every part, and then those again that failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.needs import missing
from benchmarks.gpu.parts import ROOT, MeasuredPart

Status = Literal["done", "failed", "out of time", "not possible"]
CODE = ("src/lather/**/*.py", "tests/gpu/*", "benchmarks/*.py", "benchmarks/gpu/*")
PR_SET_PDEATHSIG = 1
"""The number by which Linux's prctl(2) takes the signal that a process gets when its parent
ends."""


@dataclass(frozen=True)
class PartOutcome:
    """How a part ended."""

    status: Status
    seconds: float
    exit_status: int | None
    """The exit status of its process; None: it was ended, or never started."""
    fingerprint: str
    """Fingerprint of the code and of the part's arguments."""


def _digest_of_code(root: Path) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in CODE for path in root.glob(pattern) if path.is_file()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


class Runner:
    """Runs the parts of a folder."""

    def __init__(
        self, folder: Path, say: Callable[[str], object] = print, root: Path = ROOT
    ) -> None:
        self.folder, self._say, self._root = folder, say, root
        self._code = _digest_of_code(root)
        folder.mkdir(parents=True, exist_ok=True)

    def fingerprint(self, part: MeasuredPart) -> str:
        """Compute a fingerprint, equal for equal code and arguments, in a repository or in a mere
        copy of one, wherever it lies."""
        arguments = repr(part.arguments).replace(str(self._root), "")
        return hashlib.sha256(self._code + arguments.encode()).hexdigest()[:16]

    def run(
        self,
        parts: Sequence[MeasuredPart],
        *,
        fresh: bool = False,
        end: float = math.inf,
        after: Callable[[], object] = lambda: None,
    ) -> dict[str, PartOutcome]:
        """Run the parts whose limits are over by `end`, in seconds of `time.monotonic`; returns the
        outcome of each, those of earlier calls that still hold included. `after` is called after
        each part that was run."""
        outcomes: dict[str, PartOutcome] = {}
        for part in parts:
            if not fresh and (outcome := self.earlier(part)):
                self._say(f"{part.name}: done before, in {outcome.seconds:.0f} s")
                outcomes[part.name] = outcome
        left = [part for part in parts if part.name not in outcomes]
        for part in left if fresh else sorted(left, key=self.is_tried):
            if time.monotonic() + part.seconds > end:
                continue
            outcomes[part.name] = self.run_once(part)
            self._remember(part.name, outcomes[part.name])
            after()
        return outcomes

    def run_once(self, part: MeasuredPart) -> PartOutcome:
        """Run a part whatever happened before, and do not remember it."""
        note = f" ({part.note})" if part.note else ""
        self._say(f"{part.name}: {part.title}, at most {part.seconds:.0f} s{note}")
        outcome = self._run(part)
        self._say(f"{part.name}: {outcome.status} after {outcome.seconds:.0f} s")
        return outcome

    def is_tried(self, part: MeasuredPart) -> bool:
        """Return whether this code has run the part, with whatever outcome."""
        outcome = self.last(part.name)
        return outcome is not None and outcome.fingerprint == self.fingerprint(part)

    def earlier(self, part: MeasuredPart) -> PartOutcome | None:
        """Return how this code did the part before; None if it did not."""
        outcome = self.last(part.name)
        done = outcome is not None and outcome.status == "done" and self.is_tried(part)
        return outcome if done else None

    def last(self, name: str) -> PartOutcome | None:
        """Return how a part ended when any code last ran it; None if it never ran."""
        state = self._state().get(name)
        return None if state is None else PartOutcome(**state)

    def log(self, name: str) -> Path:
        """Return the file of the part's output."""
        return self.folder / f"{name}.log"

    def _state(self) -> dict[str, dict[str, Any]]:
        path = self.folder / "state.json"
        state: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        return state

    def _remember(self, name: str, outcome: PartOutcome) -> None:
        aside = self.folder / "state.partial.json"
        aside.write_text(json.dumps({**self._state(), name: asdict(outcome)}, indent=1))
        os.replace(aside, self.folder / "state.json")

    def _run(self, part: MeasuredPart) -> PartOutcome:
        mark = self.fingerprint(part)
        if lacks := missing(part.needs):
            self.log(part.name).write_text(f"needs {', '.join(map(str, lacks))}\n")
            return PartOutcome("not possible", 0.0, None, mark)
        for path in self.folder.glob(f"{part.name}*.jsonl"):  # these rows are of an earlier run
            path.unlink()
        start = time.monotonic()
        environment = {
            **os.environ,
            "PYTHONPATH": _joined(str(self._root / "src"), os.environ.get("PYTHONPATH")),
            "PYTHONUNBUFFERED": "1",
        }
        with self.log(part.name).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *part.arguments],
                cwd=self._root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its child processes can be ended with it
                preexec_fn=_ending_with_parent(),  # noqa: PLW1509  # a system call, safe after fork
            )
            try:
                exit_status = process.wait(part.seconds)
            except subprocess.TimeoutExpired:
                exit_status = None
            finally:
                _end(process)
        status: Status = (
            "out of time" if exit_status is None else "failed" if exit_status else "done"
        )
        return PartOutcome(status, round(time.monotonic() - start, 1), exit_status, mark)


def _ending_with_parent() -> Callable[[], object] | None:
    """Return the call by which a new process asks to be ended when its parent ends, by whatever
    signal; None where there is no such call, which is Linux's."""
    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children, which would hold memory of the device."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _joined(*paths: str | None) -> str:
    return os.pathsep.join(path for path in paths if path)
