"""The version of mpigrad, and the releases of JAX that it supports and was tested with."""

__version__ = "0.1.0.dev0"
OLDEST = (0, 8)
NEWEST_TESTED = (0, 12)
