"""What `mpigrad run` starts on every rank.

    python -m mpigrad.launch.run_application NAME SETTINGS

SETTINGS is a pickle in base64, so that options are parsed once, in the command.
"""

from __future__ import annotations

import base64
import pickle
import sys
import time
import traceback
from typing import Any

from mpi4py import MPI

from mpigrad.guard import end_job
from mpigrad.launch.applications import application

_TURN = 1.0  # seconds that the other ranks leave to rank 0 for saying what all have found


def main() -> int:
    """Run the application named in sys.argv; an error is said once, and ends all ranks."""
    name, packed = sys.argv[1:]
    world = MPI.COMM_WORLD
    try:
        settings: Any = pickle.loads(base64.urlsafe_b64decode(packed))
        application(name).run_function()(settings)
    except Exception as error:
        # Most errors are raised on all ranks together. Rank 0 says it and ends the job; another
        # rank gets to say its own only where rank 0 has none.
        if world.rank > 0:
            time.sleep(_TURN)
        if isinstance(error, ValueError | OSError) or str(error).startswith("mpigrad"):
            where = "" if world.rank == 0 else f"rank {world.rank}: "
            text = f"{where}{_named(error)}"
        else:
            failed = f"mpigrad: rank {world.rank} of {world.size} failed"
            text = f"{traceback.format_exc()}{failed}"
        end_job(text)
    return 0


def _named(error: BaseException) -> str:
    text = str(error)
    return text if text.startswith("mpigrad") else f"mpigrad: {text}"


if __name__ == "__main__":
    sys.exit(main())
