"""`python -m benchmarks.gpu.tests`: runs the files of tests/gpu, all at the same time, each in a
process of its own; prints every line with the file's name before it, and at the end how each file
ended.

The tests wait for compilers and for references on the CPU, and hardly for the device. Each process
gets an equal share of the cores: on 16 cores, seven files with 16 threads each were not done after
166 s, and with 2 threads each they took 109 s. A file of which one process would take longer than
all others is divided (`DIVIDED`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.parts import ROOT

FOLDER = ROOT / "tests/gpu"
OPTIONS = ("-v", "-c", str(FOLDER / "alone.ini"), "--rootdir", str(ROOT), "--noconftest")
"""The suite's conftest is left out: it checks shapes and needs packages for developers."""

DIVIDED = {"context_cuda": ("deepseek_v2", "qwen3_moe", "gpt_oss", "mixtral", "cudnn")}
"""Words, one of which is in the name of every test of the file; each gets a process. The tests of
context_cuda compile flex attention: on an H200, 70 to 90 s for each family."""

OUTCOME = re.compile(r"(FAILED|ERROR) |=+ .* in \d")
"""Matches the lines of a process that tell how its tests ended."""


@dataclass
class TestProcess:
    """The tests of a file, or those of it that have a word in their names."""

    __test__ = False

    name: str
    process: subprocess.Popen[str]
    outcome: list[str] = field(default_factory=list)
    """Lines that tell how the tests ended."""

    def read(self) -> None:
        """Print all lines."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"{self.name}: {line.rstrip()}", flush=True)
            if OUTCOME.match(line):
                self.outcome.append(line.strip("= \n"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all files; returns the exit status: 1 if a test failed, or was not done in time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, help="end the tests that take longer")
    options = parser.parse_args(arguments)
    files = sorted(path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py"))
    divided = [(file, word) for file in files for word in DIVIDED.get(file, ("",))]
    share = str(max(1, len(os.sched_getaffinity(0)) // len(divided)))
    tests = [_start(file, word, share) for file, word in divided]
    readers = [threading.Thread(target=test.read, daemon=True) for test in tests]
    for reader in readers:
        reader.start()
    end = None if options.seconds is None else time.monotonic() + options.seconds
    for test, reader in zip(tests, readers, strict=True):
        reader.join(None if end is None else max(0.0, end - time.monotonic()))
        if reader.is_alive():
            test.outcome.append(f"not done after {options.seconds:.0f} s")
            test.process.kill()  # compilers' processes end when they notice
            reader.join(5)  # it prints what is left
    for test in tests:
        print(f"{test.name}: {'; '.join(test.outcome)}")
    failed = [test.name for test in tests if test.process.wait()]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(files)} files passed")
    return int(bool(failed))


def _start(file: str, word: str, threads: str) -> TestProcess:
    selection = ("-k", word) if word else ()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *OPTIONS, *selection, str(FOLDER / f"test_{file}.py")],
        env={
            **os.environ,
            **dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), threads),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return TestProcess(f"{file} {word}".strip(), process)


if __name__ == "__main__":
    raise SystemExit(main())
