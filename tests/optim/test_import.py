"""`import lather.optim` needs torch alone, and is quick."""

import subprocess
import sys

PROBE = """
import sys, time
before_torch = time.process_time()
import torch
before = set(sys.modules)
start = time.process_time()
import lather.optim
seconds = time.process_time() - start
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(seconds / (start - before_torch), *sorted(new - set(sys.stdlib_module_names)))
"""


def test_import_needs_torch_alone_and_adds_at_most_an_eighth_of_its_time() -> None:
    """torch takes 1.7 s on a desktop core, so 0.2 s; as a share, since seconds say little beside other processes."""
    outputs = [
        subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=120).stdout for _ in range(3)
    ]
    for output in outputs:
        assert output.split()[1:] == ["lather"]
    assert min(float(output.split()[0]) for output in outputs) <= 1 / 8
