"""What one step asks of a GPU, counted without one: the same as `lather bench launches`; see `lather.bench.launches`."""

import sys

from lather.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "launches", *sys.argv[1:]]))
