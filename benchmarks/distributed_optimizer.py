"""What a rank of a sharded optimizer sends, keeps and computes: the same as `lather bench distributed`; see `lather.bench.distributed`."""

import sys

from lather.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "distributed", *sys.argv[1:]]))
