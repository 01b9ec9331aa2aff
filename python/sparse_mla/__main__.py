"""`python -m sparse_mla` is the command `sparse-mla`."""

import sys

from sparse_mla.cli import main

sys.exit(main())
