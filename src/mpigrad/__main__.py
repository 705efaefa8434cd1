"""Run the `mpigrad` command: `python -m mpigrad`."""

import sys

from mpigrad.launch.cli import main

sys.exit(main())
