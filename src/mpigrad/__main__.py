"""`python -m mpigrad` is the `mpigrad` command."""

import sys

from mpigrad.launch.cli import main

sys.exit(main())
