"""Nobody hangs: a failing rank ends all ranks, and those who wait for nothing are told so."""

from mpigrad.guard.failure import end_all_on_errors, end_job, install, when_all_have_ended
from mpigrad.guard.settings import guarded, timeout_seconds

__all__ = [
    "end_all_on_errors",
    "end_job",
    "guarded",
    "install",
    "timeout_seconds",
    "when_all_have_ended",
]
