"""`python -m benchmarks.gpu.tests`: runs the files of tests/gpu, all at the same time, each in a
process of its own; prints every line with the file's name before it.

The tests wait for compilers and for references on the CPU, and hardly for the device. Each process
gets an equal share of the cores: on 16 cores, seven files with 16 threads each were not done after
166 s, and with 2 threads each they took 109 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from benchmarks.gpu.parts import ROOT

FOLDER = ROOT / "tests/gpu"
OPTIONS = ("-v", "-c", str(FOLDER / "alone.ini"), "--rootdir", str(ROOT), "--noconftest")
"""The suite's conftest is left out: it checks shapes and needs packages for developers."""


def main() -> int:
    """Run all files; returns the exit status: 1 if a test failed."""
    files = sorted(FOLDER.glob("test_*.py"))
    share = str(max(1, len(os.sched_getaffinity(0)) // len(files)))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), share)
    processes = {
        path.stem.removeprefix("test_"): subprocess.Popen(
            [sys.executable, "-m", "pytest", *OPTIONS, str(path)],
            env={**os.environ, **threads},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for path in files
    }
    readers = [
        threading.Thread(target=_print_lines, args=(name, process))
        for name, process in processes.items()
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    failed = [name for name, process in processes.items() if process.wait()]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(files)} files passed")
    return int(bool(failed))


def _print_lines(name: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{name}: {line}", end="", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
