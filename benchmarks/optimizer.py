"""SOAP against heavyball and pytorch_optimizer: the same as `lather bench optimizer`; see `lather.bench.optimizer`."""

import sys

from lather.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "optimizer", *sys.argv[1:]]))
