"""See what happens: the trace of operations, its table, and the progress line."""

from mpigrad.profiling.progress_bar import Progress, duration

__all__ = ["Progress", "duration"]
