"""`import lather.optim` needs torch alone, and is quick."""

import subprocess
import sys

PROBE = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import lather.optim
seconds = time.perf_counter() - start
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(seconds, *sorted(new - set(sys.stdlib_module_names)))
"""


def test_import_needs_torch_alone_and_adds_at_most_a_fifth_of_a_second() -> None:
    outputs = [
        subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=120).stdout for _ in range(3)
    ]
    for output in outputs:
        assert output.split()[1:] == ["lather"]
    assert min(float(output.split()[0]) for output in outputs) <= 0.2
