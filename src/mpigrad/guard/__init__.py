"""The guard: end all ranks if one fails, and report ranks that wait for each other."""

from mpigrad.guard.failure import (
    call_at_job_end,
    count_faults,
    end_all_on_errors,
    end_job,
    end_with_error,
    forget_import,
    install,
)
from mpigrad.guard.settings import guard_enabled, timeout_seconds

__all__ = [
    "call_at_job_end",
    "count_faults",
    "end_all_on_errors",
    "end_job",
    "end_with_error",
    "forget_import",
    "guard_enabled",
    "install",
    "timeout_seconds",
]
