"""What a pipeline rank keeps, and how long a step takes: the same as `lather bench pipeline`; see `lather.bench.pipeline`."""

import sys

from lather.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "pipeline", *sys.argv[1:]]))
