"""`python -m sparse_mla` is the command `sparse-mla`."""

import sys

from sparse_mla.cli import main

if __name__ == "__main__":
    sys.exit(main())
