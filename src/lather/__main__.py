"""`python -m lather` is the `lather` command."""

import sys

from lather.cli import main

if __name__ == "__main__":
    sys.exit(main())
