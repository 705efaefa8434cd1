"""`python -m mpigrad` is the `mpigrad` command."""

import sys

from mpigrad.cli import main

sys.exit(main())
