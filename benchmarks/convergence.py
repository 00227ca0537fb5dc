"""Which rule learns how fast: the same as `lather bench convergence`; see `lather.bench.convergence`."""

import sys

from lather.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "convergence", *sys.argv[1:]]))
