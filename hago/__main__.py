"""`python -m hago`: the command line."""

import sys

from hago.cli import main

if __name__ == "__main__":
    sys.exit(main())
