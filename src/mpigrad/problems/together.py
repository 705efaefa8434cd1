"""The same as `mpigrad.together`, under the name that it had."""

from mpigrad.together import equal_everywhere, from_root, together

__all__ = ["equal_everywhere", "from_root", "together"]
