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
    """torch takes 1.7 s on a desktop core, so an eighth is 0.2 s. The limit is a share because
    seconds say little beside other processes."""
    shares = []
    # tries again if something else took its time
    while len(shares) < 3 and min(shares, default=1.0) > 1 / 8:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=120
        )
        share, *imported = done.stdout.split()
        assert imported == ["lather"]
        shares.append(float(share))
    assert min(shares) <= 1 / 8
