"""The program that `mpigrad run` starts on every rank.

    python -m mpigrad.launch.run_application NAME SETTINGS

SETTINGS is a pickle in base64, so that options are parsed only once, in the command.
"""

from __future__ import annotations

import base64
import pickle
import re
import sys
import time
import traceback
from typing import Any

from mpi4py import MPI

from mpigrad.compilation import store_programs
from mpigrad.guard import end_job, end_with_error
from mpigrad.launch.applications import application

_DELAY = 1.0  # seconds that the other ranks wait, so that rank 0 reports a common error
_PARAMETER = re.compile(r"\b(resume|overwrite)=True\b")  # an option on the command line


def main() -> int:
    """Run the application named in sys.argv. An error is printed once and ends all ranks."""
    name, packed = sys.argv[1:]
    world = MPI.COMM_WORLD
    try:
        store_programs()
        settings: Any = pickle.loads(base64.urlsafe_b64decode(packed))
        application(name).run_function()(settings)
    except Exception as error:
        # Most errors are raised on all ranks. Rank 0 prints its error and ends the job. Other ranks
        # print theirs only if rank 0 succeeds.
        if isinstance(error, ValueError | OSError) or str(error).startswith("mpigrad"):
            if end_with_error(_with_name(error)):
                return 0
            prefix = "" if world.rank == 0 else f"rank {world.rank}: "
            text = f"{prefix}{_with_name(error)}"
        else:
            time.sleep(_DELAY * (world.rank > 0))
            failed = f"mpigrad: rank {world.rank} of {world.size} failed"
            text = f"{traceback.format_exc()}{failed}"
        end_job(text)
    return 0


def _with_name(error: BaseException) -> str:
    text = _PARAMETER.sub(r"--\1", str(error))
    return text if text.startswith("mpigrad") else f"mpigrad: {text}"


if __name__ == "__main__":
    sys.exit(main())
