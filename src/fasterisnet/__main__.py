"""`python -m fasterisnet` is the command `fasterisnet`."""

import sys

from fasterisnet.cli import main

if __name__ == "__main__":
    sys.exit(main())
