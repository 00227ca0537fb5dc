"""What MoE layers keep and what the loss needs: the same as `lather bench memory`; see `lather.bench.memory`."""

import sys

from lather.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "memory", *sys.argv[1:]]))
