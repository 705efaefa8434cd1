"""The version of mpigrad: the only place that has it."""

__version__ = "0.1.0.dev0"
